from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import fitting, local
from cluster.cli import app, curl_line
from cluster.errors import EngineError, MapperError
from cluster.fitting import read_texts

HEAVY = ("torch", "ray", "vllm", "transformers", "nixl", "huggingface_hub")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, cluster.cli, typer.main; typer.main.get_command(cluster.cli.app); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command() -> None:
    shown = run("--help").output
    for name in ("models", "fit", "score", "plan", "validate", "serve", "demo"):
        assert f" {name} " in shown


def test_no_command_shows_the_help() -> None:
    assert "Usage" in run().output


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    result = run("serve", str(tmp_path / "nothing.yaml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "nothing.yaml: no such file" in result.stderr
    assert "Traceback" not in result.output


def test_a_failed_deployment_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise EngineError("the deployment failed: mapper: ValueError: broken")

    monkeypatch.setattr(local, "start_local_ray", lambda **options: None)
    monkeypatch.setattr(local, "deploy", fail)
    result = run("serve", str(repository / "cluster" / "quickstart.yaml"))
    assert result.exit_code == 1
    assert "error: the deployment failed: mapper: ValueError: broken" in result.stderr


def test_serve_overrides_the_port_of_the_file(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    deployed: list[dict[str, Any]] = []

    def stop_there(document: dict[str, Any], **options: Any) -> None:
        deployed.append(document)
        raise EngineError("seen enough")

    monkeypatch.setattr(local, "start_local_ray", lambda **options: None)
    monkeypatch.setattr(local, "deploy", stop_there)
    run("serve", str(repository / "cluster" / "quickstart.yaml"), "--port", "8765")
    assert deployed[0]["http_options"] == {"host": "127.0.0.1", "port": 8765}


def test_validate_of_a_bad_file_ends_with_2_and_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "applications: [{import_path: 'deployments.app:build_cascade_app', args: {smal: {}}}]"
    )
    result = run("validate", str(path))
    assert result.exit_code == 2
    assert "PROBLEM args.smal: unknown key" in result.stdout
    assert "problems: 4;" in result.stdout


def test_strict_validation_fails_on_what_could_not_be_checked(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCASCADE_HOME", str(tmp_path))
    config = str(repository / "cluster" / "quickstart.yaml")
    assert run("validate", config).exit_code == 0
    strict = run("validate", config, "--strict", "--json")
    assert strict.exit_code == 3
    unchecked = [one["key"] for one in json.loads(strict.stdout) if one["level"] == "unchecked"]
    assert unchecked == ["small.source", "large.source", "mapper.small_to_large"]


def test_models_prints_the_folders_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {"small": Path("/m/small"), "large": Path("/m/large"), "mapper": Path("/m/mapper")}
    monkeypatch.setattr(fitting, "prepare_quickstart", lambda console, back: folders)
    result = run("models", "--json")
    assert json.loads(result.stdout) == {name: str(path) for name, path in folders.items()}


def test_a_support_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = run("fit", "--support", "half", "--out", str(tmp_path / "m"))
    assert result.exit_code == 2
    assert "choose `full` or `head_local`" in result.stderr


def test_the_curl_line_carries_a_json_body() -> None:
    body = curl_line("http://h:1", "cascade").split("-d '")[1].removesuffix("'")
    assert json.loads(body)["model"] == "cascade"


def test_texts_are_lines_of_jsonl_or_runs_of_paragraphs(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    assert read_texts(lines) == ["one", "two"]
    plain = tmp_path / "a.txt"
    plain.write_text("\n\n".join(["x" * 3_000] * 5))
    assert [len(text) for text in read_texts(plain)] == [6_002, 6_002, 3_000]


@pytest.mark.parametrize("line", ["no json", '{"txt": "x"}', '{"text": 1}', "[1]"])
def test_a_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(MapperError, match=r"a\.jsonl:2: every line must be JSON"):
        read_texts(path)


def test_a_root_cause_is_what_stands_after_the_last_traceback() -> None:
    message = (
        "Deploying failed:\nTraceback (most recent call last):\n  File 'x', line 1\n    y()\n"
        "RuntimeError: Traceback\n  File 'z', line 2\ncluster.errors.ConfigError: args.a: bad\n"
        "args.b: bad\n\nSystem error:\nIntentionalSystemExit: code 0"
    )
    assert local.root_cause(message) == "cluster.errors.ConfigError: args.a: bad\nargs.b: bad"
    assert local.root_cause("no replica fits") == "no replica fits"


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 9}, "http://127.0.0.1:9"),
        ({"host": "10.0.0.1"}, "http://10.0.0.1:8000"),
    ],
)
def test_the_endpoint_is_where_the_proxy_listens(options: dict[str, Any], url: str) -> None:
    assert local.endpoint_url({"http_options": options}) == url
