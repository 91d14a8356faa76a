"""The work folder of a fit: what survives when it is interrupted, and what its shards leave.

Files carry the key of the settings and data they belong to. Knows names and tensors, not what they
mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import MapperError

_KEY_FILE = "work.json"


class Work:
    """A folder of named sets of tensors, created when the first is saved.

    Raises MapperError when the folder holds something else; what was left by other settings or data
    is removed, and `console` says so. `plan` is what `begin` recorded, None in a new folder.
    """

    def __init__(self, folder: Path, key: str, console: Console) -> None:
        self.folder = folder
        self.plan: str | None = None
        self._key = key
        record = folder / _KEY_FILE
        if folder.exists() and not record.is_file() and any(folder.iterdir()):
            raise MapperError(
                f"{folder} exists and is not the work folder of a fit; choose another"
            )
        if not record.is_file():
            return
        known = json.loads(record.read_text())
        if known["key"] == key:
            self.plan = known["plan"]
            console.print(f"going on from {folder}")
        else:
            console.print(f"{folder} was left by a fit of other models, data or settings: removed")
            shutil.rmtree(folder)

    def begin(self, plan: str) -> None:
        """Record the plan that the files follow, unless there is one already."""
        self.plan = plan if self.plan is None else self.plan

    def make(self) -> Path:
        """The folder, made if it is missing."""
        assert self.plan is not None, "a plan comes before its files"
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.folder / _KEY_FILE
        if not record.is_file():
            record.write_text(json.dumps({"key": self._key, "plan": self.plan}))
        return self.folder

    def save(self, name: str, tensors: Mapping[str, Tensor], batches: int = 0) -> Path:
        """Write or replace, in one step, a set of tensors that stands for so many batches."""
        self.make()
        path = self.path(name)
        partial = path.with_suffix(".partial")
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            partial,
            metadata={"key": self._key, "batches": str(batches)},
        )
        os.replace(partial, path)
        return path

    def load(self, name: str) -> tuple[dict[str, Tensor], int] | None:
        """A set of tensors and its number of batches; None when it was never saved.

        MapperError when the file belongs to other settings, as one copied from elsewhere may.
        """
        path = self.path(name)
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["key"] != self._key:
                raise MapperError(f"{path} was made with other models, data or settings; remove it")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, int(metadata["batches"])

    def path(self, name: str) -> Path:
        """The file of a set of tensors."""
        return self.folder / f"{name}.safetensors"

    def discard(self, name: str) -> None:
        """Remove a set of tensors, if it is there."""
        self.path(name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        if (self.folder / _KEY_FILE).is_file():
            shutil.rmtree(self.folder)
