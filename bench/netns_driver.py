"""The process on the head of a cluster of namespaces that deploys and asks, and its other end.

`Driver` starts this file as a program in the head's namespace, where it can reach every node, and
sends it one JSON order per line; the answer is one JSON line. Orders are the methods of `Driver`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.load import Generator, Load, Messages, Outcome
from bench.netns_cluster import HEAD, UCX_ENV, NetnsCluster
from bench.orders import Orders, answers, carry_out

if TYPE_CHECKING:
    from router.api import CascadeInfo

APPLICATION = "cascade"
_DEPLOY_S = 400.0
_RESTART_S = 120.0


@dataclass(frozen=True)
class Asked:
    """One answer; `cascade` is the endpoint's own account of it."""

    prompt_tokens: int
    cascade: CascadeInfo


class Driver:
    """Sends orders to the process in the head's namespace."""

    def __init__(self, orders: Orders) -> None:
        self._give = orders.give

    def deploy(self, document: Mapping[str, Any]) -> None:
        """Deploy a Serve config, or what changed of it, and wait until all of it runs."""
        self._give("deploy", document=document)

    def ask(
        self, tokens: int, seed: int, cascade: Mapping[str, Any], *, answer_tokens: int = 3
    ) -> Asked:
        """Go on with a conversation of at most `tokens` tokens; `seed` chooses which."""
        from router.api import CascadeInfo

        found = self._give(
            "ask", tokens=tokens, seed=seed, cascade=cascade, answer_tokens=answer_tokens
        )
        return Asked(found["prompt_tokens"], CascadeInfo.model_validate(found["cascade"]))

    def describe(self, deployment: str) -> dict[str, Any]:
        """What a replica of a deployment says of itself."""
        return self._give("describe", deployment=deployment)

    def status(self) -> dict[str, Any]:
        """The answer of `/v1/cascade/status`: every replica of every deployment."""
        return self._give("status")

    def start_load(self, load: Load) -> None:
        """Keep conversations in flight, beside any other order, until `finish_load`."""
        self._give("start_load", load=asdict(load))

    def answered(self) -> tuple[int, bool]:
        """(answers of the load so far, whether it goes on)."""
        found = self._give("answered")
        return found["answers"], found["running"]

    def finish_load(self, *, stop: bool = False) -> Outcome:
        """Wait until the load has ended, with `stop` at the next answers."""
        return Outcome.from_json(self._give("finish_load", stop=stop))

    def restart(self, deployment: str) -> None:
        """Kill a replica of a deployment that has one, and wait until another answers."""
        self._give("restart", deployment=deployment)


@contextmanager
def driver(cluster: NetnsCluster) -> Iterator[Driver]:
    """A driver on the cluster's head, until the block ends."""
    process = cluster.popen(
        sys.executable, str(Path(__file__)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    orders = Orders(process)
    try:
        yield Driver(orders)
    finally:
        # Serve and its replicas end with the cluster.
        orders.end(kill=True)


def cascade_document(places: Mapping[str, str]) -> dict[str, Any]:
    """The quickstart's Serve config for a cluster of namespaces.

    `places` names the node of `small`, `large` and `mapper`; the router is on the head. Deployed
    again with another place for the mapper, the engines run on (Ray 2.60: options under
    `deployments:` are no part of the others' version).
    """
    from cluster.cli import QUICKSTART_CONFIG
    from cluster.config import load_serve_config

    document, _ = load_serve_config(QUICKSTART_CONFIG)
    (application,) = document["applications"]
    args = application["args"]
    for role in ("small", "large"):
        args[role]["placement"] = at(places[role])
    args["router"] = {"placement": at(HEAD)}
    args["transport"] = {"ucx_env": dict(UCX_ENV)}
    application["deployments"] = [
        {"name": "mapper", "num_replicas": 1, "ray_actor_options": at(places["mapper"])}
    ]
    return document


def at(node: str) -> dict[str, Any]:
    """Placement on the node of this name."""
    return {"num_cpus": 0.1, "resources": {f"at_{node}": 0.01}}


class _Worker:
    """The orders, as the process on the head carries them out."""

    def __init__(self) -> None:
        self._client: Any = None
        self._url = ""
        self._model = ""
        self._tokenizer: Any = None
        self._load: Generator | None = None

    def deploy(self, document: dict[str, Any]) -> dict[str, Any]:
        from cluster import local
        from cluster.demo_client import connect

        url = local.deploy(document, timeout_s=_DEPLOY_S)
        args = document["applications"][0]["args"]
        self._url, self._model = url, args.get("cascade_name", APPLICATION)
        self._client = connect(url)
        return {}

    def ask(
        self, tokens: int, seed: int, cascade: dict[str, Any], answer_tokens: int
    ) -> dict[str, Any]:
        from cluster.demo_client import ask

        answer = ask(
            self._client,
            self._model,
            self._messages(tokens, seed),
            max_tokens=answer_tokens,
            # Neither model may end the answer before the handoff is over.
            min_tokens=answer_tokens - 1,
            cascade=cascade,
        )
        return {
            "prompt_tokens": answer.prompt_tokens,
            "cascade": answer.cascade.model_dump(mode="json"),
        }

    def describe(self, deployment: str) -> dict[str, Any]:
        from ray import serve

        handle = serve.get_deployment_handle(deployment, APPLICATION)
        found: dict[str, Any] = handle.describe.remote().result(timeout_s=60)
        return found

    def status(self) -> dict[str, Any]:
        from cluster.status_endpoint import Endpoint

        with Endpoint(self._url) as endpoint:
            found = endpoint.optional_json("/v1/cascade/status")
        assert found is not None, "every endpoint has it"
        return found

    def start_load(self, load: dict[str, Any]) -> dict[str, Any]:
        assert self._load is None, "finish the one before"
        wanted = Load(**load | {"tokens": tuple(load["tokens"])})
        self._load = Generator(self._url, self._model, wanted, self._messages)
        return {}

    def answered(self) -> dict[str, Any]:
        assert self._load is not None
        return {"answers": len(self._load.records), "running": self._load.running}

    def finish_load(self, stop: bool) -> dict[str, Any]:
        assert self._load is not None
        outcome, self._load = self._load.finish(stop=stop), None
        return outcome.as_json()

    def _messages(self, tokens: int, seed: int) -> Messages:
        from cluster.quickstart.text import long_conversation_messages

        if self._tokenizer is None:
            from transformers import PreTrainedTokenizerFast

            from cluster.sources import resolve_model

            # The models for clusters of namespaces all have this one.
            folder = resolve_model("quickstart:large")
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        return long_conversation_messages(tokens, self._tokenizer, seed)

    def restart(self, deployment: str) -> dict[str, Any]:
        import signal

        before = self.describe(deployment)["pid"]
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + _RESTART_S
        while True:
            try:
                if self.describe(deployment)["pid"] != before:
                    return {}
            except Exception:
                # Which one depends on who notices first that the replica is gone.
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)


def main() -> None:
    """Carry out orders until standard input ends."""
    # Before anything prints.
    to = answers()
    from cluster.local import start_local_ray

    start_local_ray(address=os.environ["RAY_ADDRESS"])
    carry_out(_Worker(), to)


if __name__ == "__main__":
    main()
