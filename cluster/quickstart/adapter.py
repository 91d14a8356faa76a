"""The small model as an adapter: which layers it keeps and how its weights follow from the large's.

The adapter file holds low-rank factors and norm weights only; the embeddings, the head and the
frozen part of every linear layer are the large model's. Names in the file count the kept layers
(`layers.0` ... `layers.14`). It does not know how an adapter is trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KEPT_LAYERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 27, 29)
LORA_RANK = 32
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
ADAPTER_FILE = Path(__file__).with_name("small.adapter.safetensors")

_COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def merge_weights(large: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict (bf16, Llama names) of the small model: `W + lora_b @ lora_a` per kept layer.

    The product is taken in float32 and rounded once. Raises KeyError when a tensor is missing.
    """
    import torch

    merged = {"model.embed_tokens.weight": large["model.embed_tokens.weight"]}
    merged["model.norm.weight"] = adapter["norm.weight"]
    for to, source in enumerate(KEPT_LAYERS):
        for name in LINEARS:
            factors = f"layers.{to}.{name}"
            update = adapter[f"{factors}.lora_b"].float() @ adapter[f"{factors}.lora_a"].float()
            weight = large[f"model.layers.{source}.{name}.weight"].float() + update
            merged[f"model.layers.{to}.{name}.weight"] = weight
        for name in NORMS:
            merged[f"model.layers.{to}.{name}"] = adapter[f"layers.{to}.{name}"]
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in merged.items()}


def write_small(large: Path, adapter: Path, out: Path) -> None:
    """Writes the merged small model, with the large one's tokenizer, into the folder `out`."""
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True, exist_ok=True)
    weights = merge_weights(load_file(large / "model.safetensors"), load_file(adapter))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((large / "config.json").read_text())
    config["num_hidden_layers"] = len(KEPT_LAYERS)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _COPIED:
        if (large / name).exists():
            shutil.copyfile(large / name, out / name)
