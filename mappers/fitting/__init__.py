"""Making a mapper: text through both models, moments, choice of layers, solution.

Entry point: `mappers.fitting.fit.fit`. Knows HF models by `mappers.capture`; never engines or HTTP.
"""
