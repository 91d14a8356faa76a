"""Chat and text completions for the three served names: routing options in, `cascade` object out.

Between HTTP and vLLM's serving classes: it opens a call, passes vLLM's answer on and adds who wrote
what. It knows no sockets and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from cluster.config import CascadeConfig
from cluster.errors import RequestError
from deployments.call import Call
from deployments.caller import Caller
from deployments.events import EventStream, add_cascade, with_cascade
from deployments.history import session_of
from deployments.intake import (
    OURS_ONLY,
    read_chat,
    read_completion,
    read_detokenize,
    read_session_id,
    read_tokenize,
)
from deployments.live_routing import LiveRouting
from deployments.observer import Observation, Observer
from deployments.openai_errors import (
    INTERNAL,
    INVALID_VALUE,
    ApiError,
    ClientClosed,
    from_exception,
    from_vllm,
    unknown_model,
)
from router.api import parse_options
from router.job import Site
from router.policies import make_policy
from router.policy import FixedPolicy, Policy, Role

if TYPE_CHECKING:
    from deployments.frontend import Front

log = logging.getLogger("kvcascade.router")

PromptField = Literal["messages", "prompt"]
"""The field that holds the prompt tells chat from text completions."""

_READ: dict[PromptField, Callable[[Mapping[str, Any]], Any]] = {
    "messages": read_chat,
    "prompt": read_completion,
}


class ChatService:
    """Answers requests; loads the tokenizer and vLLM's front end when it is made."""

    def __init__(
        self,
        config: CascadeConfig,
        site: Site,
        model_folder: str,
        observer: Observer,
        routing: LiveRouting,
    ) -> None:
        from vllm.config import VllmConfig
        from vllm.renderers import renderer_from_config

        from deployments.frontend import make_front, make_model_config

        self._routing = routing
        self._observer = observer
        self._background = site.background
        self._fixed: dict[str, Role] = {config.small.name: "small", config.large.name: "large"}
        model_config = make_model_config(model_folder, config.large)
        renderer = renderer_from_config(VllmConfig(model_config=model_config))
        self._fronts: dict[str, Front] = {
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

    async def chat(self, body: Mapping[str, Any], caller: Caller) -> dict[str, Any] | EventStream:
        """The response body, or for `stream: true` server-sent events that begin with a token.

        Raises ApiError for everything that goes wrong before the first byte. The caller closes
        the stream, also when its client left, and cancels this when its client does not wait.
        """
        return await self._answer("messages", body, caller)

    async def complete(
        self, body: Mapping[str, Any], caller: Caller
    ) -> dict[str, Any] | EventStream:
        """A text completion; as `chat`. Choices of several prompts are counted through."""
        return await self._answer("prompt", body, caller)

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Token ids of messages or of a plain prompt. Raises ApiError."""
        front = self._front(body)[1]
        prompt_field = "messages" if "messages" in body else "prompt"
        try:
            # Without an HTTP request vLLM makes an id of its own.
            result = await front.tokenization.create_tokenize(read_tokenize(body), cast(Any, None))
            if not hasattr(result, "tokens"):
                raise from_vllm(result.model_dump())
            return result.model_dump(exclude_none=True)
        except Exception as error:
            raise _refusal(error, prompt_field, body) from error

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Text of token ids. Raises ApiError."""
        front = self._front(body)[1]
        try:
            request = read_detokenize(body)
            vocabulary = front.client.model_config.get_vocab_size()
            if any(token >= vocabulary for token in request.tokens):
                raise RequestError(
                    f"`tokens`: this model's end at {vocabulary - 1}",
                    code=INVALID_VALUE,
                    param="tokens",
                )
            result = await front.tokenization.create_detokenize(request, cast(Any, None))
            if not hasattr(result, "prompt"):
                raise from_vllm(result.model_dump())
            return result.model_dump()
        except Exception as error:
            raise _refusal(error, "tokens", body) from error

    def _front(self, body: Mapping[str, Any]) -> tuple[str, Front]:
        name = body.get("model")
        if not isinstance(name, str) or name not in self._fronts:
            raise unknown_model(name, list(self._fronts))
        return name, self._fronts[name]

    async def _answer(
        self, prompt_field: PromptField, body: Mapping[str, Any], caller: Caller
    ) -> dict[str, Any] | EventStream:
        name, front = self._front(body)
        operation = "chat" if prompt_field == "messages" else "text_completion"
        watch = self._observer.begin(name, caller.headers, operation=operation)
        failed: BaseException | None = None
        call: Call | None = None
        streams = False
        try:
            request, call = self._accept(prompt_field, name, body, caller, watch)
            front.client.open(call)
            result = await front.answer(request)
            if isinstance(result, AsyncGenerator):
                events = self._events(front, call, watch, result, prompt_field)
                first = await anext(events)
                streams = True
                return EventStream(first, events)
            if not hasattr(result, "choices"):
                raise from_vllm(result.model_dump())
            answer: dict[str, Any] = result.model_dump(exclude={*OURS_ONLY})
            await add_cascade(answer, call)
            return answer
        except asyncio.CancelledError:
            failed = ClientClosed()
            raise
        except Exception as error:
            if _is_cancelled():
                # vLLM makes an error answer of it.
                failed = ClientClosed()
                raise asyncio.CancelledError from error
            # vLLM flattens what its engine client raised; the call kept the original.
            failed = error if call is None or call.error is None else call.error
            raise _refusal(failed, prompt_field, body) from error
        finally:
            if not streams:
                await self._background.finish(_conclude(front, call, watch, failed))

    def _accept(
        self,
        prompt_field: PromptField,
        name: str,
        body: Mapping[str, Any],
        caller: Caller,
        watch: Observation,
    ) -> tuple[Any, Call]:
        fields = dict(body)
        wish = fields.pop("cascade", None)
        role = self._fixed.get(name)
        if role is not None and wish is not None:
            raise RequestError(
                f"`cascade` options need the routed model, not `{name}`",
                code=INVALID_VALUE,
                param="cascade",
            )
        options, routing = parse_options(wish), self._routing.now

        def new_policy() -> Policy:
            if role is not None:
                return FixedPolicy(role, "named")
            return make_policy(routing.config, options, routing.state)

        new_policy()  # refuses options that this deployment cannot follow
        request = _READ[prompt_field](fields)
        session_id = read_session_id(caller.headers, options)
        call = Call(
            options=options,
            routing=routing,
            new_policy=new_policy,
            recorder=watch,
            tenant=caller.tenant,
            session=None if role else session_of(request, caller.tenant, session_id),
            n=request.n or 1,
            has_tools=bool(getattr(request, "tools", None)),
        )
        request.request_id = call.call_id
        return request, call

    async def _events(
        self,
        front: Front,
        call: Call,
        watch: Observation,
        source: AsyncGenerator[str, None],
        prompt_field: PromptField,
    ) -> AsyncGenerator[str, None]:
        """The events of an answer; however it ends, the call is closed and its end is noted."""
        error: BaseException | None = None
        events = with_cascade(source, call, prompt_field)
        try:
            async for event in events:
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            error = ClientClosed()
            raise
        except BaseException as caught:
            error = caught
            raise
        finally:
            # A server cancels every await of a client that left, so no await may matter here.
            await self._background.finish(_conclude(front, call, watch, error, events))


async def _conclude(
    front: Front,
    call: Call | None,
    watch: Observation,
    error: BaseException | None,
    events: AsyncGenerator[str, None] | None = None,
) -> None:
    """Stop what still runs and note the end of the request."""
    if events is not None:
        await events.aclose()
    if call is not None:
        await front.client.close(call)
        error = error or call.failed
    _end(watch, call, error)


def _refusal(error: Exception, prompt_field: str, body: Mapping[str, Any]) -> ApiError:
    """What the client is told; an error of our own is told to the log."""
    found = from_exception(error, prompt_field=prompt_field)
    if found.status == 400 and found.param is None and (field := str(found).split(" ")[0]) in body:
        found.code, found.param = INVALID_VALUE, field  # vLLM's sampling parameters say it so
    if found.code == INTERNAL:
        log.error("an answer failed", exc_info=error)
    return found


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _end(watch: Observation, call: Call | None, error: BaseException | None) -> None:
    if call is not None and call.cascades:
        answers = [call.cascades[index] for index in sorted(call.cascades)]
        watch.answered(
            input_tokens=sum(answer.prompt_tokens for answer in answers[:: call.n]),
            output_tokens=sum(answer.sent_tokens for answer in answers),
        )
    watch.end(error)
