"""Asks a running endpoint for the small model's answers to a file of prompts, to calibrate on.

The margins come from the answer's own log-probabilities, which are those that the router's policy
sees: the engine's, before temperature and masks. The last token of an answer is left out, because
a policy is not asked about it. It knows no statistics.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config import CascadeConfig
from cluster.errors import ConfigError
from router.calibration import Dependencies
from router.chance import text_hash
from router.record import AnswerRecord, Turn

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 600.0

_NO_LOGPROB = -9999.0
"""What vLLM's chat answers show for a log-probability of minus infinity."""


@dataclass(frozen=True)
class Run:
    """Answers in the order of the prompts; `failures` say why the others have none."""

    records: tuple[AnswerRecord, ...]
    failures: tuple[str, ...]


def read_prompts(path: Path) -> list[list[dict[str, Any]]]:
    """The `messages` of each line `{"prompt": "..."}` or `{"messages": [...]}` of a JSONL file.

    ConfigError names the line that is neither.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file of prompts")
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
        prompt = fields.get("prompt") if isinstance(fields, dict) else None
        messages = fields.get("messages") if isinstance(fields, dict) else None
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if not isinstance(messages, list) or not messages:
            raise ConfigError(
                f'{path}:{number}: write {{"prompt": "..."}} or {{"messages": [...]}} in a line'
            )
        prompts.append(messages)
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


def run_prompts(
    prompts: Sequence[list[dict[str, Any]]],
    cascade: CascadeConfig,
    depends: Dependencies,
    *,
    url: str,
    reads_prompt: bool,
    max_tokens: int,
    concurrency: int,
    api_key: str | None = None,
    on_answer: Callable[[], None] = lambda: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Run:
    """Send all prompts, `concurrency` at a time; `on_answer` is called after each.

    With `reads_prompt` the prompt's score is asked for (policy `prompt`) instead of an answer.
    Raises ConfigError when there is no endpoint, when it is of another configuration, or when no
    prompt was answered.
    """
    work = _Work(
        cascade=cascade,
        depends=depends,
        reads_prompt=reads_prompt,
        max_tokens=max_tokens,
        on_answer=on_answer,
    )
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    run = asyncio.run(work.run(prompts, url.rstrip("/"), headers, concurrency, transport))
    if not run.records:
        raise ConfigError(f"{url} answered none of {len(prompts)} prompts: {run.failures[0]}")
    return run


class _Failure(Exception):
    """One prompt has no answer."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    cascade: CascadeConfig
    depends: Dependencies
    reads_prompt: bool
    max_tokens: int
    on_answer: Callable[[], None]

    async def run(
        self,
        prompts: Sequence[list[dict[str, Any]]],
        url: str,
        headers: Mapping[str, str],
        concurrency: int,
        transport: httpx.AsyncBaseTransport | None,
    ) -> Run:
        import httpx

        gate = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=_TIMEOUT_S,
            trust_env=False,
            transport=transport,
        ) as client:
            await self._check(client, url)

            async def one(messages: list[dict[str, Any]]) -> AnswerRecord | str:
                async with gate:
                    try:
                        return await self._ask(client, messages)
                    except (_Failure, httpx.HTTPError) as error:
                        return str(error) or type(error).__name__
                    finally:
                        self.on_answer()

            found = await asyncio.gather(*map(one, prompts))
        return Run(
            tuple(one for one in found if not isinstance(one, str)),
            tuple(one for one in found if isinstance(one, str)),
        )

    async def _check(self, client: httpx.AsyncClient, url: str) -> None:
        import httpx

        try:
            response = await client.get("/v1/models")
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ConfigError(f"{url}/v1/models: {_reason(error.response)}") from None
        except httpx.HTTPError as error:
            raise ConfigError(
                f"no endpoint answers at {url} ({error}); start one with `kvcascade serve`"
            ) from None
        served = {model["id"] for model in response.json()["data"]}
        cascade = self.cascade
        named = {cascade.cascade_name, cascade.small.name, cascade.large.name}
        if served != named:
            raise ConfigError(
                f"{url} serves {sorted(served)} and the configuration names {sorted(named)}: give "
                "the endpoint's own file with --config"
            )

    async def _ask(self, client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> AnswerRecord:
        body: dict[str, Any] = {
            "model": self.cascade.cascade_name,
            "messages": messages,
            "max_tokens": 1 if self.reads_prompt else self.max_tokens,
            "cascade": {"policy": "prompt" if self.reads_prompt else "small"},
            # The sampled token comes first and may be any: with three the two likeliest are there.
            "logprobs": True,
            "top_logprobs": 3,
        }
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise _Failure(_reason(response))
        answer = response.json()
        decision = answer["cascade"]["decision"]
        score = decision["score"] if self.reads_prompt else None
        content = (answer["choices"][0].get("logprobs") or {}).get("content") or []
        margins = () if self.reads_prompt else tuple(map(_margin, content[:-1]))
        turn = Turn(at_token=len(margins), action="stay", reason="policy", score=score)
        return AnswerRecord(
            unix_s=time.time(),
            request_hash=text_hash(json.dumps(messages, sort_keys=True)),
            policy="prompt" if self.reads_prompt else "fixed",
            decision=turn,
            turns=(turn,),
            complete=True,
            small_tokens=len(content),
            large_tokens=0,
            margins=margins,
            prompt_logprobs=None if score is None else (score,),
            depends=self.depends,
        )


def _margin(token: Mapping[str, Any]) -> float | None:
    """Likeliest minus second likeliest log-probability (nats); None when either is missing."""
    found = sorted((float(one["logprob"]) for one in token["top_logprobs"]), reverse=True)
    if len(found) < 2 or found[1] <= _NO_LOGPROB:
        return None
    return found[0] - found[1]


def _reason(response: httpx.Response) -> str:
    """The message of an OpenAI error envelope, or what came instead."""
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"
