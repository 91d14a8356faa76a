"""The process on the head that deploys the peer and asks it, and its other end.

As `bench/netns_driver.py`, for an application that knows nothing of a cascade: `PeerDriver` starts
this file as a program in the head's namespace; an order and its answer are a line of JSON each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.netns_cluster import UCX_ENV, NetnsCluster
from bench.netns_driver import at
from bench.orders import Orders, answers, carry_out

MODEL = "peer"
_DECODE = f"Decode:{MODEL}"
_DEPLOY_S = 500.0


@dataclass(frozen=True)
class Watched:
    """One request, by the decode server's clock, and what NIXL moved for it by its own."""

    prompt_tokens: int
    prefill_s: float
    first_token_s: float
    """From the prefill's answer to the first token."""
    transfers: int
    transfer_s: float
    post_s: float
    bytes: int
    descriptors: int


class PeerDriver:
    """Sends orders to the process in the head's namespace."""

    def __init__(self, orders: Orders) -> None:
        self._give = orders.give

    def deploy(self, document: Mapping[str, Any]) -> None:
        """Remove whatever is deployed, deploy a Serve config and wait until it runs."""
        self._give("deploy", document=document)

    def ask(self, tokens: int, seed: int) -> Watched:
        """Let prefill and decode answer a conversation of at most `tokens` with one token."""
        return Watched(**self._give("ask", tokens=tokens, seed=seed))


@contextmanager
def peer_driver(cluster: NetnsCluster) -> Iterator[PeerDriver]:
    """A driver on the cluster's head, until the block ends."""
    program = (sys.executable, str(Path(__file__)))
    process = cluster.popen(*program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    orders = Orders(process)
    try:
        yield PeerDriver(orders)
    finally:
        # Serve and its replicas end with the cluster.
        orders.end(kill=True)


def peer_document(source: str, kv_pool_bytes: int, *, helped: bool) -> dict[str, Any]:
    """Prefill on the node `small`, decode on `large`, the ingress on the head.

    `source` is a model folder. `helped` takes the connector of `bench/peer_connector.py`.
    """
    connector: dict[str, Any] = {"kv_connector": "NixlConnector"}
    if helped:
        connector["kv_connector_module_path"] = "bench.peer_connector"

    def engine(node: str, core: str, role: str) -> dict[str, Any]:
        return {
            "model_loading_config": {"model_id": MODEL, "model_source": source},
            "accelerator_config": {"kind": "cpu"},
            "placement_group_config": {"bundles": [{"CPU": 0.1}]},
            "deployment_config": {"num_replicas": 1, "ray_actor_options": at(node)},
            "engine_kwargs": {
                "dtype": "bfloat16",
                "max_model_len": 8_192,
                "block_size": 32,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 512,
                "enforce_eager": True,
                "kv_cache_memory_bytes": kv_pool_bytes,
                # The prefill is not measured, and the decode engine must find nothing.
                "enable_prefix_caching": role == "kv_producer",
                "kv_transfer_config": {**connector, "kv_role": role},
            },
            "runtime_env": {"env_vars": {**UCX_ENV, "VLLM_CPU_OMP_THREADS_BIND": core}},
            "callback_config": {"callback_class": "deployments.engine_setup.NoNodeInit"},
            # vLLM's own exporter, in the replica's process.
            "log_engine_metrics": False,
            "experimental_configs": {"_prewarm_prefill_decode": True, "pd_tokenize_once": True},
        }

    ingress = {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 1},
        "ray_actor_options": at("head"),
    }
    args = {
        "prefill_config": engine("small", "0", "kv_producer"),
        "decode_config": engine("large", "1", "kv_consumer"),
        "ingress_deployment_config": ingress,
    }
    application = {
        "name": MODEL,
        "route_prefix": "/",
        "import_path": "bench.peer_app:build_peer_app",
        "args": args,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8_000},
        "applications": [application],
    }


class _Worker:
    """The orders, as the process on the head carries them out."""

    def __init__(self) -> None:
        from transformers import PreTrainedTokenizerFast

        from cluster.sources import resolve_model

        folder = resolve_model("quickstart:large")
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self._client: Any = None
        self._before: dict[str, float] = {}

    def deploy(self, document: dict[str, Any]) -> dict[str, Any]:
        from ray import serve

        from cluster import local
        from cluster.demo_client import connect

        serve.start(
            proxy_location=document["proxy_location"], http_options=document["http_options"]
        )
        for name in serve.status().applications:
            serve.delete(name)
        self._client = connect(local.deploy(document, timeout_s=_DEPLOY_S))
        self._before = self._watched()
        return {}

    def ask(self, tokens: int, seed: int) -> dict[str, Any]:
        from cluster.quickstart.text import long_conversation_messages

        # Not streamed: Ray collects the tokens of a stream for 50 ms before it sends them.
        answer = self._client.chat.completions.create(
            model=MODEL,
            messages=long_conversation_messages(tokens, self._tokenizer, seed),
            max_tokens=1,
            temperature=0,
        )
        now, before = self._watched(), self._before
        self._before = now
        counted = {
            key: now[key] - before[key]
            for key in ("transfers", "transfer_s", "post_s", "bytes", "descriptors")
        }
        return {
            "prompt_tokens": answer.usage.prompt_tokens,
            "prefill_s": now["prefill_s"],
            "first_token_s": now["first_token_s"],
            **counted,
        }

    def _watched(self) -> dict[str, float]:
        from ray import serve

        handle = serve.get_deployment_handle(_DECODE, MODEL)
        found: dict[str, float] = handle.watched.remote().result(timeout_s=60)
        return found


def main() -> None:
    """Carry out orders until standard input ends."""
    # Before anything prints.
    to = answers()
    from cluster.local import start_local_ray

    start_local_ray(address=os.environ["RAY_ADDRESS"])
    carry_out(_Worker(), to)


if __name__ == "__main__":
    main()
