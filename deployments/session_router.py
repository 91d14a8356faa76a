"""Which engine replica gets a request: the one that its conversation hashes to.

Ray Serve's consistent hashing with Serve's own loop around it. The loop that `ConsistentHashRouter`
brings in Ray 2.60 can end while requests still wait to be placed, and then nothing places them:
under bursts they wait for ever. It knows neither vLLM nor what is asked.
"""

from __future__ import annotations

from collections import OrderedDict

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

BEGINNING = "generate"
FOLLOWING = frozenset({"take_ticket", "release"})
"""Calls about what the latest `BEGINNING` of the session left in its replica, and nowhere else."""


class SessionRouter(ConsistentHashRouter):
    """Sends a session to one replica for as long as that lives and has room.

    What follows on an answer goes where the answer began, also when replicas have come or when
    that one takes no more answers because it is being replaced (Ray 2.60 lets it accept calls until
    those that it has are over).
    """

    remembered = 4_096
    """How many sessions, over all answers of this process."""

    _fulfill_pending_requests = RequestRouter._fulfill_pending_requests

    @property
    def _began(self) -> OrderedDict[str, RunningReplica]:
        """By session, the latest last. Serve pickles this class: no `cached_property`, no lock."""
        found: OrderedDict[str, RunningReplica] = self.__dict__.setdefault("began", OrderedDict())
        return found

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        session, method = pending_request.metadata.session_id, pending_request.metadata.call_method
        began = self._began.get(session)
        # A second try means that this one is gone or refused.
        if method in FOLLOWING and began is not None and not is_retry:
            return began
        chosen = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if method == BEGINNING and session:
            self._began[session] = chosen
            self._began.move_to_end(session)
            while len(self._began) > self.remembered:
                self._began.popitem(last=False)
        return chosen
