"""Which conversation a request belongs to, and the token ids that its history really has.

A client sends text back. Rendered and tokenised anew it may differ from what the models read and
wrote, token by token, though the text is the same: then nothing after the first difference could
be reused. So the ids of record are kept where the text agrees with them. It knows no engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from router.conversations import SessionKey, common_prefix_tokens, session_key

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""

_LEAD_TOKENS = 8
"""Equal tokens decoded along, so that a character split over tokens is whole on both sides."""


def session_of(request: Any, tenant: str | None, session_id: str | None) -> SessionKey | None:
    """The conversation of a chat or text completion request; None when it is of none.

    A chat is known by its opening when it has no id: everything up to the first user message, and
    the tools. A text completion needs an id, and one prompt.
    """
    messages = getattr(request, "messages", None)
    if messages is None:
        many = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        if session_id is None or (many and len(request.prompt) > 1):
            return None
        return session_key(tenant, session_id, (), 0)
    dumped = [_plain(message) for message in messages]
    roles = [message.get("role") for message in dumped]
    first = roles.index("user") + 1 if "user" in roles else len(roles)
    opening = [json.dumps(message, sort_keys=True, default=str) for message in dumped[:first]]
    tools = [json.dumps(_plain(tool), sort_keys=True) for tool in request.tools or ()]
    return session_key(tenant, session_id, (*opening, *tools), roles.count("assistant"))


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = value if isinstance(value, dict) else value.model_dump(mode="json")
    return plain


def adopt(history: Sequence[int], rendered: Sequence[int], decode: Decode) -> tuple[int, ...]:
    """`rendered` with the ids of `history` in front, where both say the same text.

    Unchanged when the history's text is not the beginning of the rendered text: then only the
    longest common prefix of ids can be reused.
    """
    same = common_prefix_tokens(history, rendered)
    if same in (len(history), len(rendered)):
        return tuple(rendered)
    lead = max(0, same - _LEAD_TOKENS)
    wanted = decode(list(history[lead:]))
    low, high = same, len(rendered)
    while low < high:
        middle = (low + high) // 2
        if len(decode(list(rendered[lead:middle]))) < len(wanted):
            low = middle + 1
        else:
            high = middle
    if decode(list(rendered[lead:low])) != wanted:
        return tuple(rendered)
    return (*history, *rendered[low:])
