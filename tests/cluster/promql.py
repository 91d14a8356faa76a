"""PromQL by its words: enough to find a typing error, an unknown function or a wrong name."""

from __future__ import annotations

import re
from typing import Any

FUNCTIONS = {
    "abs",
    "absent",
    "avg",
    "count",
    "histogram_quantile",
    "increase",
    "max",
    "min",
    "rate",
    "sum",
    "vector",
}
KEYWORDS = {"and", "by", "group_left", "ignoring", "offset", "on", "or", "unless", "without"}

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<range>\[(?:\$__rate_interval|(?:\d+(?:ms|[smhdwy]))+)\])
  | (?P<duration>(?:\d+(?:ms|[smhdwy]))+\b)
  | (?P<number>\d+(?:\.\d+)?)
  | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
  | (?P<operator>=~|!~|!=|==|>=|<=|[-+*/%^<>=])
  | (?P<bracket>[(){}])
  | (?P<comma>,)
    """,
    re.VERBOSE,
)
_SELECTOR = re.compile(r"(ray_\w+)\s*\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


def queries(dashboard: dict[str, Any], alerts: dict[str, Any]) -> list[str]:
    """Every expression of a dashboard and of a rule file."""
    shown = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    return shown + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def tokens_of(query: str) -> list[tuple[str, str]]:
    """(kind, text) of every word; ValueError for what is none, or for brackets that do not pair."""
    found: list[tuple[str, str]] = []
    position, open_brackets = 0, []
    while position < len(query):
        match = _TOKEN.match(query, position)
        if match is None:
            raise ValueError(f"no PromQL at {query[position : position + 20]!r}")
        kind, text = str(match.lastgroup), match.group()
        position = match.end()
        if kind == "bracket":
            if text in "({":
                open_brackets.append(text)
            elif not open_brackets or open_brackets.pop() + text not in ("()", "{}"):
                raise ValueError(f"{text!r} closes nothing")
        if kind != "space":
            found.append((kind, text))
    if open_brackets:
        raise ValueError(f"{open_brackets[-1]!r} is not closed")
    for (kind, text), (_, following) in zip(found, [*found[1:], ("end", "")], strict=True):
        called = following in ("(", "by") and text not in KEYWORDS
        if kind == "name" and called and text not in FUNCTIONS:
            raise ValueError(f"{text} is no function of PromQL that is used here")
        if kind == "name" and text in FUNCTIONS and not called:
            raise ValueError(f"{text} is called without arguments")
    return found


def metrics_of(query: str) -> set[str]:
    """The names of the metrics in a query."""
    return {text for kind, text in tokens_of(query) if kind == "name" and text.startswith("ray_")}


def selectors_of(query: str) -> list[tuple[str, str, str]]:
    """(metric, label, value) of every matcher in braces."""
    return [
        (metric, label, value)
        for metric, inside in _SELECTOR.findall(query)
        for label, value in _MATCHER.findall(inside)
    ]
