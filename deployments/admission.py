"""How many requests one replica works on at once. It knows nothing of what they ask."""

from __future__ import annotations

from deployments.openai_errors import RATE_LIMIT, ApiError

RETRY_AFTER_S = 1


class Seat:
    """One admitted request."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def leave(self) -> None:
        """The request is over. Idempotent."""
        if self._admission is not None:
            self._admission.taken -= 1
            self._admission = None


class Admission:
    """Lets `limit` requests in and refuses the next; None: no limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.taken = 0

    def enter(self) -> Seat:
        """Take a seat; raises ApiError (429, with Retry-After) when there is none."""
        if self._limit is not None and self.taken >= self._limit:
            raise ApiError(
                429,
                f"this endpoint works on {self._limit} requests already; try again",
                code=RATE_LIMIT,
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self.taken += 1
        return Seat(self)
