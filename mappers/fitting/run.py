"""One fit, stage by stage: read, choose layers, solve, judge, write.

Knows in which order the other modules of this package act; holds no mathematics itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cluster.errors import MapperError
from mappers.capture import TokenSequences
from mappers.fitting.accumulate import Alphas, Chooser, PassRunner, share_of, solve_all
from mappers.fitting.attention_weights import boundaries
from mappers.fitting.inputs import FitInputs
from mappers.fitting.networks import fit_networks, mapper_r2, spool_bytes
from mappers.fitting.passes import Pass, plan_solve
from mappers.fitting.progress import Bars, Stages
from mappers.fitting.select import choose_greedily, choose_layers
from mappers.fitting.solved import (
    Choice,
    Fits,
    heldout_r2,
    mapper_of,
    row_of,
    sweep,
    weights_of,
)
from mappers.fitting.sweep import SweepResult
from mappers.judging.records import ScoreReport
from mappers.judging.score import score_mapper
from mappers.manifest import (
    AttentionWeighting,
    DataRecord,
    LayerR2,
    MapperManifest,
    Networks,
    Support,
    created_by,
)
from mappers.mapper import LinearWeights, Mapper
from mappers.mlp import MlpWeights
from mappers.store import save_mapper
from mappers.supports import feature_width, groups


class FitRun:
    """One call of `fit` or `fit_shard`."""

    def __init__(
        self,
        inputs: FitInputs,
        bars: Bars,
        clock: Stages,
        *,
        checkpoint_s: float,
        shard: tuple[int, int] | None = None,
        shards: int | None = None,
    ) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        if (shard or shards) and inputs.settings.sweep and inputs.settings.attention_weights:
            raise MapperError(
                "a sweep with attention weights reads once more what it chose, which shards cannot "
                "know before; sweep without --attention-weights, then fit that k with them"
            )
        self._bars = bars
        self._clock = clock
        self._runner = PassRunner(
            source=inputs.source.geometry,
            target=inputs.target.geometry,
            feed=inputs.feed,
            work=inputs.work,
            bar=bars.bar,
            device=inputs.device,
            first_token_weight=inputs.settings.first_token_weight,
            checkpoint_s=checkpoint_s,
            shard=shard,
            shards=shards,
        )

    def whole(self, out_dir: Path) -> tuple[MapperManifest, int, SweepResult | None]:
        """Everything, to the written mapper; gives its manifest and number of weights."""
        inputs, settings = self._inputs, self._settings
        k, support, swept = settings.k_of(inputs.source.layers), settings.support, None
        chooser = self.choose()
        if settings.sweep:
            assert chooser.moments is not None, "a sweep is planned in one pass"
            with self._clock.stage("sweep"):
                choose_k = partial(self._chosen, chooser)
                swept = sweep(inputs, chooser.moments, choose_k, self._bars.bar)
            k, support = swept.best.k, swept.best.support
        chosen = self._chosen(chooser, k)
        fits, alphas = self.fits(chooser, k, support)
        if swept is not None and alphas is not None:
            with self._clock.stage("sweep"):
                swept = swept.with_row(row_of(inputs, chosen, fits, support, k, None))
                if not swept.best.attention_weights:
                    assert chooser.moments is not None
                    k, support = swept.best.k, swept.best.support
                    chosen = self._chosen(chooser, k)
                    fits, alphas = solve_all(chooser.moments, chosen, support, settings.ridge), None
        weighting = self._weighting(chooser, alphas, k, support)
        del chooser  # with the moments it may hold: judging needs room for both models
        linear = weights_of(chosen, fits)
        with self._clock.stage("score"):
            r2 = heldout_r2(inputs, chosen, fits)
            score = self._score(mapper_of(inputs, linear))
        weights: LinearWeights | MlpWeights = linear
        networks = None
        if settings.fallback and score is not None and score.verdict == "refuse":
            better = self._networks(linear, support)
            if better is not None:
                weights, networks, r2, score = better
        manifest = MapperManifest(
            kind="linear" if networks is None else "networks",
            networks=networks,
            source=inputs.source,
            target=inputs.target,
            support=support,
            k=k,
            source_layers=chosen,
            ridge=settings.ridge,
            first_token_weight=settings.first_token_weight,
            selection=settings.selection,
            attention_weighting=weighting,
            calibration=_record(inputs.feed.data),
            heldout=_record(inputs.heldout.data),
            heldout_r2=r2,
            score=score,
            weights_sha256="",
            created_by=created_by(),
        )
        return save_mapper(out_dir, weights, manifest), weights.parameters, swept

    def read_shard(self) -> None:
        """Read until a shard is done, which raises ShardWritten; returns if none is left."""
        chooser = self.choose()
        self.fits(chooser, self._settings.k_of(self._inputs.source.layers), self._settings.support)

    def choose(self) -> Chooser:
        """The first passes. A source that does not stay in memory leaves its KV on disk before."""
        inputs, settings = self._inputs, self._settings
        if inputs.feed.spool_dir is not None:
            with self._clock.stage("spool"):
                self._spool()
        keep = not inputs.plan.solve or settings.selection == "greedy"
        with self._clock.stage("accumulate"):
            return self._runner.choose(
                inputs.plan.first, weigh=settings.attention_weights, keep=keep
            )

    def fits(self, chooser: Chooser, k: int, support: Support) -> tuple[Fits, Alphas | None]:
        """Keys and values solved, in further passes over the text where the plan says so."""
        inputs, settings = self._inputs, self._settings
        passes = self._solving(k, support)
        chosen = self._chosen(chooser, k)
        if not passes:
            assert chooser.moments is not None, "what is solved in one pass is kept"
            with self._clock.stage("solve"):
                return solve_all(chooser.moments, chosen, support, settings.ridge), None
        alphas = self._alphas(chooser, k, support)
        after = len(inputs.plan.first)
        with self._clock.stage("fit chosen layers"):
            fits = self._runner.solve(passes, after, chosen, support, settings.ridge, alphas)
        return fits, alphas

    def _solving(self, k: int, support: Support) -> tuple[Pass, ...]:
        inputs, settings = self._inputs, self._settings
        if not (settings.sweep and settings.attention_weights):
            return inputs.plan.solve
        # What a sweep chose is known only now, and its moments stay until both are compared.
        room = inputs.plan.memory_bytes - max(one.moments_bytes for one in inputs.plan.first)
        shapes = inputs.source.geometry, inputs.target.geometry
        return plan_solve(*shapes, support, k, room, weighted=True)

    def _alphas(self, chooser: Chooser, k: int, support: Support) -> Alphas | None:
        if chooser.relevance is None:
            return None
        shapes = self._inputs.source.geometry, self._inputs.target.geometry
        width = feature_width(support, k, *shapes)
        return chooser.relevance.alphas(groups(support, *shapes), width)

    def _chosen(self, chooser: Chooser, k: int) -> Choice:
        if self._settings.selection == "top":
            return choose_layers(chooser.score_SL, k)
        assert chooser.moments is not None, "greedy selection keeps the moments it needs"
        return choose_greedily(chooser.moments, k)

    def _spool(self) -> None:
        inputs = self._inputs
        inputs.work.make()
        share = share_of(len(inputs.feed.batches), self._runner.shard)
        tokens = sum(inputs.feed.batches[at].numel() for at in share)
        # Merging shards reads no text, unless a weighted fit follows in this call.
        if self._runner.shards is None:
            inputs.feed.spool(share, self._bars.bar("source, calibration tokens", tokens))
        if self._runner.shard is None:
            batches = range(len(inputs.heldout.batches))
            bar = self._bars.bar("source, held-out tokens", inputs.heldout.data.tokens)
            inputs.heldout.spool(batches, bar)
        inputs.models.release_source()

    def _networks(
        self, linear: LinearWeights, support: Support
    ) -> tuple[MlpWeights, Networks, LayerR2, ScoreReport] | None:
        """Networks on top of a linear map that was refused; None when they are refused, too."""
        disk_gb = spool_bytes(self._inputs) / 1e9
        self._bars.say(
            f"the linear map is refused: training networks on top of it, from {disk_gb:.2f} GB of "
            f"caches in {self._inputs.work.folder}"
        )
        with self._clock.stage("networks"):
            trained, settings = fit_networks(self._inputs, linear, support, self._bars.bar)
        mapper = mapper_of(self._inputs, trained)
        with self._clock.stage("score"):
            score = self._score(mapper)
            if score is None or score.verdict == "refuse":
                self._bars.say("the networks are refused as well; the linear map is kept")
                return None
            r2 = mapper_r2(self._inputs, mapper)
        return trained, Networks(hidden_units=settings.hidden, residual=True), r2, score

    def _score(self, mapper: Mapper) -> ScoreReport | None:
        """The verdict; None where one model had to make room for the other and cannot come back."""
        inputs = self._inputs
        if not inputs.both_fit:
            return None
        return score_mapper(
            inputs.models.source,
            inputs.models.target,
            mapper,
            inputs.heldout.data,
            prefix_tokens=self._settings.prefix_tokens,
            advance=self._bars.bar("held-out windows", len(inputs.heldout.data.ids_ST)),
        )

    def _weighting(
        self, chooser: Chooser, alphas: Alphas | None, k: int, support: Support
    ) -> AttentionWeighting | None:
        if alphas is None or chooser.relevance is None:
            return None
        width = feature_width(
            support, k, self._inputs.source.geometry, self._inputs.target.geometry
        )
        keys, values = (
            tuple(tuple(round(alpha, 6) for alpha in row) for row in part.tolist())
            for part in alphas
        )
        return AttentionWeighting(
            power=self._settings.attention_power,
            boundaries=len(boundaries(self._settings.sequence_tokens)),
            least_effective_tokens=min(chooser.relevance.tokens, 2 * width),
            alpha_k_LG=keys,
            alpha_v_LG=values,
        )


def _record(data: TokenSequences) -> DataRecord:
    return DataRecord(
        tokens=data.tokens,
        texts=data.texts,
        sequence_tokens=data.ids_ST.shape[1],
        sha256=data.sha256,
    )
