"""`manifest.json` of a mapper folder: what the mapper was made for, from what, and how good it is.

Knows no tensors. A mapper folder holds this file and `mapper.safetensors`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from cluster.errors import MapperError, MapperMismatch
from mappers.fingerprint import ModelFingerprint
from mappers.judging.records import ScoreReport

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "mapper.safetensors"

Support = Literal["full", "head_local"]
Selection = Literal["top", "greedy"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Ridge(_Frozen):
    """Penalty on weights. It is added to the diagonal of the per-token covariance of the features.

    `relative`: `value` is a share of that covariance's mean diagonal instead of an absolute number.
    The paper's 0.01 is absolute.
    """

    value: float = 0.01
    relative: bool = False


class DataRecord(_Frozen):
    """The exact token sequences a fit read or was judged on."""

    tokens: int
    texts: int
    sequence_tokens: int
    sha256: str


class LayerR2(_Frozen):
    """R2 of mapped position-free keys and values on held-out tokens, one per target layer."""

    k: tuple[float, ...]
    v: tuple[float, ...]

    @property
    def mean_k(self) -> float:
        """Average over layers, keys."""
        return sum(self.k) / len(self.k)

    @property
    def mean_v(self) -> float:
        """Average over layers, values."""
        return sum(self.v) / len(self.v)


class AttentionWeighting(_Frozen):
    """Calibration tokens were weighted by what the target's attention reads of them.

    Weights are 1 + alpha (r - 1), r being relevance at `boundaries` positions per sequence, to the
    `power`, of mean 1; `alpha_k_LG` and `alpha_v_LG` by target layer and head group, each the
    largest that leaves an effective sample of `least_effective_tokens` (arXiv 2609.00891).
    """

    power: float = 1.0
    boundaries: int
    least_effective_tokens: int
    alpha_k_LG: tuple[tuple[float, ...], ...]
    alpha_v_LG: tuple[tuple[float, ...], ...]


class Networks(_Frozen):
    """Shape of a nonlinear mapper's networks; `residual` when they stand on a linear map."""

    hidden_units: int
    residual: bool


class MapperManifest(_Frozen):
    """Everything recorded beside a mapper's weights. `score` is None until the mapper is scored.

    `networks` belongs to that kind alone; `ridge` is then that of the map they stand on.
    """

    version: Literal[1] = 1
    kind: Literal["linear", "networks"] = "linear"
    networks: Networks | None = None
    source: ModelFingerprint
    target: ModelFingerprint
    support: Support
    k: int
    source_layers: tuple[tuple[int, ...], ...]
    ridge: Ridge
    first_token_weight: int
    selection: Selection = "top"
    attention_weighting: AttentionWeighting | None = None
    calibration: DataRecord
    heldout: DataRecord
    heldout_r2: LayerR2
    score: ScoreReport | None
    weights_sha256: str
    created_by: str

    @model_validator(mode="after")
    def _one_kind(self) -> MapperManifest:
        if (self.kind == "networks") != (self.networks is not None):
            raise ValueError(f"kind {self.kind} does not go with networks {self.networks}")
        return self

    def check(self, source: ModelFingerprint, target: ModelFingerprint) -> None:
        """Raise MapperMismatch, naming the first field in which a running model differs."""
        for role, made_for, running in (
            ("source", self.source, source),
            ("target", self.target, target),
        ):
            require_equal(role, made_for, running)


def require_equal(role: str, made_for: ModelFingerprint, running: ModelFingerprint) -> None:
    """Raise MapperMismatch at the first field (dotted path) in which the fingerprints differ."""
    expected, actual = _flatten(made_for.model_dump(), role), _flatten(running.model_dump(), role)
    for name, value in expected.items():
        if actual[name] != value:
            raise MapperMismatch(
                f"{name} differs: the mapper was made for {_short(value)}, the running model has "
                f"{_short(actual[name])}; refit with `kvcascade fit` for the models that are "
                f"running, or run the models it was made for"
            )


def read_manifest(folder: Path) -> MapperManifest:
    """The manifest of a mapper folder. MapperError when missing or malformed."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise MapperError(f"{path} is missing: make the mapper with `kvcascade fit`")
    try:
        return MapperManifest.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MapperError(
            f"{path} cannot be read: {where}: {first['msg']}; refit with `kvcascade fit`"
        ) from error


def created_by() -> str:
    """What writes a manifest or a report, with its version."""
    try:
        return f"kvcascade {version('kvcascade')}"
    except PackageNotFoundError:
        return "kvcascade, run from its source tree"


def _flatten(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        flat |= _flatten(value, name) if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) > 20 else text
