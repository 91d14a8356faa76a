"""OPERATIONS.md says nothing that is not so: commands, options, keys, figures, files and alerts."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import CascadeConfig
from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "cluster/OPERATIONS.md").read_text()
WORDS = re.findall(r"`([^`\n]+)`", TEXT)


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    shown = [line for block in blocks for line in block.splitlines()]
    shown += [word for word in WORDS if word.startswith("kvcascade ")]
    return [shlex.split(line) for line in shown]


@pytest.mark.parametrize("words", [c for c in commands() if c[0] == "kvcascade"], ids=" ".join)
def test_every_command_and_option_exists(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    command = group.commands[words[1]]
    options = {name for option in command.params for name in option.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= options


def test_other_programs_get_files_that_exist() -> None:
    others = [c for c in commands() if c[0] != "kvcascade"]
    assert {command[0] for command in others} == {"docker", "kubectl"}
    for command in others:
        (name,) = command[command.index("-f") + 1 : command.index("-f") + 2]
        assert (REPOSITORY / name).is_file()


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) >= 8
    assert all((REPOSITORY / "cluster" / link).is_file() for link in links)


def test_every_key_is_one_of_the_configuration() -> None:
    parts = CascadeConfig.model_fields
    keys = [word for word in WORDS if re.fullmatch(r"[a-z_]+\.[a-z_]+", word)]
    keys = [key for key in keys if key.split(".")[0] in parts]
    assert len(keys) > 10
    for key in keys:
        part, name = key.split(".")
        assert name in parts[part].annotation.model_fields, key


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    rules = yaml.safe_load((REPOSITORY / "cluster/alerts.yaml").read_text())
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(Kvcascade\w+)` \|", TEXT, re.MULTILINE) == names


def test_reasons_of_alerts_and_of_their_table_are_those_that_are_counted() -> None:
    sources = "".join(
        path.read_text()
        for folder in ("router", "deployments", "cluster")
        for path in sorted((REPOSITORY / folder).glob("*.py"))
    )
    rules = (REPOSITORY / "cluster/alerts.yaml").read_text()
    matched = re.findall(r'reason[!=]~"([a-z_|]+)"', rules)
    reasons = {reason for group in matched for reason in group.split("|")}
    assert len(reasons) >= 7
    reasons |= {"no_ticket", "mapper_full", "deadline", "expired", "connect", "transfer"}
    assert [reason for reason in sorted(reasons) if f'"{reason}"' not in sources] == []


def test_the_figures_are_those_of_the_planner() -> None:
    (plan,) = [c for c in commands() if c[:2] == ["kvcascade", "plan"]]
    report = json.loads(CliRunner().invoke(app, [*plan[1:], "--json"]).stdout)
    source, target = report["source"], report["target"]
    kv = [model["kv_bytes_per_token"] for model in (source, target)]
    assert f"| {kv[0]:,} B and {kv[1]:,} B |" in TEXT
    assert [round(value * 100_000 / 1e9) for value in kv] == [16, 26]
    weights = [model["weights_bf16_bytes"] / 1e9 for model in (source, target)]
    assert f"| {weights[0]:.1f} GB and {weights[1]:.1f} GB |" in TEXT
    assert f"| {target['prefill_s'] * 1000:.0f} ms |" in TEXT
    full = {
        one["link_gbps"]: one
        for one in report["handoffs"]
        if (one["support"], one["mapped_at"]) == ("full", "receiver")
    }
    slow, fast = full[100.0], full[400.0]
    assert (
        f"| {slow['overlapped_s'] * 1e3:.0f} ms and {fast['overlapped_s'] * 1e3:.0f} ms |" in TEXT
    )
    assert f"| {slow['break_even_tokens']} and {fast['break_even_tokens']} tokens |" in TEXT
    args = yaml.safe_load((REPOSITORY / "ray_config.yaml").read_text())["applications"][0]["args"]
    chunks = [value * args["mapper"]["chunk_tokens"] for value in kv]
    pool = args["mapper"]["max_concurrent_handoffs"] * 2 * sum(chunks)
    assert f"{chunks[0] / 1e6:.0f} MB raw and {chunks[1] / 1e6:.0f} MB mapped" in TEXT
    decoded = args["mapper"]["max_concurrent_handoffs"] * chunks[0]
    assert f"8 handoffs take {pool / 1e9:.1f} GB, and {decoded / 1e9:.1f} GB" in TEXT
