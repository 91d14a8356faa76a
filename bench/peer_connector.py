"""vLLM's NixlConnector without what costs it a core on a CPU machine.

As it ships, every worker's main thread moves to the machine's last core, which on two cores is
where both engines then compute, and NIXL's progress thread spins there. Here the worker keeps the
cores that vLLM gave it, and the progress thread sleeps between polls as the cascade's does. What
is moved, when and how is not touched.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as _NixlConnector

_PROGRESS_DELAY_US = 1_000


class _Bindings:
    """NIXL's; the progress thread of an agent sleeps, and its threads may run on any core."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_DELAY_US
        # Threads inherit their maker's cores, and one beside the computing thread would wait.
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            return self._bindings.nixlAgent(name, config)
        finally:
            os.sched_setaffinity(0, cores)


class NixlConnector(_NixlConnector):
    """Found by this name by Ray, which then sets the side channel up, and by vLLM."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not before vLLM has set what UCX reads as it loads.
        from nixl import _api

        cores, bindings = os.sched_getaffinity(0), _api.nixlBind
        _api.nixlBind = _Bindings(bindings)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _api.nixlBind = bindings
            os.sched_setaffinity(0, cores)
