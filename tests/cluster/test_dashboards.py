"""The dashboard and the alert rules: their formats, their PromQL, and every metric that they name.

A name is right when `cluster/telemetry.py` declares it and Ray exports it so; the second half is
tested on a running cascade in `tests/real/test_metrics_scrape.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from cluster.telemetry import STAGES
from tests.cluster.promql import metrics_of, queries, selectors_of, tokens_of
from tests.conftest import REPOSITORY

DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "cluster/grafana.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster/alerts.yaml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
DURATION = re.compile(r"([0-9]+(ms|[smhdwy]))+")


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Exported series by name with the labels that the project sets."""
    found: dict[str, set[str]] = {}

    def fake(suffixes: tuple[str, ...]) -> Any:
        def make(name: str, **options: Any) -> None:
            for suffix in suffixes:
                labels = set(options.get("tag_keys", ()))
                found[f"ray_{name}{suffix}"] = labels | ({"le"} if suffix == "_bucket" else set())

        return make

    monkeypatch.setattr("ray.util.metrics.Gauge", fake(("",)))
    monkeypatch.setattr("ray.util.metrics.Counter", fake(("",)))
    monkeypatch.setattr("ray.util.metrics.Histogram", fake(("_bucket", "_count", "_sum")))
    from cluster.telemetry import EngineMetrics, MapperMetrics, Metrics

    for kind in (Metrics, EngineMetrics, MapperMetrics):
        kind()
    return found


def test_the_dashboard_is_one_that_grafana_provisions() -> None:
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] and DASHBOARD["title"]
    assert "__inputs" not in DASHBOARD  # asked for on manual import alone
    (variable,) = DASHBOARD["templating"]["list"]
    source = (variable["name"], variable["type"], variable["query"])
    assert source == ("datasource", "datasource", "prometheus")
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["type"] == "timeseries" and panel["description"].endswith(".")
    assert panel["datasource"] == chosen and panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == chosen and target["expr"] and target["legendFormat"]


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & own, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert shown <= {label.strip() for labels in kept for label in labels.split(",")}


def test_the_alert_file_has_the_keys_of_a_prometheus_rule_file() -> None:
    assert set(ALERTS) == {"groups"}
    for group in ALERTS["groups"]:
        assert set(group) <= {"name", "interval", "limit", "labels", "rules"}
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) >= 7


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_is_complete(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Kvcascade[A-Za-z]+", rule["alert"])
    assert DURATION.fullmatch(rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    for text in rule["annotations"].values():
        assert text.count("{{") == text.count("}}")


@pytest.mark.parametrize("query", queries(DASHBOARD, ALERTS))
def test_every_query_is_promql_by_its_words(query: str) -> None:
    assert tokens_of(query)


@pytest.mark.parametrize(
    "broken", ["sum(rate(a[5m])", "sum rate(a[5m]))", "median(a)", 'a{b="c}', "rate(a[5 minutes])"]
)
def test_what_is_no_promql_is_found(broken: str) -> None:
    with pytest.raises(ValueError):
        tokens_of(broken)


@pytest.mark.parametrize("query", queries(DASHBOARD, ALERTS))
def test_every_metric_and_label_is_declared(query: str, declared: dict[str, set[str]]) -> None:
    assert metrics_of(query)
    for metric in metrics_of(query):
        assert metric in declared, f"{metric} is not in cluster/telemetry.py"
    for metric, label, _ in selectors_of(query):
        assert label in declared[metric], f"{metric} has no label {label}"
    kept = {
        label for labels in re.findall(r"by \(([^)]+)\)", query) for label in labels.split(", ")
    }
    assert kept <= set().union(*(declared[metric] for metric in metrics_of(query)))


def test_values_of_labels_are_those_that_exist() -> None:
    known = {
        "stage": set(STAGES),
        "path": {"mapped", "recompute"},
        "outcome": {"mapped", "recompute", "cancelled"},
        "temperature": {"cold", "warm", "none"},
        "state": {"total", "free", "pinned", "loading"},
        "direction": {"read", "written", "small_to_large", "large_to_small"},
    }
    for query in queries(DASHBOARD, ALERTS):
        for _, label, value in selectors_of(query):
            if label in known:
                assert set(value.split("|")) <= known[label]


def test_every_declared_metric_is_on_the_dashboard(declared: dict[str, set[str]]) -> None:
    shown = {name for query in queries(DASHBOARD, {"groups": []}) for name in metrics_of(query)}
    base = re.compile(r"_(bucket|count|sum)$")
    assert {base.sub("", name) for name in declared} == {base.sub("", name) for name in shown}
