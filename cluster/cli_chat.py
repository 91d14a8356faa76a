"""`kvcascade chat`: options and loop; `cluster.chat_client` asks, `cluster.chat_view` prints.

Like `cluster.cli`, it imports what is heavy only when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cluster.chat_client import Chat
    from cluster.chat_view import View

_DEFAULT_URL = "http://127.0.0.1:8000"
_EXIT_INTERRUPTED = 130


def chat(
    url: Annotated[str, typer.Option(help="Where the cascade answers.")] = _DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Served name to ask. Unset: the routed one.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy that decides. Unset: the deployment's.")
    ] = None,
    target_fraction: Annotated[
        float | None, typer.Option(help="Part of such requests to escalate.", min=0, max=1)
    ] = None,
    force: Annotated[
        str | None, typer.Option(help="`small` or `large`: that model alone answers.")
    ] = None,
    escalate_after_tokens: Annotated[
        int | None,
        typer.Option(help="The small model writes so many tokens, then the large one.", min=0),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Escalate by reading again, for comparison.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 256,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as Bearer token.", envvar="KVCASCADE_API_KEY")
    ] = None,
    once: Annotated[
        str | None, typer.Option(metavar="PROMPT", help="Ask this, print the answer and leave.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON lines instead of text.")
    ] = False,
) -> None:
    """Talk to a running cascade and see which model wrote what, and why.

    Ctrl-C stops an answer; at the prompt it leaves.
    """
    from rich.console import Console

    from cluster.chat_client import Chat
    from cluster.chat_view import JsonView, TerminalView

    options: dict[str, Any] = {
        "policy": policy,
        "target_fraction": target_fraction,
        "force": force,
        "escalate_after_tokens": escalate_after_tokens,
        "recompute": recompute or None,
    }
    talk = Chat(
        url,
        api_key=api_key,
        model=model,
        max_tokens=max_tokens,
        options={name: value for name, value in options.items() if value is not None},
    )
    view: View = (
        JsonView(typer.echo) if as_json else TerminalView(Console(highlight=False), talk.role)
    )
    if once is None:
        _converse(talk, view, prompt="" if as_json else "> ")
    elif not _answer(talk, view, once):
        raise typer.Exit(_EXIT_INTERRUPTED)


def _converse(talk: Chat, view: View, *, prompt: str) -> None:
    """Ask line by line until the input ends or Ctrl-C at the prompt."""
    from contextlib import suppress
    from importlib import import_module

    from cluster.errors import EngineError, RequestError

    with suppress(ImportError):
        import_module("readline")  # gives `input` its history and its arrow keys
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            question = input(prompt).strip()
            if not question:
                continue
            try:
                _answer(talk, view, question)
            except (EngineError, RequestError) as error:
                view.failed(str(error))


def _answer(talk: Chat, view: View, question: str) -> bool:
    """Show one answer; False when Ctrl-C stopped it. Raises as `Chat.ask`."""
    from contextlib import closing

    view.begin()
    try:
        with closing(talk.ask(question)) as events:
            for tokens, reply in events:
                view.tokens(tokens, reply)
    except KeyboardInterrupt:
        view.end()
        view.stopped()
        return False
    finally:
        view.end()
    view.finished(reply)
    return True
