"""Judging a mapper: what the target makes of mapped caches, beside controls, and the verdict.

Entry points: `mappers.judging.score.score_mapper` and, for reports, `mappers.judging.report`.
"""
