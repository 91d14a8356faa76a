"""The routing bench's page and plot, made from its report. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {
    "oracle": "#9aa3ab",
    "score, whole answers": "#2e8b57",
    "cascade, mapped": "#1f6fb2",
    "cascade, read again": "#d98a1f",
}

_INTRO = """\
# What routing by doubt gains, and what it costs

The routed model `cascade` of the quickstart, asked greedily for at most {max_tokens} tokens. Its
policy is `margin`, with the threshold of a calibration on {calibration} prompts; the numbers are
of {held_out} other prompts, {with_check} of which have a check. Made by one command, which serves
the cascade itself:

```sh
python bench/routing.py
```

**The main quality is the share of right answers** among the prompts with a check (`right`).
Likeness to the large model's own answer (`likeness`, F1 of words, all prompts) stands beside it,
because it needs no truth, and because it shows what a change of models in mid-answer does to a
text.

![quality against fraction, and realised against target](routing.png)
"""

_HOW = """\
## How to read it

* A **fraction** is the part of the answers in which the large model took part. Chance is the
  straight line from always-small to always-large; an **oracle** sends first what only the large
  model gets right.
* `cascade, mapped` is the product as it is: the small model begins, and where its doubt crosses
  the threshold the large one goes on **after what was sent**, on mapped KV. `cascade, read again`
  makes the same decisions with `recompute: true`. Conversations below
  `handoff.min_handoff_tokens` are read again in both.
* `score, whole answers` sends the same doubtful prompts to the large model from the beginning.
  What lies between it and the cascade is the price of keeping the small model's first words.
* **PGR** is the part of the gap between the two models that is won; **APGR** its mean over all
  fractions, with always-small at 0 and always-large at 1; chance has 0.5. **CPT(50)** and
  **CPT(80)** are the least fractions that win 50 % and 80 % of the gap. **AUC-DF** is the area
  under the curve minus that of chance.
* An answer is unlike the large model's when its likeness is below 0.5.
* **AUROC** is the chance that a bad answer has a lower score than a good one, 0.5 when the score
  says nothing. **ECE** is that of the failure rates that isotonic regression reads from the
  calibration prompts' checks.
* FLOP count two per parameter and token, and two per weight of the map; no prefix cache is
  assumed, and the few tokens that the small model wrote and nobody saw are left out.
"""


def page(report: Mapping[str, Any], max_tokens: int) -> str:
    """ROUTING.md."""
    prompts = report["prompts"]
    parts = [
        _INTRO.format(max_tokens=max_tokens, **prompts),
        "## Quality\n",
        _qualities(report["qualities"]),
        "## Realised fractions\n",
        _targets(report),
        "## The score\n",
        _score(report),
        "## Mapped KV beside reading again\n",
        _handoffs(report["handoffs"]),
        "## Costs, means per answer\n",
        _costs(report["costs"]),
        "## Prompts\n",
        _kinds(report["kinds"]),
        _HOW,
    ]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 3, missing: str = "-") -> str:
    """A number for a table."""
    return missing if value is None else f"{value:,.{digits}f}"


def _qualities(qualities: Mapping[str, Any]) -> str:
    texts = []
    for name, found in qualities.items():
        rows = []
        for curve, points in found["curves"].items():
            summary = found["summary"][curve]
            shown = [] if curve == "oracle" else points
            rows.append(
                [
                    curve,
                    ", ".join(f"{quality:.3f} at {part:.2f}" for part, quality in shown) or "-",
                    number(summary["apgr"]),
                    number(summary["cpt50"], 2, "not reached"),
                    number(summary["cpt80"], 2, "not reached"),
                    f"{summary['deferral_area']:+.3f}",
                ]
            )
        head = [name, "quality at fraction", "APGR", "CPT(50)", "CPT(80)", "AUC-DF - chance"]
        ends = f"always small {found['small']:.3f}, always large {found['large']:.3f}"
        texts.append(f"`{name}`: {ends}.\n\n{table(head, rows)}")
    return "\n".join(texts)


def _targets(report: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{one['target']:g}",
            number(one["realised"]),
            number(one["gap"]),
            _between(one["interval"]),
            "yes" if one["inside"] else "no",
            _between(one["share_interval"]),
            "yes" if one["share_inside"] else "no",
            number(one["threshold_nats"], 2),
            str(one["unexpected"]),
            str(one["mapped_handoffs"]),
        ]
        for one in report["targets"]
    ]
    head = ["target", "realised", "gap", "long run, 90 %", "inside"]
    head += ["of these answers, 90 %", "inside", "threshold (nats)", "unexpected", "mapped"]
    made = report["calibration"]
    return (
        f"{made['answers']} answers calibrate, {made['unscored']} of them without a score (too "
        "short for a window). The first interval is the calibration's own, for the long run; the "
        "second adds the chance of a sample as small as this one. Unexpected are answers that "
        "changed models although the small model's whole answer, asked alone, lies on the other "
        "side of the threshold; mapped are handoffs.\n\n" + table(head, rows)
    )


def _score(report: Mapping[str, Any]) -> str:
    score, check = report["score"], report["self_check"]
    rows = [
        ["AUROC, wrong answers", number(score["auroc_wrong"])],
        [
            "AUROC, answers unlike the large model's (likeness below 0.5)",
            number(score["auroc_unlike"]),
        ],
        ["ECE, wrong answers", number(score["ece_wrong"])],
        ["part of wrong answers", number(score["wrong"])],
        ["part of unlike answers", number(score["unlike"])],
        ["answers without a score", str(score["unscored"])],
    ]
    quadrants = report["quadrants"]
    names = list(quadrants["all"])
    cells = [
        [("all" if key == "all" else f"escalated at {key}"), *(str(found[one]) for one in names)]
        for key, found in quadrants.items()
    ]
    gap = number(check["largest_gap_nats"], 4)
    return (
        table(["the small model's whole answers", ""], rows)
        + "\nThe score is computed from the API's log-probabilities; on "
        f"{check['answers']} answers the router's own differs by {gap} nats at most.\n\n"
        + table(["prompts with a check", *names], cells)
    )


def _handoffs(found: Mapping[str, Any]) -> str:
    rows = [
        ["answers that went on from mapped KV, all targets", str(found["answers"])],
        ["the same text as by reading again", number(found["equal"])],
        ["likeness of the two", number(found["likeness"])],
        ["of those with a check", str(found["with_check"])],
        ["right, mapped", number(found["right_mapped"])],
        ["right, read again", number(found["right_read_again"])],
    ]
    return table(["handoffs", ""], rows)


def _costs(costs: Mapping[str, Mapping[str, float]]) -> str:
    tokens = ["small_tokens_read", "small_tokens_written", "large_tokens_read"]
    tokens += ["large_tokens_written", "mapped_tokens"]
    head = ["run", *(one.replace("_tokens", "").replace("_", ", ") for one in tokens)]
    rows = [
        [
            name,
            *(number(row[one], 1) for one in tokens),
            number(row["moved_bytes"] / 1e6, 2),
            number(row["flop"] / 1e9, 2),
            number(row["flop_of_large"], 2),
        ]
        for name, row in costs.items()
    ]
    return table([*head, "MB moved", "GFLOP", "of always large"], rows)


def _kinds(kinds: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            one["kind"],
            str(one["prompts"]),
            number(one["prompt_tokens"], 0),
            number(one["small"], 2),
            number(one["large"], 2),
            number(one["likeness"], 2),
        ]
        for one in kinds
    ]
    head = ["kind", "held out", "prompt tokens", "small right", "large right", "likeness of small"]
    return table(head, rows)


def _between(pair: Sequence[float]) -> str:
    return f"{pair[0]:.3f} to {pair[1]:.3f}"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Quality against fraction, both kinds, and realised against target with both intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (name, found) in zip(panels, report["qualities"].items(), strict=False):
        ends = [found["small"], found["large"]]
        axes.plot([0, 1], ends, color="#c0392b", lw=1, ls="--", label="chance")
        axes.plot([0], ends[:1], "o", color="#555555", ms=5)
        axes.plot([1], ends[1:], "s", color="#555555", ms=5)
        axes.annotate("always small", (0, ends[0]), xytext=(6, -11), textcoords="offset points")
        axes.annotate(
            "always large", (1, ends[1]), xytext=(-6, 7), textcoords="offset points", ha="right"
        )
        for curve, points in found["curves"].items():
            marker = "" if curve == "oracle" else "o"
            style = ":" if curve == "cascade, read again" else "-"
            axes.plot(
                *zip(*points, strict=True),
                style,
                marker=marker,
                ms=4,
                label=curve,
                color=_COLOURS[curve],
            )
        axes.set_xlabel("part of the answers with the large model")
        axes.set_ylabel("right answers" if name == "right" else "likeness to the large model")
        axes.margins(y=0.12)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")
    axes = panels[2]
    targets = report["targets"]
    axes.plot([0, 1], [0, 1], color="#c0392b", lw=1, ls="--", label="as asked")
    for key, width, label in (
        ("share_interval", 2, "90 %, of so many answers"),
        ("interval", 6, "90 %, long run"),
    ):
        for number_, one in enumerate(targets):
            axes.plot(
                [one["target"]] * 2,
                one[key],
                color="#1f6fb2",
                lw=width,
                alpha=0.35,
                solid_capstyle="butt",
                label=None if number_ else label,
            )
    axes.plot(
        [one["target"] for one in targets],
        [one["realised"] for one in targets],
        "o",
        color="#1f6fb2",
        ms=5,
        label="realised",
    )
    axes.set_xlabel("target fraction")
    axes.set_ylabel("realised on held-out prompts")
    axes.legend(fontsize=8, frameon=False)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
