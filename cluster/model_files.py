"""From the name of a model or mapper in the configuration to its files on this machine.

Fetches no weights: of a hub model only the configuration and the tokenizer. It does not judge what
the files say.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import QUICKSTART
from cluster.errors import ConfigError, ModelError

_HUB_FILES = ("config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json")
_HUB_TIMEOUT_S = 5.0


def locate_model(source: str) -> Path:
    """Folder with at least `config.json` of a configured model source.

    Raises ConfigError when `source` names nothing that could exist, ModelError when the folder is
    not on this machine, the quickstart pair is not prepared, or the hub has no such model or does
    not answer.
    """
    if source.startswith(QUICKSTART):
        name = source.removeprefix(QUICKSTART)
        if name not in ("small", "large"):
            raise ConfigError(f"{source}: there are only quickstart:small and quickstart:large")
        from cluster.quickstart.pair import default_home

        folder = default_home() / "models" / name
        if not (folder / "config.json").is_file():
            raise ModelError(f"{source} is not prepared yet; run `kvcascade models`")
        return folder
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith((".", "/", "~")):
        raise ModelError(f"{source}: no such folder on this machine")
    if source.count("/") != 1:
        raise ConfigError(
            f"{source} is no folder and no Hugging Face repository (`owner/name`); give one, or "
            "`quickstart:small` or `quickstart:large`"
        )
    return _fetch(source)


def _fetch(repository: str) -> Path:
    """The hub's small files of a model; its cached ones when the hub does not answer."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        # Asked first because it gives up at once; a download would try again for half a minute.
        siblings = HfApi().model_info(repository, timeout=_HUB_TIMEOUT_S).siblings or []
        names = [one.rfilename for one in siblings if one.rfilename in _HUB_FILES]
        folders = [Path(hf_hub_download(repository, name)).parent for name in names]
    except (GatedRepoError, RepositoryNotFoundError):
        raise ModelError(
            f"the hub has no model {repository}, or this account may not read it; correct the "
            "name or log in with `hf auth login`"
        ) from None
    except Exception as error:  # the hub client's network errors have no public base class
        try:
            return Path(snapshot_download(repository, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{repository}: neither the hub ({error}) nor its cache on this machine has it; "
                "give a folder that holds the model to have it checked"
            ) from None
    if not folders:
        raise ModelError(f"{repository} has no config.json; name a model in transformers' format")
    return folders[0]


@dataclass(frozen=True)
class Tokenizer:
    """The part of a fast tokenizer that gives tokens their ids."""

    sha256: str
    vocabulary: dict[str, int]
    merges: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a model folder, None when it has no `tokenizer.json`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        data = path.read_bytes()
        content: dict[str, Any] = json.loads(data)
        model = content["model"]
        added = {one["content"]: int(one["id"]) for one in content.get("added_tokens") or []}
        merges = model.get("merges") or []
        return cls(
            sha256=hashlib.sha256(data).hexdigest(),
            vocabulary=dict(model.get("vocab") or {}) | added,
            # Older files write a merge as "a b", newer ones as ["a", "b"].
            merges=tuple(one if isinstance(one, str) else " ".join(one) for one in merges),
        )

    def difference(self, other: Tokenizer) -> str | None:
        """What sets the two apart, in a few words; None when every text has the same ids."""
        if self.sha256 == other.sha256:
            return None
        ours, theirs = self.vocabulary, other.vocabulary
        differing = sum(ours.get(token) != theirs.get(token) for token in ours.keys() | theirs)
        if differing:
            return f"{differing} of {max(len(ours), len(theirs))} tokens have other ids"
        return None if self.merges == other.merges else "the merge rules differ"
