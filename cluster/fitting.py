"""Making and judging mappers for named models: finds the folders and the text, then calls mappers.

Knows the quickstart pair and the hub; holds no mathematics, and prints nothing but progress.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from cluster.config import QUICKSTART
from cluster.errors import MapperError, ModelError
from cluster.sources import model_folder, quickstart_mapper_folder, resolve_mapper

if TYPE_CHECKING:
    from rich.console import Console

    from mappers.fitting.fit import FitReport, FitSettings
    from mappers.judging.records import ScoreReport

QUICKSTART_K = 8
"""Source layers per target layer of the quickstart mapper, as in the paper's main result."""

QUICKSTART_TOKENS = 32_768
"""Calibration tokens of the quickstart mapper: 21 per feature, read in a minute on two cores."""

QUICKSTART_HELDOUT_TOKENS = 4_096
"""Tokens on which it is judged when it is made; `kvcascade score` reads more."""

_DOCUMENT_CHARACTERS = 4_000


def prepare_quickstart(console: Console, *, back: bool = False) -> dict[str, Path]:
    """Folders of the quickstart pair and its mapper (`small`, `large`, `mapper`), made if missing.

    With `back` also that of the mapper from the large model to the small one (`mapper_back`). The
    first time takes minutes; later calls only compare mappers with models. Raises ModelError when
    the large model cannot be fetched.
    """
    from cluster.quickstart.pair import prepare_pair
    from mappers.fingerprint import fingerprint
    from mappers.manifest import read_manifest

    pair = prepare_pair(console=console)
    folders = {"small": pair.small, "large": pair.large}
    wanted = [("mapper", "small", "large")] + [("mapper_back", "large", "small")] * back
    for name, source, target in wanted:
        folder = quickstart_mapper_folder(back=name == "mapper_back")
        try:
            ends = (fingerprint(folders[one]) for one in (source, target))
            read_manifest(folder).check(*ends)
        except MapperError:  # missing, of an older format, or made for another adapter
            fit_pair(source, target, folder, console=console)
        folders[name] = folder
    return folders


def fit_pair(
    source: str,
    target: str,
    out: Path,
    settings: FitSettings | None = None,
    *,
    text: Path | None = None,
    heldout: Path | None = None,
    device: str = "cpu",
    sequential: bool | None = None,
    work: Path | None = None,
    shards: int | None = None,
    console: Console,
) -> FitReport:
    """Fit a mapper between two named models; see `mappers.fitting.fit.fit`.

    Without `settings` those of the quickstart mapper hold. Without `text` the quickstart pair's own
    text is read; without `heldout` a tenth of `text` is kept back. Raises MapperError or ModelError
    with what to change.
    """
    from mappers.fitting.fit import fit

    hide_loading_bars()
    return fit(
        named_folder(source),
        named_folder(target),
        *_texts(text, heldout),
        out,
        settings or fit_settings(),
        device=device,
        sequential=sequential,
        work_dir=work,
        shards=shards,
        console=console,
    )


def fit_pair_shard(
    source: str,
    target: str,
    out: Path,
    settings: FitSettings,
    shard: str,
    *,
    text: Path | None = None,
    heldout: Path | None = None,
    device: str = "cpu",
    sequential: bool | None = None,
    work: Path | None = None,
    console: Console,
) -> Path:
    """Read one share of a fit, `shard` as in "2/4"; gives the file it leaves for `fit_pair`."""
    from mappers.fitting.fit import fit_shard

    index, _, count = shard.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise MapperError(f"shard {shard!r}: give it as 2/4, the second of four")
    hide_loading_bars()
    return fit_shard(
        named_folder(source),
        named_folder(target),
        *_texts(text, heldout),
        out,
        settings,
        shard=(int(index), int(count)),
        device=device,
        sequential=sequential,
        work_dir=work,
        console=console,
    )


def fit_settings(
    *,
    k: int = QUICKSTART_K,
    support: str = "full",
    tokens: int = QUICKSTART_TOKENS,
    ridge_lambda: float = 0.01,
    relative_lambda: bool = False,
    selection: str = "top",
    attention_weights: bool = False,
    attention_power: float = 0.5,
    sweep: bool = False,
    fallback: bool = False,
) -> FitSettings:
    """Settings of a fit from the words of a command line; MapperError for an unknown word."""
    from mappers.fitting.fit import FitSettings
    from mappers.manifest import Ridge

    if support not in ("full", "head_local"):
        raise MapperError(f"support {support!r}: choose `full` or `head_local`")
    if selection not in ("top", "greedy"):
        raise MapperError(f"selection {selection!r}: choose `top` or `greedy`")
    return FitSettings(
        k=k,
        support=cast(Literal["full", "head_local"], support),
        ridge=Ridge(value=ridge_lambda, relative=relative_lambda),
        selection=cast(Literal["top", "greedy"], selection),
        attention_weights=attention_weights,
        attention_power=attention_power,
        sweep=sweep,
        fallback=fallback,
        tokens=tokens,
        heldout_tokens=QUICKSTART_HELDOUT_TOKENS,
    )


def score_pair(
    source: str,
    target: str,
    mapper: str,
    *,
    text: Path | None = None,
    tokens: int = 8_192,
    prefix_tokens: int = 256,
    native_suffix_tokens: int = 1,
    device: str = "cpu",
    console: Console,
) -> ScoreReport:
    """Judge a mapper on held-out text, in windows of twice `prefix_tokens`."""
    import torch
    from rich.progress import Progress

    from mappers.capture import load_model, windows
    from mappers.fingerprint import fingerprint
    from mappers.judging.score import score_mapper
    from mappers.store import load_mapper

    hide_loading_bars()
    source_dir, target_dir = named_folder(source), named_folder(target)
    loaded = load_mapper(
        resolve_mapper(mapper),
        fingerprint(source_dir),
        fingerprint(target_dir),
        device,
        allow_refused=True,
    )
    unseen = quickstart_texts()[1] if text is None else read_texts(text)
    unseen_windows = windows(unseen, source_dir, 2 * prefix_tokens, tokens)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("held-out windows", total=len(unseen_windows.ids_ST))
        return score_mapper(
            load_model(source_dir, torch.bfloat16, device),
            load_model(target_dir, torch.bfloat16, device),
            loaded,
            unseen_windows,
            prefix_tokens=prefix_tokens,
            native_suffix_tokens=native_suffix_tokens,
            advance=lambda done: progress.advance(task, done),
        )


def hide_loading_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def read_texts(path: Path) -> list[str]:
    """Documents of a text file: the `text` of every line of a .jsonl, else runs of paragraphs.

    Raises MapperError when the file is missing, empty or malformed.
    """
    if not path.is_file():
        raise MapperError(f"{path}: no such file; give a .jsonl or plain text file")
    content = path.read_text()
    if path.suffix == ".jsonl":
        texts = [_jsonl_text(path, n, line) for n, line in enumerate(content.splitlines(), 1)]
    else:
        texts = [""]
        for paragraph in content.split("\n\n"):
            if len(texts[-1]) > _DOCUMENT_CHARACTERS:
                texts.append("")
            texts[-1] += paragraph + "\n\n"
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise MapperError(f"{path} holds no text")
    return texts


def _jsonl_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"] if line.strip() else ""
    except (json.JSONDecodeError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise MapperError(f'{path}:{number}: every line must be JSON like {{"text": "..."}}')
    return text


def _texts(text: Path | None, heldout: Path | None) -> tuple[list[str], list[str]]:
    if text is None:
        calibration, unseen = quickstart_texts()
        return calibration, unseen if heldout is None else read_texts(heldout)
    texts = read_texts(text)
    if heldout is not None:
        return texts, read_texts(heldout)
    kept = max(1, len(texts) // 10)
    if len(texts) == kept:
        raise MapperError(f"{text} is one short document; give --heldout with other text")
    return texts[:-kept], texts[-kept:]


def quickstart_texts() -> tuple[list[str], list[str]]:
    """Calibration and held-out text, each in a fixed random order: a fit reads only a part."""
    from cluster.quickstart.text import calibration_texts, heldout_texts

    shuffle = random.Random(0).sample
    calibration, unseen = calibration_texts(), heldout_texts()
    return shuffle(calibration, len(calibration)), shuffle(unseen, len(unseen))


def named_folder(name: str) -> Path:
    """The folder of a model; `small` and `large` are the quickstart pair's."""
    known = {"small": f"{QUICKSTART}small", "large": f"{QUICKSTART}large"}
    folder = model_folder(known.get(name, name))
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: {folder} holds no config.json; is it a model?")
    return folder
