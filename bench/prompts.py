"""Questions for the routing bench: made from templates and slots, the same ones on every machine.

Two kinds of prompts: those with a check, which says whether an answer is right, and open ones. It
knows no models and asks nobody.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from bench.prompts_slots import (
    CHOICES,
    CITIES,
    COLOURS,
    CURRENCIES,
    DAYS,
    JOBS,
    LANGUAGES,
    NAMES,
    NATIONS,
    OPPOSITES,
    PLACES,
    PLURALS,
    PREPOSITIONS,
    SCENES,
    STATEMENTS,
    THINGS,
    TOPICS,
    TOWNS,
)

CALIBRATION_PROMPTS = 1_000


@dataclass(frozen=True)
class Check:
    """An answer is right when it names one of `right` before any of `wrong`, as whole words.

    `opening`: the answer has to begin with `right`, word by word.
    """

    right: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    opening: bool = False

    def passes(self, answer: str) -> bool:
        """Whether this answer is right; case and punctuation do not count."""
        said = words(answer)
        if self.opening:
            return any(said[: len(words(one))] == words(one) for one in self.right)
        found = [at for one in self.right if (at := _find(said, words(one))) is not None]
        traps = [at for one in self.wrong if (at := _find(said, words(one))) is not None]
        return bool(found) and (not traps or min(found) < min(traps))


@dataclass(frozen=True)
class Prompt:
    """One question. `check` is None for an open one."""

    kind: str
    text: str
    check: Check | None

    @property
    def key(self) -> str:
        """12 hex digits that stand for the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def words(text: str) -> list[str]:
    """Lower-case words of letters, digits and apostrophes."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


def prompts() -> list[Prompt]:
    """All prompts, no text twice, in an order that a hash of their text gives."""
    found: dict[str, Prompt] = {}
    for kind, (make, most) in _KINDS.items():
        unique = {one.text: one for one in (Prompt(kind, text, check) for text, check in make())}
        found |= {one.text: one for one in sorted(unique.values(), key=_lot("take"))[:most]}
    # A draw of its own: prompts that won a place in their kind would come first in this one too.
    return sorted(found.values(), key=_lot("order"))


def split(calibration: int = CALIBRATION_PROMPTS) -> tuple[list[Prompt], list[Prompt]]:
    """(for calibration, held out), by the order of the hash; both hold every kind."""
    everything = prompts()
    return everything[:calibration], everything[calibration:]


def _lot(purpose: str) -> Callable[[Prompt], int]:
    return lambda prompt: _draw(purpose, prompt.text)


def _find(said: list[str], sought: list[str]) -> int | None:
    for at in range(len(said) - len(sought) + 1):
        if said[at : at + len(sought)] == sought:
            return at
    return None


_Made = Iterator[tuple[str, Check | None]]


def _capitals() -> _Made:
    for nation, capital in NATIONS.items():
        check = Check((capital,))
        yield f"What is the capital of {nation}?", check
        yield f"Please tell me the capital city of {nation} in one sentence.", check


def _cities() -> _Made:
    for city, (nation, aliases) in CITIES.items():
        check = Check((nation, *aliases))
        yield f"In which country is the city of {city}?", check
        yield f"Where is {city}? Name the country.", check


def _languages() -> _Made:
    for nation, languages in LANGUAGES.items():
        yield f"What is the main language of {nation}?", Check(languages)
        yield f"What is the official language of {nation}?", Check(languages)
    for nation, currency in CURRENCIES.items():
        check = Check((currency, f"{currency}s"))
        yield f"What is the currency of {nation}?", check
        yield f"Which currency do people use in {nation}?", check


def _plurals() -> _Made:
    for one, many in PLURALS.items():
        check = Check((many,))
        yield f'What is the plural of "{one}"?', check
        yield f'What is the plural form of the word "{one}"?', check


def _opposites() -> _Made:
    for word, right in OPPOSITES.items():
        yield f'What is the opposite of "{word}"?', Check(right)
        yield f'What is the opposite of the word "{word}"?', Check(right)


def _choices() -> _Made:
    for subject, (right, *wrongs) in CHOICES.items():
        for number, wrong in enumerate(wrongs):
            check = Check((right, f"{right}s"), (wrong, f"{wrong}s"))
            first, second = (right, wrong) if number % 2 else (wrong, right)
            yield f"Is {subject} {_a(first)} or {_a(second)}?", check
            yield f"{subject.capitalize()}: is it {_a(second)} or {_a(first)}?", check


def _whereabouts() -> _Made:
    for thing, preposition, place in product(THINGS, PREPOSITIONS, PLACES):
        if _draw(thing, preposition, place) % 4:
            continue
        where = f"{preposition} the {place}"
        check = Check((where,))
        yield f"The {thing} is {where}. Where is the {thing}?", check


def _statements() -> _Made:
    for (fact, question, answer), name in product(STATEMENTS, NAMES):
        yield f"{fact.format(name)} {question.format(name)}", Check((answer,))


def story(number: int) -> tuple[str, dict[str, str]]:
    """A passage of three or four sentences, and what its slots hold."""

    def pick(slot: str, among: tuple[str, ...]) -> str:
        return among[_draw(slot, str(number)) % len(among)]

    first, second = pick("first", NAMES), pick("second", NAMES)
    if first == second:
        second = NAMES[(NAMES.index(first) + 1) % len(NAMES)]
    slots = {
        "name": first,
        "other": second,
        "thing": pick("thing", THINGS),
        "colour": pick("colour", COLOURS),
        "town": pick("town", TOWNS),
        "day": pick("day", DAYS),
        "job": pick("job", JOBS),
    }
    return pick("scene", SCENES).format(**slots), slots


def _passages() -> _Made:
    for number in range(400):
        text, slots = story(number)
        asked: tuple[tuple[str, str], ...] = (
            (f"Who found the {slots['thing']}?", slots["other"]),
            ("In which town did this happen?", slots["town"]),
            (f"On which day did {slots['name']} lose the {slots['thing']}?", slots["day"]),
            (f"What did {slots['name']} lose?", slots["thing"]),
            (f"What is the job of {slots['other']}?", slots["job"]),
        )
        question, answer = asked[number % len(asked)]
        yield f"Read the passage and answer the question.\n\n{text}\n\n{question}", Check((answer,))


def _repeats() -> _Made:
    for number in range(200):
        text, _ = story(1_000 + number)
        sentence = text.split(". ")[number % 2] + "."
        yield f"Repeat this sentence exactly: {sentence}", Check((sentence,), opening=True)


def _explanations() -> _Made:
    for topic in TOPICS:
        yield f"Explain {topic} in one sentence.", None
        yield f"Tell me one interesting fact about {topic}.", None


def _letters() -> _Made:
    for name, thing in product(NAMES, THINGS):
        if _draw("letter", name, thing) % 8 == 0:
            yield f"Write a short note that thanks {name} for the {thing}.", None
    for name, town in product(NAMES, TOWNS):
        if _draw("greeting", name, town) % 10 == 0:
            yield f"Write a short greeting to {name}, who has just moved to {town}.", None


def _summaries() -> _Made:
    for number in range(120):
        text, _ = story(2_000 + number)
        yield f"Summarize this in one sentence.\n\n{text}", None


def _draw(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:8], "big")


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


_KINDS: dict[str, tuple[Callable[[], _Made], int]] = {
    "capital": (_capitals, 150),
    "city": (_cities, 90),
    "language or currency": (_languages, 100),
    "plural": (_plurals, 110),
    "opposite": (_opposites, 110),
    "choice": (_choices, 220),
    "where is it": (_whereabouts, 190),
    "statement": (_statements, 190),
    "passage": (_passages, 250),
    "repeat": (_repeats, 60),
    "explain (open)": (_explanations, 90),
    "letter (open)": (_letters, 60),
    "summary (open)": (_summaries, 60),
}
"""Kinds with what makes their prompts and how many are taken at most."""
