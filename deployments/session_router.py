"""Which engine replica gets a request: the one that its conversation hashes to.

Ray Serve's consistent hashing with Serve's own loop around it. The loop that `ConsistentHashRouter`
brings in Ray 2.60 can end while requests still wait to be placed, and then nothing places them:
under bursts they wait for ever. It knows neither vLLM nor what is asked.
"""

from __future__ import annotations

from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):
    """Sends a session to one replica for as long as that lives and has room."""

    _fulfill_pending_requests = RequestRouter._fulfill_pending_requests
