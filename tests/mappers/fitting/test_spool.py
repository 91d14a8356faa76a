"""One model after the other: the source's KV on disk in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers.capture import pack
from mappers.fingerprint import fingerprint
from mappers.fitting import spool
from mappers.fitting.spool import Feed, ModelPair, checkpoint_bytes
from mappers.rope import Rope
from tests.mappers.tiny import sentences, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "small", layers=2, seed=1),
        write_model(root / "large", layers=3, kv_heads=4, seed=2),
    )


def pair(folders: tuple[Path, Path], dtype: torch.dtype) -> ModelPair:
    one, other = (Rope(fingerprint(folder).rope) for folder in folders)
    return ModelPair(folders, (one, other), dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spooled_source_gives_the_numbers_of_one_that_runs_beside(
    folders: tuple[Path, Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    data = pack(sentences(4, seed=1), folders[0], 32, 320)
    beside = Feed(data, 128, pair(folders, dtype))
    models = pair(folders, dtype)
    spooled = Feed(data, 128, models, tmp_path / "spool")
    advanced: list[int] = []
    spooled.spool(range(3), advanced.append)
    assert advanced == [128, 128, 64]
    models.release_source()
    for at in range(3):
        one, other = beside.read(at), spooled.read(at)
        for part in (0, 1):
            assert torch.equal(one.x[part], other.x[part])
            assert torch.equal(one.y[part], other.y[part])
    files = sorted((tmp_path / "spool").iterdir())
    geometry = fingerprint(folders[0]).geometry
    needed = spooled.spool_bytes(geometry, dtype)
    assert needed == 2 * 320 * 2 * 32 * dtype.itemsize
    assert needed <= sum(path.stat().st_size for path in files) < needed + 3 * 500


def test_batches_on_disk_are_not_read_again(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    original = spool.cached_kv

    def counted(model: Any, ids_BT: torch.Tensor) -> Any:
        runs.append(ids_BT.numel())
        return original(model, ids_BT)

    monkeypatch.setattr(spool, "cached_kv", counted)
    data = pack(sentences(4, seed=1), folders[0], 32, 320)
    feed = Feed(data, 128, pair(folders, torch.float32), tmp_path)
    feed.spool(range(2))
    feed.spool(range(3))
    assert runs == [128, 128, 64]


def test_relevance_comes_in_the_order_of_the_observations(folders: tuple[Path, Path]) -> None:
    data = pack(sentences(4, seed=1), folders[0], 32, 128)
    both = Feed(data, 128, pair(folders, torch.float32)).read(0, weigh=True)
    alone = Feed(data, 32, pair(folders, torch.float32))
    assert both.relevance is not None
    for at in range(4):
        one = alone.read(at, weigh=True)
        assert one.relevance is not None
        rows = slice(at * 32, (at + 1) * 32)
        for part in (0, 1):
            assert one.relevance[part].shape == (3, 4, 32)
            torch.testing.assert_close(
                both.relevance[part][..., rows], one.relevance[part], rtol=1e-3, atol=1e-4
            )
            torch.testing.assert_close(both.y[part][rows], one.y[part], rtol=1e-3, atol=1e-4)


def test_a_model_takes_the_bytes_of_its_weight_files(folders: tuple[Path, Path]) -> None:
    expected = (folders[0] / "model.safetensors").stat().st_size
    assert checkpoint_bytes(folders[0]) == expected > 100_000
