"""Where models and mappers are: turns a configuration's names into folders.

Imports nothing heavy; a Hugging Face repository is left to vLLM unless a folder is needed.
"""

from __future__ import annotations

from pathlib import Path

from cluster.config import QUICKSTART
from cluster.errors import MapperError, ModelError
from cluster.model_files import locate_model

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def resolve_model(source: str) -> str:
    """The folder of `source` if it is local or the quickstart pair, else the hub's name as it is.

    Prepares the quickstart pair when it is asked for and not there yet.
    """
    if source.startswith(QUICKSTART):
        from cluster.quickstart.pair import prepare_pair

        which = source.removeprefix(QUICKSTART)
        pair = prepare_pair()
        folders = {"small": pair.small, "large": pair.large}
        if which not in folders:
            raise ModelError(f"{source}: there are only quickstart:small and quickstart:large")
        return str(folders[which])
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{source}: the folder holds no config.json; is it a model?")
        return str(path)
    if source.startswith((".", "/", "~")):
        raise ModelError(f"{source}: no such folder")
    return source


def model_folder(source: str) -> Path:
    """A local folder with the whole model, fetched from the hub when it has to be.

    Raises ModelError when the hub does not answer and nothing is cached.
    """
    resolved = Path(resolve_model(source))
    if resolved.is_dir():
        return resolved
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source))
    except Exception as error:
        raise ModelError(f"{source}: neither a folder nor reachable on the hub ({error})") from None


def kv_bytes_per_token(source: str, dtype: str) -> int:
    """Bytes of KV cache of one token over all layers and KV heads."""
    from mappers.geometry import kv_geometry, read_config

    geometry = kv_geometry(read_config(locate_model(source)))
    return geometry.kv_bytes_per_token(_DTYPE_BYTES[dtype])


def resolve_mapper(value: str, *, back: bool = False) -> Path | str:
    """The folder of a mapper; "identity" stays a word. Raises MapperError when it is missing.

    `back`: which of the quickstart pair's two mappers "quickstart" means.
    """
    if value == "identity":
        return value
    quickstart = value == "quickstart"
    folder = quickstart_mapper_folder(back=back) if quickstart else Path(value).expanduser()
    if not (folder / "manifest.json").is_file():
        models = "`kvcascade models --back`" if back else "`kvcascade models`"
        remedy = models if quickstart else "`kvcascade fit`"
        raise MapperError(f"{value}: no mapper in {folder}; make it with {remedy}")
    return folder


def quickstart_mapper_folder(*, back: bool = False) -> Path:
    """Where a mapper of the quickstart pair lies once it is fitted."""
    from cluster.quickstart.pair import default_home

    return default_home() / "mappers" / ("large-to-small" if back else "small-to-large")
