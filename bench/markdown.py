"""Tables of pages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Container[int] = ()
) -> str:
    """A table whose columns stand to the right, but for those in `left`."""
    rule = "".join("---|" if column in left else "---:|" for column in range(len(head)))
    return "\n".join([_line(head), f"|{rule}", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
