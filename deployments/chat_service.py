"""Chat completions for the three served names: checks, routing options, and the `cascade` object.

Between HTTP and vLLM's chat serving: it refuses what clients may not set, opens a call, passes
vLLM's answer on and adds who wrote what. It knows no sockets and no Ray.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cluster.config import CascadeConfig
from cluster.errors import RequestError
from deployments.observer import Observation, Observer
from deployments.openai_errors import (
    INVALID_REQUEST,
    INVALID_VALUE,
    from_exception,
    from_vllm,
    unknown_model,
)
from router.api import parse_options
from router.policies import NO_STATE, RoutingState, make_policy
from router.policy import FixedPolicy, Policy, Role
from router.splice import Site

if TYPE_CHECKING:
    from deployments.frontend import Call, ChatFront

OURS_ONLY = ("kv_transfer_params", "ec_transfer_params", "cache_salt", "vllm_xargs")
"""Fields of vLLM's API that steer KV transfer and prefix caches: never a client's business."""

UNSUPPORTED = ("use_beam_search", "prompt_logprobs", "logprob_token_ids")
"""Fields of vLLM's API that have no meaning over two engines."""

_FINISHED = '"finish_reason":"'
_ERROR = 'data: {"error"'


class EventStream:
    """Server-sent events of which the first is there already.

    A class, because closing a generator that was never started does not reach what it wraps.
    """

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        self._first: str | None = first
        self._rest = rest

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> str:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._rest)

    async def aclose(self) -> None:
        """Stop the answer; returns when the engines were told."""
        await self._rest.aclose()


class ChatService:
    """Answers chat requests; loads the tokenizer and vLLM's front end when it is made."""

    def __init__(
        self,
        config: CascadeConfig,
        site: Site,
        model_folder: str,
        observer: Observer,
        state: RoutingState = NO_STATE,
    ) -> None:
        from vllm.config import VllmConfig
        from vllm.renderers import renderer_from_config

        from deployments.frontend import make_front, make_model_config

        self._routing = config.routing
        self._state = state
        self._observer = observer
        self._fixed: dict[str, Role] = {config.small.name: "small", config.large.name: "large"}
        model_config = make_model_config(model_folder, config.large)
        renderer = renderer_from_config(VllmConfig(model_config=model_config))
        self._fronts: dict[str, ChatFront] = {
            name: make_front(
                name, model_config, renderer, model, site, config.router.request_timeout_s
            )
            for name, model in (
                (config.cascade_name, config.large),
                (config.small.name, config.small),
                (config.large.name, config.large),
            )
        }

    @property
    def models(self) -> dict[str, int]:
        """Served names and their context lengths in tokens, the routed one first."""
        return {
            name: front.client.model_config.max_model_len for name, front in self._fronts.items()
        }

    async def complete(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any] | EventStream:
        """The response body, or for `stream: true` server-sent events that begin with a token.

        Raises ApiError for everything that goes wrong before the first byte. The caller closes
        the stream, also when its client left.
        """
        name = body.get("model")
        front = self._fronts.get(name) if isinstance(name, str) else None
        if front is None:
            raise unknown_model(name, list(self._fronts))
        watch = self._observer.begin(str(name), headers)
        failed: Exception | None = None
        call: Call | None = None
        streams = False
        try:
            request, call = self._accept(str(name), body, watch)
            front.client.open(call)
            result = await front.chat.create_chat_completion(request)
            if isinstance(result, AsyncGenerator):
                events = self._events(front, call, watch, result)
                first = await anext(events)
                streams = True
                return EventStream(first, events)
            if not hasattr(result, "choices"):
                raise from_vllm(result.model_dump())
            answer: dict[str, Any] = result.model_dump(exclude={*OURS_ONLY})
            await _add_cascade(answer, call)
            return answer
        except Exception as error:
            # vLLM flattens what its engine client raised; the call kept the original.
            failed = error if call is None or call.error is None else call.error
            raise from_exception(failed) from error
        finally:
            if not streams:
                if call is not None:
                    await front.client.close(call)
                _end(watch, call, failed)

    def _accept(self, name: str, body: Mapping[str, Any], watch: Observation) -> tuple[Any, Call]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        from deployments.frontend import Call

        fields = dict(body)
        wish = fields.pop("cascade", None)
        for key in (*OURS_ONLY, *UNSUPPORTED):
            if fields.get(key) not in (None, False):
                raise RequestError(
                    f"`{key}` cannot be set on this endpoint; leave it out",
                    code=INVALID_VALUE,
                    param=key,
                )
        role = self._fixed.get(name)
        if role is not None and wish is not None:
            raise RequestError(
                f"`cascade` options need the routed model, not `{name}`",
                code=INVALID_VALUE,
                param="cascade",
            )
        options = parse_options(wish)

        def new_policy() -> Policy:
            if role is not None:
                return FixedPolicy(role, "named")
            return make_policy(self._routing, options, self._state)

        new_policy()  # refuses options that this deployment cannot follow
        try:
            request = ChatCompletionRequest.model_validate(fields)
        except ValidationError as error:
            raise _invalid(error) from None
        if options.escalate_after_tokens and request.extract_structured_outputs() is not None:
            raise RequestError(
                "an answer bound to a grammar can only change models before its first token: "
                "set `cascade.escalate_after_tokens` to 0",
                code=INVALID_VALUE,
                param="cascade.escalate_after_tokens",
            )
        call = Call(
            options=options,
            new_policy=new_policy,
            recorder=watch,
            has_tools=bool(request.tools),
        )
        request.request_id = call.call_id
        return request, call

    async def _events(
        self,
        front: ChatFront,
        call: Call,
        watch: Observation,
        source: AsyncGenerator[str, None],
    ) -> AsyncGenerator[str, None]:
        """vLLM's events with the `cascade` object and our error envelope put in.

        Raises ApiError instead of yielding an error as the very first event.
        """
        error: BaseException | None = None
        try:
            async with aclosing(source):
                started = False
                async for event in source:
                    if event.startswith(_ERROR):
                        found = call.error or from_vllm(_data(event))
                        error = from_exception(found)
                        if not started:
                            raise error
                        yield _event(from_exception(found).body())
                    elif _FINISHED in event:
                        yield await _finish(event, call)
                    else:
                        yield event
                    started = True
        except BaseException as caught:
            error = caught
            raise
        finally:
            await front.client.close(call)
            _end(watch, call, error)


async def _finish(event: str, call: Call) -> str:
    """A choice's last chunk with its `cascade` object."""
    chunk = _data(event)
    choice = chunk["choices"][0]
    if choice.get("finish_reason") is None:
        return event
    info = await call.cascades[choice["index"]].info()
    chunk["cascade"] = info.model_dump(mode="json")
    return _event(chunk)


async def _add_cascade(answer: dict[str, Any], call: Call) -> None:
    """`cascade` on the body for one choice; on each choice when there are more."""
    choices = answer["choices"]
    for choice in choices:
        info = await call.cascades[choice["index"]].info()
        holder = answer if len(choices) == 1 else choice
        holder["cascade"] = info.model_dump(mode="json")


def _end(watch: Observation, call: Call | None, error: BaseException | None) -> None:
    answers = [] if call is None else list(call.cascades.values())
    if answers:
        watch.answered(
            input_tokens=answers[0].prompt_tokens,
            output_tokens=sum(answer.sent_tokens for answer in answers),
        )
    watch.end(error)


def _data(event: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return data


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _invalid(error: ValidationError) -> RequestError:
    first = error.errors()[0]
    param = str(first["loc"][0]) if first["loc"] else None
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    code = INVALID_VALUE if param else INVALID_REQUEST
    return RequestError(f"{where}: {message}" if where else message, code=code, param=param)
