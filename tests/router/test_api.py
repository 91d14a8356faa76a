"""The request extension and its refusals."""

from __future__ import annotations

import pytest

from cluster.errors import RequestError
from router.api import CascadeOptions, parse_options


def test_no_cascade_object_means_no_wish() -> None:
    assert parse_options(None) == CascadeOptions()


def test_options_are_read() -> None:
    wanted = CascadeOptions(force="large", escalate_after_tokens=0, recompute=True)
    body = {"force": "large", "escalate_after_tokens": 0, "recompute": True}
    assert parse_options(body) == wanted


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"treshold": 1}, "cascade.treshold"),
        ({"force": "medium"}, "cascade.force"),
        ({"escalate_after_tokens": -1}, "cascade.escalate_after_tokens"),
        ({"force": "small", "escalate_after_tokens": 3}, "cascade"),
        ({"force": "large", "policy": "margin"}, "cascade"),
        ({"escalate_after_tokens": 3, "target_fraction": 0.3}, "cascade"),
        ({"target_fraction": 0}, "cascade.target_fraction"),
        ({"policy": "magic"}, "cascade.policy"),
        ("large", "cascade"),
    ],
)
def test_a_wrong_field_is_named(value: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_options(value)
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    assert caught.value.param == param


def test_an_unknown_key_lists_the_allowed_ones() -> None:
    with pytest.raises(RequestError, match="recompute, policy, target_fraction"):
        parse_options({"polcy": "margin"})
