"""`kvcascade status` and `kvcascade top` against the real routes with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import local
from cluster.cli import app
from deployments import status as serve_status
from deployments.api_keys import ApiKeys, load_api_keys
from deployments.openai_app import Service, build_http_app
from tests.cluster.scrape import scrape_text
from tests.fake_endpoint import STATS, listening

POOL = {"num_blocks": 101, "free_blocks": 60, "pinned_blocks": 30, "loading_blocks": 2}
SERVE: dict[str, Any] = {
    "application": "cascade",
    "status": "RUNNING",
    "message": "",
    "nodes": {"a" * 56: "10.0.0.1", "b" * 56: "10.0.0.2"},
    "deployments": {
        "router": {"status": "HEALTHY", "message": "", "replicas": {"RUNNING": 1}},
        "small": {
            "status": "HEALTHY",
            "message": "",
            "replicas": {"RUNNING": 1},
            "described": [{**POOL, "node_id": "a" * 56, "name": "tiny-1b"}],
        },
        "mapper": {
            "status": "UPSCALING",
            "message": "",
            "replicas": {"RUNNING": 2, "STARTING": 1},
            "described": [
                {"node_id": "b" * 56, "running": 3, "pool_in_use_bytes": 12_500_000},
                {"node_id": "c" * 56, "running": 0, "pool_in_use_bytes": 0},
            ],
        },
    },
}


@contextmanager
def endpoint(
    *,
    health: dict[str, str | None] | None = None,
    serve: dict[str, Any] | None = SERVE,
    keys: ApiKeys | None = None,
) -> Iterator[str]:
    async def answer_health() -> dict[str, str | None]:
        return {"tiny-1b": None, "mapper": None} if health is None else health

    async def answer_status() -> dict[str, Any]:
        assert serve is not None
        return serve

    async def answer_metrics() -> str:
        return scrape_text()

    chat: Any = None
    service = Service(
        chat=chat,
        health=answer_health,
        metrics=answer_metrics,
        stats=lambda: STATS,
        status=None if serve is None else answer_status,
        keys=keys,
    )
    with listening(build_http_app(service)) as url:
        yield url


def run(*words: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120"}, **options)


def cells(output: str, first: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_a_healthy_cascade_is_one_table_and_exit_code_0() -> None:
    with endpoint() as url:
        done = run("status", "--url", url)
    assert done.exit_code == 0, done.output
    small = ["small", "healthy", "1/1", "10.0.0.1", "40", "30", "2", "60", "-", "-"]
    assert cells(done.output, "small") == small
    mapper = ["mapper", "upscaling", "2/3", "10.0.0.2", *"----", "3", "12.5", "MB"]
    assert cells(done.output, "mapper") == mapper
    # The second replica of the mapper, on a node that Ray no longer lists.
    assert cells(done.output, "c" * 8) == ["c" * 8, *"----", "0", "0", "B"]
    assert "30.0% of 40 answers escalated, target 25.0%" in done.output
    assert "10 mapped, 1 recompute, 1 cancelled; 12.3 s of prefill saved" in done.output


def test_json_holds_every_answer() -> None:
    with endpoint() as url:
        found = json.loads(run("status", "--url", f"{url}/v1", "--json").stdout)
    assert found["healthy"] is True and found["problems"] == []
    assert found["stats"] == STATS and found["serve"] == SERVE
    assert found["health"] == {"tiny-1b": "ok", "mapper": "ok"}


def test_a_part_that_does_not_answer_is_exit_code_1() -> None:
    with endpoint(health={"tiny-1b": None, "mapper": "no answer within 10 s"}) as url:
        done = run("status", "--url", url)
    assert done.exit_code == 1
    assert "PROBLEM mapper: no answer within 10 s" in done.output


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": "UNHEALTHY", "message": "died"}, "mapper: UNHEALTHY, died"),
        ({"replicas": {"STARTING": 1}}, "mapper: no running replica"),
        ({"failed": "RayActorError: gone"}, "mapper: RayActorError: gone"),
    ],
)
def test_every_kind_of_broken_deployment_is_named(change: dict[str, Any], problem: str) -> None:
    parts = SERVE["deployments"]
    broken = {**SERVE, "deployments": {**parts, "mapper": {**parts["mapper"], **change}}}
    with endpoint(serve=broken) as url:
        found = json.loads(run("status", "--url", url, "--json").stdout)
    assert found["problems"] == [problem]


def test_an_endpoint_without_the_status_route_shows_its_health() -> None:
    with endpoint(serve=None) as url:
        done = run("status", "--url", url)
    assert done.exit_code == 0
    assert "tiny-1b: ok, mapper: ok" in done.output


def test_where_nothing_answers_there_is_one_clear_line() -> None:
    with endpoint() as url:
        pass
    for command in ("status", "top"):
        done = run(command, "--url", url)
        assert done.exit_code == 1
        assert done.stderr.splitlines() == [
            f"error: nothing answers at {url}: start the cascade with `kvcascade serve`, or name "
            "its address with --url"
        ]


def test_ray_is_asked_where_the_endpoint_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    state = {
        "application": "x",
        "status": "DEPLOY_FAILED",
        "message": "Traceback:\n  File\nValueError: no such folder",
        "deployments": {},
    }
    monkeypatch.setattr(local, "start_local_ray", lambda *, address: joined.append(address))
    monkeypatch.setattr(serve_status, "application_status", lambda name: state)
    with endpoint() as url:
        pass
    done = run("status", "--url", url, "--ray-address", "auto", "--json")
    assert done.exit_code == 1 and joined == ["auto"]
    assert json.loads(done.stdout)["problems"] == [
        f"nothing answers at {url}",
        "application: DEPLOY_FAILED, ValueError: no such folder",
    ]


def test_without_a_key_health_still_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEYS", "team:secret")
    with endpoint(keys=load_api_keys(None, "THE_KEYS")) as url:
        keyless = run("status", "--url", url)
        wrong = run("status", "--url", url, "--api-key", "guess")
        done = run("status", "--url", url, "--api-key", "secret")
    assert keyless.exit_code == 0
    assert "give a key with --api-key or KVCASCADE_API_KEY" in keyless.stdout
    assert wrong.exit_code == 2 and "does not know this API key" in wrong.stderr
    assert done.exit_code == 0 and "escalated" in done.stdout


def test_top_once_shows_what_was_counted_since_the_start() -> None:
    with endpoint() as url:
        done = run("top", "--url", url, "--once")
    assert done.exit_code == 0, done.output
    rows = (line.strip() for line in done.output.splitlines())
    lines = {row.split("  ")[0]: row.split() for row in rows}
    # 9 of 12 handoffs took 100 to 200 ms, the rest 200 to 500 ms.
    assert lines["handoffs, mapped"][2:] == ["-", "167", "ms", "440", "ms", "12"]
    assert lines["bytes written"][2:] == ["-", "1.5", "GB"]
    assert lines["requests in flight"][3:] == ["2"]
    assert lines["first token of tiny-1b"][4:] == ["50", "ms", "95", "ms"]


def test_top_ends_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    with endpoint() as url:
        monkeypatch.setattr("cluster.cli_status.time.sleep", sleep)
        done = run("top", "--url", url, "--interval", "0.5")
    assert done.exit_code == 0 and slept == [0.5, 0.5]
