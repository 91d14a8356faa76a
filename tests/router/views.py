"""Requests as policies see them, for tests."""

from __future__ import annotations

from router.policy import RequestView, Role


def view(
    request_hash: str, *, last_model: Role | None = None, small: int = 100, large: int = 100
) -> RequestView:
    """A prompt of 100 tokens, of which each model has not read so many."""
    return RequestView(
        request_hash=request_hash,
        prompt_tokens=100,
        last_model=last_model,
        unread_tokens={"small": small, "large": large},
    )
