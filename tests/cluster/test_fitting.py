from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cluster import fitting
from cluster.cli import app
from cluster.errors import MapperError
from cluster.fitting import fit_pair, fit_settings, prepare_quickstart
from cluster.quickstart import pair
from cluster.quickstart.pair import PairPaths
from tests.mappers.tiny import sentences, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny models and 30 texts of 800 words."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fitting")
    write_model(folder / "small", layers=2, seed=1)
    write_model(folder / "large", layers=3, seed=2)
    parts = sentences(240, seed=3)
    texts = [" ".join(parts[at : at + 8]) for at in range(0, len(parts), 8)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def run(files: Path, command: str, *words: str) -> Any:
    models = ["--source", str(files / "small"), "--target", str(files / "large")]
    return CliRunner().invoke(app, [command, *models, *words])


@pytest.fixture(scope="module")
def fitted(files: Path) -> Any:
    return run(
        files,
        *("fit", "--out", str(files / "mapper"), "--k", "1", "--tokens", "8192"),
        *("--text", str(files / "text.jsonl"), "--json"),
    )


def test_fit_writes_a_mapper_and_prints_its_manifest(files: Path, fitted: Any) -> None:
    assert fitted.exit_code == 0, fitted.stderr
    printed = json.loads(fitted.stdout)
    assert printed == json.loads((files / "mapper" / "manifest.json").read_text())
    assert printed["calibration"]["tokens"] == 8_192
    assert printed["calibration"]["texts"] <= 27  # a tenth of 30 texts is held out
    assert printed["heldout"]["texts"] <= 3


def test_score_judges_the_written_mapper(files: Path, fitted: Any) -> None:
    words = ("--text", str(files / "text.jsonl"), "--tokens", "512", "--prefix-tokens", "64")
    # A map between random models fails its own test; it may be judged again, not served.
    refused = run(files, "score", "--mapper", str(files / "mapper"), *words, "--json")
    assert refused.exit_code == 0, refused.stderr
    assert json.loads(refused.stdout)["verdict"] == "refuse"
    models = ["--source", str(files / "small"), "--target", str(files / "small")]
    identity = CliRunner().invoke(app, ["score", *models, "--mapper", "identity", *words, "--json"])
    assert identity.exit_code == 0, identity.stderr
    rows = {row["name"]: row for row in json.loads(identity.stdout)["rows"]}
    assert rows["mapped"]["kl_to_native"] == 0.0
    assert rows["mapped"]["top1_agreement"] == 1.0
    table = CliRunner().invoke(app, ["score", *models, "--mapper", "identity", *words])
    assert "4 held-out windows" in table.stdout


def test_text_in_one_piece_needs_held_out_text_of_its_own(files: Path, tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("w1 w2")
    result = run(files, "fit", "--out", str(tmp_path / "m"), "--text", str(text))
    assert result.exit_code == 2
    assert "give --heldout" in result.stderr


def test_the_quickstart_mapper_is_fitted_once(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[Path] = []

    def fit_small(source: str, target: str, out: Path, **options: Any) -> None:
        fits.append(out)
        assert (source, target) == ("small", "large")
        fit_pair(
            str(files / "small"),
            str(files / "large"),
            out,
            fit_settings(k=1, tokens=512),
            text=files / "text.jsonl",
            **options,
        )

    models = PairPaths(small=files / "small", large=files / "large")
    monkeypatch.setenv("KVCASCADE_HOME", str(tmp_path))
    monkeypatch.setattr(pair, "prepare_pair", lambda console: models)
    monkeypatch.setattr(fitting, "fit_pair", fit_small)
    first = prepare_quickstart(Console(stderr=True))
    assert prepare_quickstart(Console(stderr=True)) == first
    assert fits == [first["mapper"]] == [tmp_path / "mappers" / "small-to-large"]


def test_a_folder_that_is_no_mapper_is_not_overwritten(files: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MapperError, match="not a mapper folder"):
        fit_pair(
            str(files / "small"),
            str(files / "large"),
            tmp_path,
            text=files / "text.jsonl",
            console=Console(stderr=True),
        )
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_sweep_prints_its_settings_and_draws_them(files: Path, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    result = run(
        files,
        *("fit", "--out", str(tmp_path / "m"), "--tokens", "2048", "--sweep", "--plot", str(plot)),
        *("--text", str(files / "text.jsonl"), "--relative-lambda", "--selection", "greedy"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("head_local") >= 2 and "Chosen: " in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((tmp_path / "m" / "manifest.json").read_text())
    assert manifest["ridge"] == {"value": 0.01, "relative": True}
    assert manifest["selection"] == "greedy"


def test_shards_are_named_on_the_command_line(files: Path, tmp_path: Path) -> None:
    words = (
        *("fit", "--out", str(tmp_path / "m"), "--tokens", "1024", "--k", "1"),
        *("--text", str(files / "text.jsonl"), "--work", str(tmp_path / "w")),
    )
    for shard in ("1/2", "2/2"):
        result = run(files, *words, "--shard", shard)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip().endswith(f"{shard[0]}-of-2.safetensors")
    result = run(files, *words, "--shards", "2")
    assert result.exit_code == 0, result.stderr
    assert not (tmp_path / "w").exists() and (tmp_path / "m" / "manifest.json").is_file()
    wrong = run(files, *words, "--shard", "two")
    assert wrong.exit_code == 2 and "give it as 2/4" in wrong.stderr
    lone = run(files, *words, "--plot", str(tmp_path / "p.png"))
    assert lone.exit_code == 2 and "give both" in lone.stderr
