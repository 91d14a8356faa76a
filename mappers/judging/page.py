"""One page that shows what was measured of a pair: self-contained HTML, no scripts, no requests.

Knows the report's numbers and how to lay them out; plots come from `plots`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mappers.judging.plots import bucket_plot, drift_plot, layer_plot
from mappers.judging.records import LocalAttention, ScoreReport, Structure, Thresholds
from mappers.judging.report import DirectionReport, DriftReport, GenerationReport, PairReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #e3e6e9; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; vertical-align: bottom; }
.left td { text-align: left; }
svg { max-width: 100%; height: auto; }
.verdict { padding: .7rem 1rem; border-left: .4rem solid; margin: 1rem 0; background: #f6f7f8; }
.accept { border-color: #2b8a3e; } .refuse { border-color: #c0392b; }
.verdict b { font-size: 1.1rem; }
.note { color: #5a646d; font-size: .9rem; }
code { background: #f1f3f5; padding: 0 .2rem; }
"""
_WORST_HEADS = 8


def page(report: PairReport) -> str:
    """The whole page as HTML text."""
    directions = [report.forward] + ([report.reverse] if report.reverse else [])
    body = [f"<h1>{_pair(report.forward)}</h1>"]
    body += [_verdict(one) for one in directions]
    body += [f'<p class="note">{escape(note)}</p>' for note in report.notes]
    for one in directions:
        body.append(f"<h2>{_pair(one)}: how the target goes on</h2>")
        body += _score(one.score)
        body.append(f"<h2>{_pair(one)}: recall of facts</h2>")
        body += _generation(one.generation)
    if report.drift is not None:
        body.append(f"<h2>{len(report.drift.kept)} alternating handoffs</h2>")
        body += _drift(report.drift)
    body.append(
        f'<p class="note">{escape(report.created_by)}, {escape(report.created_at)}. '
        "All numbers are in <code>report.json</code>.</p>"
    )
    title = f"{_pair(report.forward)}: {report.forward.score.verdict}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _pair(one: DirectionReport) -> str:
    return f"{escape(one.source)} → {escape(one.target)}"


def _verdict(one: DirectionReport) -> str:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in one.score.reasons)
    listed = f"<ul>{reasons}</ul>" if reasons else "<br>Every bound below is met."
    verdict = one.score.verdict
    warned = "".join(f"<p>Caution: {escape(caution)}.</p>" for caution in one.cautions)
    return (
        f'<div class="verdict {verdict}"><b>{_pair(one)}: {verdict}</b>{listed}{warned}'
        f'<div class="note">mapper {escape(one.mapper)}, {escape(one.mapper_id)} before this '
        "verdict</div></div>"
    )


def _score(score: ScoreReport) -> Iterable[str]:
    yield (
        f"<p>{score.windows} windows of held-out text: {score.prefix_tokens} tokens of prefix, "
        f"the last {score.native_suffix_tokens} read natively, "
        f"then {score.scored_tokens} scored. Gap recovered is in nats, floor-normalised in top-1 "
        "agreement; both are 0 for no prefix and 1 for native.</p>"
    )
    heads = ("cache", "perplexity", "KL to native", "top-1 agreement", "attention cosine")
    yield _table(
        (*heads, "gap recovered", "floor-normalised"),
        [
            (
                row.name,
                f"{row.perplexity:,.2f}",
                f"{row.kl_to_native:.3f}",
                f"{row.top1_agreement:.3f}",
                _number(row.attention_cosine, ".3f"),
                _number(row.recovered_gap, ".0%"),
                _number(row.floor_normalised, ".0%"),
            )
            for row in score.rows
        ],
    )
    yield f"<p>Injection of the native cache is {'' if score.injection_exact else 'not '}exact.</p>"
    for absent in score.absent_controls:
        yield f'<p class="note">Not run: {escape(absent)}.</p>'
    bounds = score.thresholds or Thresholds()
    if score.structure is not None:
        yield _structure(score.structure)
    if score.local_attention is not None:
        yield from _local(score.local_attention, bounds)
    yield "<h3>Bounds</h3>"
    yield _table(("bound", "value"), [(n, f"{v:g}") for n, v in bounds.model_dump().items()])


def _structure(structure: Structure) -> str:
    if structure.shift is None:
        moved = "The models have no positions left to move the text to."
    else:
        moved = (
            f"Text moved by {structure.shift} positions maps to the same keys within "
            f"{structure.shift_error_keys:.2%} and "
            f"values within {structure.shift_error_values:.2%}."
        )
    count = len(structure.misplaced)
    place = f"{count or 'No'} mapped head{'' if count == 1 else 's'}"
    return f"<p>{moved} {place} resembles another native head more than its own.</p>"


def _local(local: LocalAttention, bounds: Thresholds) -> Iterable[str]:
    yield (
        "<h3>Attention outputs, layer by layer</h3>"
        '<p class="note">Every layer is asked the native run’s queries over the prefix alone, so '
        "that errors do not pass from layer to layer. <i>Share kept</i> is 1 − (1 − cosine mapped) "
        "/ (1 − cosine of another text’s cache): 1 is native, 0 no better than the wrong text.</p>"
    )
    yield layer_plot(local, bounds)
    heads = sorted(
        (share, layer, head)
        for layer, row in enumerate(local.head_share_LH)
        for head, share in enumerate(row)
    )
    yield "<h3>Worst KV heads</h3>"
    yield _table(
        ("layer, head", "cosine mapped", "cosine of another text", "share kept"),
        [
            (
                f"{layer}, {head}",
                f"{local.mapped_LH[layer][head]:.3f}",
                f"{local.other_text_LH[layer][head]:.3f}",
                f"{share:.0%}",
            )
            for share, layer, head in heads[:_WORST_HEADS]
        ],
    )
    if local.bucket_starts_B:
        yield "<h3>By position in the prefix</h3>"
        yield bucket_plot(local, bounds)


def _generation(report: GenerationReport) -> Iterable[str]:
    yield (
        f"<p>{report.facts} facts stand in a context of {report.context_tokens:.0f} tokens; one of "
        "them is asked for and counts when the answer begins with it. Chance is about 0.1%.</p>"
    )
    yield _table(
        ("cache of the context", "right", "accuracy"),
        [(r.name, f"{r.correct} of {r.asked}", f"{r.accuracy:.0%}") for r in report.rows],
    )
    yield f"<p>Floor-normalised: {_number(report.floor_normalised, '.0%')}.</p>"
    yield _table(
        ("question", "expected", "native", "mapped"),
        [(e.question, e.expected, e.native.strip(), e.mapped.strip()) for e in report.examples],
        "left",
    )
    yield (
        f"<p>{report.continuations} free greedy continuations of {report.continuation_tokens} "
        f"tokens share their first {report.common_tokens:.1f} tokens with the native ones on "
        f"average; {report.token_agreement:.0%} of all tokens are equal.</p>"
    )


def _drift(drift: DriftReport) -> Iterable[str]:
    yield (
        f"<p>{drift.conversations} conversations in turns of {drift.turn_tokens} tokens. At every "
        "turn the other model takes over; it is compared with itself having read everything. "
        "<i>Own part kept</i> maps the missing turns only, as serving does; <i>everything mapped "
        "anew</i> maps the whole cache at every handoff, the worst case.</p>"
    )
    yield drift_plot(drift)
    heads = ("turn, read by", "native NLL", "NLL, own kept", "KL", "top-1", "NLL, anew", "KL")
    yield _table(
        (*heads, "top-1"),
        [
            (
                f"{kept.turn}, {kept.owner}",
                *(f"{value:.3f}" for value in (kept.native_nll, kept.nll, kept.kl_to_native)),
                f"{kept.top1_agreement:.2f}",
                *(f"{value:.3f}" for value in (anew.nll, anew.kl_to_native)),
                f"{anew.top1_agreement:.2f}",
            )
            for kept, anew in zip(drift.kept, drift.remapped, strict=True)
        ],
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="{style}"><tr>{head}</tr>{body}</table>'


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
