"""Closed-form maps from one model's KV cache to another's: fit, check, apply, score.

Pure torch. Nothing here knows of engines, deployments or HTTP. The method is arXiv 2608.03893:
ridge regression from the position-free keys (values) of k source layers to those of each target
layer.

Entry points: `mappers.fit.fit`, `mappers.store.load_mapper`, `mappers.mapper.Mapper`,
`mappers.score.score_mapper` and `mappers.fingerprint.fingerprint`. They are imported from their
modules, so that reading a fingerprint does not load torch.
"""
