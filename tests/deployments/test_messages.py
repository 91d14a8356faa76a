"""Control messages survive the wire, and nothing else is taken for one."""

from __future__ import annotations

import msgspec
import pytest

from deployments.messages import (
    Abandon,
    EngineLayout,
    Settled,
    TargetBlocks,
    decode,
    done_notification,
    encode,
    handoff_of_notification,
)
from tests.deployments.test_layout import worker


def test_a_message_with_layouts_comes_back_equal() -> None:
    layout = EngineLayout(
        engine="e",
        generation="g",
        control_address="tcp://127.0.0.1:1",
        workers=(worker(rank=0, permutation=b"\x00\x01"), worker(rank=1)),
    )
    message = TargetBlocks(
        handoff_id="h", start_token=32, num_tokens=64, block_ids=(4, 2), layout=layout
    )
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(("Unknown", {})),
        msgspec.msgpack.encode(("Settled", {"handoff_id": "h"})),
        msgspec.msgpack.encode(("Abandon", {"handoff_id": 7, "control_address": "x"})),
    ],
    ids=["empty", "no msgpack", "unknown kind", "field missing", "wrong type"],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a control message"):
        decode(data)


def test_kinds_with_equal_fields_stay_apart() -> None:
    assert isinstance(decode(encode(Settled(handoff_id="h", ok=True))), Settled)
    assert isinstance(decode(encode(Abandon(handoff_id="h", control_address="a"))), Abandon)


def test_only_our_own_notifications_name_a_handoff() -> None:
    assert handoff_of_notification(done_notification("abc")) == "abc"
    assert handoff_of_notification(b"NIXL heartbeat") is None
