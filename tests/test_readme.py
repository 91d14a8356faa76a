"""README says nothing that is not so: its commands parse or run, its code compiles, and the table
of keys is the configuration model's. It does not check prose.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer.main
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cluster.cli import app
from cluster.config import CascadeConfig

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
KEYS = REPOSITORY / "cluster" / "CONFIGURATION.md"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")
QUICK = (["kvcascade", "--help"], ["kvcascade", "validate"], ["kvcascade", "plan"])


def blocks(language: str) -> list[str]:
    """The code blocks of README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every shell command of README as words, comments removed."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def key_rows(model: Any = CascadeConfig, prefix: str = "") -> list[str]:
    """The table rows of a configuration model; `large` and later `placement`s repeat others."""
    rows = []
    for name, field in model.model_fields.items():
        key = prefix + name
        if hasattr(field.annotation, "model_fields"):
            repeats = name == "large" or (name == "placement" and prefix != "small.")
            rows += [] if repeats else key_rows(field.annotation, f"{key}.")
        else:
            meaning = str(field.description).replace("|", r"\|")
            rows.append(f"| `{key}` | {default(field)} | {meaning} |")
    return rows


def default(field: FieldInfo) -> str:
    """A default as YAML would have it, and the other choices where they are few."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "unset"
    others = [f"`{one}`" for one in get_args(field.annotation) if one != value]
    choices = others if get_origin(field.annotation) is Literal else []
    return ", ".join([f"`{json.dumps(value)}`".replace('"', ""), *choices])


def test_the_table_of_keys_is_that_of_the_configuration_model() -> None:
    written = [line for line in KEYS.read_text().splitlines() if line.startswith("| `")]
    assert written == key_rows(), f"replace the table of {KEYS} by:\n" + "\n".join(key_rows())


def test_every_command_is_in_the_table_of_commands() -> None:
    group = typer.main.get_command(app)
    named = set(re.findall(r"^\| `kvcascade ([\w-]+)", README, re.MULTILINE))
    assert named == set(group.commands)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_shell_command_is_one_that_exists(words: list[str]) -> None:
    if words[0] == "kvcascade" and "--help" not in words:
        group = typer.main.get_command(app)
        command = group.commands[words[1]]
        # Parses options and arguments and raises on any that the command does not have.
        command.make_context(words[1], words[2:])
    elif words[0] == "make":
        makefile = (REPOSITORY / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    else:
        assert words[0] in ("curl", "kvcascade", "serve")


@pytest.mark.parametrize(
    "words", [words for words in commands() if words[:2] in QUICK], ids=" ".join
)
def test_quick_commands_succeed(words: list[str]) -> None:
    kvcascade = Path(sys.executable).with_name("kvcascade")
    done = subprocess.run(
        [kvcascade, *words[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_body_of_the_curl_command_is_json() -> None:
    (curl,) = [words for words in commands() if words[0] == "curl"]
    body = json.loads(curl[curl.index("-d") + 1])
    assert body["model"] == "cascade"


@pytest.mark.parametrize("source", blocks("python"))
def test_every_python_example_compiles(source: str) -> None:
    compile(source, "README.md", "exec")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_linked_and_named_file_exists(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    linked = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:cluster|deployments|mappers|router|tests|bench)/[\w./-]*)`", text)
    missing = [path for path in linked + named if not (REPOSITORY / path).exists()]
    assert missing == []
