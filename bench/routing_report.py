"""From collected answers to the numbers of the routing bench.

It reads answers and a calibration, and computes; it asks nobody and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from bench import routing_metrics as metrics
from bench.prompts import Prompt, words
from bench.routing_collect import Answer, Cache
from bench.routing_costs import Prices
from router.calibration import Calibration
from router.scores import ScoreSpec

SMALL, LARGE = "small", "large"
LIKE = 0.5
"""An answer whose likeness is lower counts as unlike."""


def cascade_run(target: float, way: str, calibration_id: str) -> str:
    """Name of a run in the cache; `way` is `mapped` or `recompute`."""
    return f"{target:g} {way} {calibration_id}"


def score_of(margins: Sequence[float | None], spec: ScoreSpec) -> float | None:
    """The policy's scalar of a whole answer: the lowest value of its statistic, in nats.

    The token that ends an answer is not judged, because nothing could follow it.
    """
    statistic, lowest = spec.start(), None
    for margin in margins[:-1][: spec.last_token]:
        if margin is None:
            continue
        statistic.push(margin)
        value = statistic.value
        if value is not None:
            lowest = value if lowest is None else min(lowest, value)
    return lowest


class Study:
    """All answers of the held-out prompts, judged in both ways."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        calibration_prompts: Sequence[Prompt],
        cache: Cache,
        calibration: Calibration,
        targets: Sequence[float],
        names: Mapping[str, str],
        prices: Prices,
    ) -> None:
        self._prompts = prompts
        self._calibration_prompts = calibration_prompts
        self._cache = cache
        self._calibration = calibration
        self._targets = targets
        self._names = names
        self._prices = prices
        keys = [one.key for one in prompts]
        self._small = cache.run(SMALL, keys)
        self._large = cache.run(LARGE, keys)
        self._mapped = {
            one: cache.run(cascade_run(one, "mapped", calibration.calibration_id), keys)
            for one in targets
        }

    @cached_property
    def _checked(self) -> list[int]:
        return [at for at, one in enumerate(self._prompts) if one.check is not None]

    @cached_property
    def _scores(self) -> list[float | None]:
        return [score_of(one.margins or (), self._calibration.score) for one in self._small]

    def _recomputed(self, target: float) -> list[Answer]:
        """The same cascade by reading again: other answers only where KV was really mapped."""
        run = cascade_run(target, "recompute", self._calibration.calibration_id)
        return [self._cache.get(one.key, run) or one for one in self._mapped[target]]

    def _right(self, answers: Sequence[Answer]) -> list[float]:
        """1 or 0 for each prompt with a check."""
        found = []
        for at in self._checked:
            check = self._prompts[at].check
            assert check is not None
            found.append(float(check.passes(answers[at].text)))
        return found

    def _like(self, answers: Sequence[Answer]) -> list[float]:
        """Likeness to the large model's answer, for every prompt."""
        pairs = zip(answers, self._large, strict=True)
        return [metrics.f1(words(one.text), words(other.text)) for one, other in pairs]

    def report(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        everyone = list(range(len(self._prompts)))
        return {
            "prompts": {
                "calibration": len(self._calibration_prompts),
                "held_out": len(everyone),
                "with_check": len(self._checked),
            },
            "calibration": {
                "id": self._calibration.calibration_id,
                "score": self._calibration.score.model_dump(exclude_none=True),
                "answers": self._calibration.size,
                "unscored": self._calibration.unscored,
            },
            "kinds": self._kinds(),
            "qualities": {
                "right": self._quality(self._checked, "right"),
                "likeness": self._quality(everyone, "likeness"),
            },
            "targets": [self._target(one) for one in self._targets],
            "score": self._score(),
            "quadrants": self._quadrants(),
            "handoffs": self._handoffs(),
            "costs": self._costs(),
            "self_check": self._self_check(),
        }

    def _quality(self, at: Sequence[int], kind: str) -> dict[str, Any]:
        judge = self._right if kind == "right" else self._like
        small, large = judge(self._small), judge(self._large)
        ends = metrics.Ends(_mean(small), _mean(large))
        grid = [step / 20 for step in range(21)]
        curves = {
            "oracle": metrics.oracle(small, large, grid),
            "score, whole answers": self._by_score(at, small, large),
        }
        for way, answers in (
            ("cascade, mapped", self._mapped),
            ("cascade, read again", {one: self._recomputed(one) for one in self._targets}),
        ):
            curves[way] = [
                (_mean([answers[one][i].escalated for i in at]), _mean(judge(answers[one])))
                for one in self._targets
            ]
        return {
            "small": ends.small,
            "large": ends.large,
            "curves": curves,
            "summary": {name: _summary(points, ends) for name, points in curves.items()},
        }

    def _by_score(
        self, at: Sequence[int], small: Sequence[float], large: Sequence[float]
    ) -> list[metrics.Point]:
        """As if the large model had answered the doubtful prompts alone, from the beginning."""
        place = {prompt: number for number, prompt in enumerate(at)}
        scored = [(self._scores[i], i) for i in at if self._scores[i] is not None]
        order = [place[i] for _, i in sorted(scored)]
        points = []
        for target in self._targets:
            taken = set(order[: round(target * len(at))])
            quality = _mean([large[i] if i in taken else small[i] for i in range(len(at))])
            points.append((len(taken) / len(at), quality))
        return points

    def _target(self, target: float) -> dict[str, Any]:
        made, count = self._calibration, len(self._prompts)
        low, high = made.interval(target)
        share_low, share_high = metrics.share_interval(made.rank(target), made.size, count)
        realised = _mean([one.escalated for one in self._mapped[target]])
        return {
            "target": target,
            "realised": realised,
            "gap": abs(realised - target),
            "interval": [low, high],
            "inside": low <= realised <= high,
            "share_interval": [share_low, share_high],
            "share_inside": share_low <= realised <= share_high,
            "threshold_nats": made.threshold(target).value,
            "unexpected": self._unexpected(target),
            "mapped_handoffs": sum(_is_mapped(one) for one in self._mapped[target]),
        }

    def _unexpected(self, target: float) -> int:
        """Answers that escalated against their score in the small model's whole answer."""
        value = self._calibration.threshold(target).value
        found = 0
        for score, answer in zip(self._scores, self._mapped[target], strict=True):
            # At the threshold itself a draw decides, which is not repeated here.
            if score != value:
                found += answer.escalated != (score is not None and score < value)
        return found

    def _score(self) -> dict[str, Any]:
        """How well a low score tells a bad answer."""
        right, like = self._right(self._small), self._like(self._small)
        wrong_at = [(self._scores[i], not ok) for i, ok in zip(self._checked, right, strict=True)]
        wrong = [(score, bad) for score, bad in wrong_at if score is not None]
        unlike = [
            (score, value < LIKE)
            for score, value in zip(self._scores, like, strict=True)
            if score is not None
        ]
        known = []
        for prompt in self._calibration_prompts:
            answer = self._cache.get(prompt.key, SMALL)
            if prompt.check is None or answer is None:
                continue
            score = score_of(answer.margins or (), self._calibration.score)
            if score is not None:
                known.append((score, not prompt.check.passes(answer.text)))
        found: dict[str, Any] = {
            "unscored": sum(score is None for score in self._scores),
            "auroc_wrong": metrics.auroc(*_columns(wrong)),
            "auroc_unlike": metrics.auroc(*_columns(unlike)),
            "wrong": _mean_of_any([bad for _, bad in wrong]),
            "unlike": _mean_of_any([bad for _, bad in unlike]),
            "ece_wrong": None,
        }
        if known and wrong:
            scores, failed = _columns(known)
            asked, really = _columns(wrong)
            found["ece_wrong"] = metrics.ece(metrics.failure_rates(scores, failed, asked), really)
        return found

    def _quadrants(self) -> dict[str, Any]:
        small = [bool(one) for one in self._right(self._small)]
        large = [bool(one) for one in self._right(self._large)]
        found: dict[str, Any] = {"all": metrics.quadrants(small, large)}
        for target in self._targets:
            taken = [self._mapped[target][at].escalated for at in self._checked]
            pairs = [(a, b) for a, b, yes in zip(small, large, taken, strict=True) if yes]
            found[f"{target:g}"] = metrics.quadrants([a for a, _ in pairs], [b for _, b in pairs])
        return found

    def _handoffs(self) -> dict[str, Any]:
        """Where KV was mapped: the answer beside that of the same cascade reading again."""
        rows = [
            (at, self._mapped[one][at], self._recomputed(one)[at])
            for one in self._targets
            for at in range(len(self._prompts))
            if _is_mapped(self._mapped[one][at])
        ]
        checked = [
            (self._prompts[at].check, a.text, b.text)
            for at, a, b in rows
            if self._prompts[at].check
        ]
        return {
            "answers": len(rows),
            "equal": _mean_of_any([a.text == b.text for _, a, b in rows]),
            "likeness": _mean_of_any(
                [metrics.f1(words(a.text), words(b.text)) for _, a, b in rows]
            ),
            "with_check": len(checked),
            "right_mapped": _mean_of_any([check.passes(a) for check, a, _ in checked if check]),
            "right_read_again": _mean_of_any([check.passes(b) for check, _, b in checked if check]),
        }

    def _costs(self) -> dict[str, dict[str, float]]:
        """Means per held-out answer; `flop_of_large` is the part of what always-large costs."""
        runs = {"always small": self._small, "always large": self._large}
        for one in self._targets:
            runs[f"{one:g}, mapped"] = self._mapped[one]
            runs[f"{one:g}, read again"] = self._recomputed(one)
        found = {}
        for name, answers in runs.items():
            each = [
                self._prices.of(answer, self._names[SMALL], self._names[LARGE])
                for answer in answers
            ]
            found[name] = {key: _mean([one[key] for one in each]) for key in each[0]}
        for row in found.values():
            row["flop_of_large"] = row["flop"] / found["always large"]["flop"]
        return found

    def _kinds(self) -> list[dict[str, Any]]:
        like = self._like(self._small)
        rows = []
        for kind in sorted({one.kind for one in self._prompts}):
            at = [i for i, one in enumerate(self._prompts) if one.kind == kind]
            checks = [(self._prompts[i].check, i) for i in at]
            row: dict[str, Any] = {"kind": kind, "prompts": len(at)}
            for name, answers in ((SMALL, self._small), (LARGE, self._large)):
                right = [check.passes(answers[i].text) for check, i in checks if check]
                row[name] = _mean_of_any(right)
            row["likeness"] = _mean([like[i] for i in at])
            row["prompt_tokens"] = _mean([self._small[i].prompt_tokens for i in at])
            rows.append(row)
        return rows

    def _self_check(self) -> dict[str, Any]:
        """The scores computed here, from the API's log-probabilities, beside the router's own."""
        gaps, differ = [], 0
        for prompt in self._calibration_prompts:
            answer = self._cache.get(prompt.key, SMALL)
            if answer is None or answer.cascade.decision is None:
                continue
            ours = score_of(answer.margins or (), self._calibration.score)
            theirs = answer.cascade.decision.score
            if ours is None or theirs is None:
                differ += (ours is None) != (theirs is None)
            else:
                gaps.append(abs(ours - theirs))
        return {"answers": len(gaps), "largest_gap_nats": max(gaps, default=None), "differ": differ}


def _is_mapped(answer: Answer) -> bool:
    handoff = answer.cascade.handoff
    return handoff is not None and handoff.path == "mapped"


def _summary(points: Sequence[metrics.Point], ends: metrics.Ends) -> dict[str, float | None]:
    return {
        "apgr": metrics.apgr(points, ends),
        "cpt50": metrics.cpt(points, ends, 50),
        "cpt80": metrics.cpt(points, ends, 80),
        "deferral_area": metrics.deferral_area(points, ends),
    }


def _columns(rows: Sequence[tuple[float, bool]]) -> tuple[list[float], list[bool]]:
    return [score for score, _ in rows], [bad for _, bad in rows]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_of_any(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None
