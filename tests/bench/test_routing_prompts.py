"""The prompts of the routing bench and their checks."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from bench.prompts import Check, prompts, split, words


def test_there_are_enough_and_no_two_are_equal() -> None:
    found = prompts()
    assert len(found) == len({one.text for one in found}) == len({one.key for one in found})
    assert len(found) >= 1_600
    assert len({one.kind for one in found}) == 13


def test_they_are_the_same_on_every_machine() -> None:
    text = "\n".join(one.text for one in prompts())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "f457f23aefba0e01"


def test_the_split_gives_both_parts_every_kind_in_about_its_share() -> None:
    calibration, held_out = split()
    assert len(calibration) == 1_000 and len(held_out) >= 500
    assert not {one.key for one in calibration} & {one.key for one in held_out}
    here, there = (Counter(one.kind for one in part) for part in (calibration, held_out))
    for kind, count in here.items():
        share, other = count / len(calibration), there[kind] / len(held_out)
        # Four standard errors of a difference of shares that were drawn from one pool.
        assert abs(share - other) < 4 * (share * (1 - share) * (1 / 1_000 + 1 / 600)) ** 0.5


def test_some_prompts_are_long_enough_for_a_handoff() -> None:
    long = [one for one in prompts() if len(words(one.text)) > 50]
    assert {one.kind for one in long} >= {"passage", "summary (open)"}
    assert len(long) > 250


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("The capital is Paris.", True),
        ("PARIS!", True),
        ("The Parisian way", False),
        ("", False),
    ],
)
def test_a_check_looks_for_whole_words(answer: str, passes: bool) -> None:
    assert Check(("Paris",)).passes(answer) is passes


def test_a_choice_is_what_is_named_first() -> None:
    check = Check(("metal", "metals"), ("bird", "birds"))
    assert check.passes("Iron is a metal, not a bird.")
    assert not check.passes("A bird, or a metal.") and not check.passes("Neither.")


def test_names_of_several_words_count_as_a_whole() -> None:
    check = Check(("Buenos Aires",))
    assert check.passes("It is Buenos  Aires") and not check.passes("Aires, Buenos")


def test_a_repetition_has_to_begin_the_answer() -> None:
    check = Check(("The boat is old.",), opening=True)
    assert check.passes("the boat is old, and more") and not check.passes("Well: the boat is old.")
