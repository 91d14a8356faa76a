"""Collects the folder of texts that the distillation reads.

`python -m cluster.quickstart.training_text OUT --handbook HTML_FOLDER` writes the Debian
Administrator's Handbook (package `debian-handbook`, unpacked with `dpkg -x`; it is not shipped
here), the Python reference and the shipped conversations as gzipped JSONL, each with held-out
text. It does not know tokens or models.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import typer

from cluster.quickstart.text import SAMPLED_FILE, passages

_HELDOUT_PAGE_EVERY = 8
# Shorter pages hold little but navigation.
_LEAST_CHARS = 1500
_PARAGRAPHS = {"p", "pre", "h1", "h2", "h3", "h4"}
_LINES = {"div", "li", "dt", "dd", "tr"}
_HIDDEN = {"script", "style", "head"}


class _Page(HTMLParser):
    """Gathers the visible text of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        if tag in _PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in _LINES:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _HIDDEN

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def page_text(html: str) -> str:
    """The text of a page, with one blank line between paragraphs."""
    page = _Page()
    page.feed(html)
    text = re.sub(r"[ \t]+", " ", "".join(page.parts))
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    handbook: Annotated[Path, typer.Option(help="The handbook's en-US HTML folder.")],
) -> None:
    """Write the folder of texts for `cluster.quickstart.distill --texts`."""
    out.mkdir(parents=True, exist_ok=True)
    pages = [page_text(file.read_text("utf-8")) for file in sorted(handbook.glob("*.html"))]
    rows = [
        {"split": "train" if at % _HELDOUT_PAGE_EVERY else "heldout", "text": page}
        for at, page in enumerate(pages)
        if len(page) >= _LEAST_CHARS
    ]
    _write(out / "handbook.jsonl.gz", rows)
    rows = [
        {"split": "heldout" if heldout else "train", "text": passage}
        for heldout in (False, True)
        for _, passage in passages(heldout=heldout)
    ]
    _write(out / "topics.jsonl.gz", rows)
    shutil.copyfile(SAMPLED_FILE, out / SAMPLED_FILE.name)


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    typer.run(main)
