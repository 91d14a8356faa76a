"""Where keys come from, and that a wrong source of keys never opens the door."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ConfigError
from deployments.api_keys import load_api_keys
from deployments.openai_errors import ApiError


def test_without_a_source_there_are_no_keys() -> None:
    assert load_api_keys(None, None) is None


def test_a_file_has_tenants_comments_and_bare_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nacme: sk-1  # the first\n\nacme:sk-2\nsk-3\nteam-b:sk:4\n")
    keys = load_api_keys(str(file), None)
    assert keys is not None
    assert [keys.tenant_of(f"Bearer sk-{n}") for n in (1, 2)] == ["acme", "acme"]
    assert keys.tenant_of("bearer  sk:4") == "team-b"
    assert keys.tenant_of("Bearer sk-3") not in ("sk-3", "acme")
    assert "sk-1" not in repr(keys)


def test_a_file_and_a_variable_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("a:one")
    monkeypatch.setenv("MORE", "b:two\nc:three")
    keys = load_api_keys(str(file), "MORE")
    assert keys is not None
    found = [keys.tenant_of(f"Bearer {key}") for key in ("one", "two", "three")]
    assert found == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no API key"),
        ("# nothing\n", "no API key"),
        ("a:", "line 1"),
        ("a:one\nb b:two", "line 2"),
        ("a:k\u00e9y", "line 1"),
        ("a:one\nb:one", "another tenant"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_api_keys(str(file), None)


def test_a_source_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_api_keys(str(tmp_path / "none"), None)
    with pytest.raises(ConfigError, match="UNSET_KEYS"):
        load_api_keys(None, "UNSET_KEYS")


def test_a_key_that_is_not_ascii_is_refused_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEYS", "one")
    keys = load_api_keys(None, "KEYS")
    assert keys is not None
    with pytest.raises(ApiError) as caught:
        keys.tenant_of("Bearer k\u00e9y")
    assert caught.value.status == 401
