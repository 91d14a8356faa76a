"""Closed-form maps from one model's KV cache to another's: what they are, and how they are applied.

Pure torch. Nothing here knows of engines, deployments or HTTP. The method is arXiv 2608.03893:
ridge regression from the position-free keys (values) of k source layers to those of each target
layer. `mappers.fitting` makes a mapper, `mappers.judging` judges it.

Entry points: `mappers.store.load_mapper`, `mappers.mapper.Mapper`, `mappers.fitting.fit.fit`,
`mappers.judging.score.score_mapper` and `mappers.fingerprint.fingerprint`. They are imported from
their modules, so that reading a fingerprint does not load torch.
"""
