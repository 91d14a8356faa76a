"""The OpenAPI document, and Schemathesis asking the application whatever the document allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
)

from deployments.api_keys import load_api_keys
from deployments.intake import OURS_ONLY, UNSUPPORTED
from deployments.openai_app import Service, build_http_app
from tests.deployments.conftest import EOS, LARGE_TEXT, SMALL_TEXT
from tests.fakes import FakeHandoffPort, ScriptedEngine, step

pytestmark = pytest.mark.vllm

# A document cannot say what depends on the context length or on two fields at once, so what it
# allows may be refused; and where it wants a number, `true` and "1" are read as 1.
NOT_CHECKED = [positive_data_acceptance, negative_data_rejection]

KEY = {"Authorization": "Bearer sk-test"}


@pytest.fixture
def app(
    endpoint: tuple[Any, Any, dict[str, Any]], encode: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    chat, _, switchboard = endpoint

    def engine(text: str) -> ScriptedEngine:
        return ScriptedEngine([step(token, top=21) for token in [*encode(text), EOS]])

    switchboard |= {
        "small": engine(SMALL_TEXT),
        "large": engine(LARGE_TEXT),
        "port": FakeHandoffPort(),
    }

    async def nothing() -> Any:
        return {}

    monkeypatch.setenv("KEYS", "acme:sk-test")
    service = Service(
        chat=chat,
        health=nothing,
        metrics=nothing,
        stats=lambda: {"requests": 1},
        status=nothing,
        keys=load_api_keys(None, "KEYS"),
        max_requests=8,
        max_body_bytes=100_000,
    )
    yield build_http_app(service)
    switchboard.clear()


@pytest.fixture
def api_schema(app: Any) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=KEY)


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/cascade/stats"),
    ("GET", "/v1/cascade/status"),
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_that_is_asked_breaks_the_endpoint(
    api_schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = api_schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        case.call_and_validate(headers=KEY, excluded_checks=NOT_CHECKED)

    ask()


def test_the_document_has_our_options_and_not_what_is_refused(api_schema: Any) -> None:
    schemas = api_schema.raw_schema["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        properties = schemas[name]["properties"]
        assert properties["model"]["enum"] == ["cascade", "little", "big"]
        assert "cascade" in properties
        assert not set(properties) & {*OURS_ONLY, *UNSUPPORTED}
    assert "session_id" in schemas["CascadeOptions"]["properties"]
    assert not [name for name in schemas if "Audio" in name or "Image" in name]
