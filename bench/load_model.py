"""A tiny random model with large caches, and Serve configs for clusters of namespaces with it.

Its two layers have 32 KV heads of 128 elements over a hidden size of 64: a token has 32 KiB of KV
in bf16, a third more than one of the quickstart's large model, and costs next to nothing to read or
to write. The same model stands at both ends, so the mapper is the identity: what is left of a
handoff is transport. Its answers mean nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bench.netns_cluster import HEAD, UCX_ENV
from bench.netns_driver import at, cascade_document

LAYERS, KV_HEADS, HEAD_DIM = 2, 32, 128
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_tiny_model(folder: Path) -> Path:
    """Write the model with the quickstart's tokenizer into `folder`, and return that."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cluster.sources import resolve_model

    quickstart = Path(resolve_model("quickstart:large"))
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(quickstart / name, folder / name)
    return folder


def transport_document(
    folder: Path, *, mappers: int | None, scaling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The tiny pair on a cluster with nodes of their own for all: each mapper takes a whole one.

    `mappers` is how many there are; None where `scaling` (`mapper.scaling`) lets them come and go.
    """
    model = {
        "source": str(folder),
        "accelerator": "cpu",
        "dtype": "bfloat16",
        "max_model_len_tokens": 4_096,
        "block_size_tokens": 32,
        "kv_pool_tokens": 40_960,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2_048,
        "engine_kwargs": {"enforce_eager": True},
    }
    args: dict[str, Any] = {
        "small": {"name": "small", "cpu_threads_bind": "0", "placement": at("small")} | model,
        "large": {"name": "large", "cpu_threads_bind": "1", "placement": at("large")} | model,
        "mapper": {
            "small_to_large": "identity",
            "placement": mapper_placement(),
            "chunk_tokens": 256,
        },
        # Every ticket counts in full, even where many stand for the same cached blocks.
        "handoff": {"max_pinned_fraction": 1.0},
        "router": {"placement": at(HEAD)},
        "transport": {"ucx_env": dict(UCX_ENV)},
    }
    if scaling is not None:
        args["mapper"]["scaling"] = scaling
    entry = {"name": "mapper"} | ({} if mappers is None else {"num_replicas": mappers})
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {
                "name": "cascade",
                "route_prefix": "/",
                "import_path": "deployments.app:build_cascade_app",
                "args": args,
                "deployments": [entry],
            }
        ],
    }


def quickstart_document(*, mappers: int) -> dict[str, Any]:
    """The same with the quickstart pair."""
    document = cascade_document({"small": "small", "large": "large", "mapper": "mapper"})
    (application,) = document["applications"]
    application["args"]["mapper"]["placement"] = mapper_placement()
    application["args"]["handoff"]["max_pinned_fraction"] = 1.0
    application["deployments"] = [{"name": "mapper", "num_replicas": mappers}]
    return document


def mapper_placement() -> dict[str, Any]:
    """Placement of mappers, each alone on a node that is there for one."""
    return {"num_cpus": 0.1, "resources": {"mapper_node": 1.0}}
