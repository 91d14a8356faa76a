"""Trains the small model's adapter: self-distillation from the large model on the CPU.

`python -m cluster.quickstart.distill --texts FOLDER --minutes N` writes checkpoints and a
`status.json` into its output folder. The learning rate is held, then falls to zero over the last
minutes; a file named `finish` in the output folder starts that fall early. Checkpoints hold a
running mean of the weights, so each of them is usable. `--export CHECKPOINT` puts one in the
package. It does not know where texts come from.

Shapes: T tokens of a batch, P = T / 2 positions with known targets, S taken layers, E hidden.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.quickstart import llama
from cluster.quickstart.adapter import ADAPTER_FILE, KEPT_LAYERS, LORA_RANK
from cluster.quickstart.distill_data import TeacherCache, batches, make_rows, read_texts

# The small model's layers whose output must look like the large one's; the last gives the logits.
TAKEN = (4, 8, 9, 10, 11, 12, 14)
HIDDEN_WEIGHT = 0.5
KL_POSITIONS = 512

_WARM_UP_STEPS = 40
_MEAN_DECAY = 0.99
_CHUNK = 128
_HELDOUT_TOKENS = 512


class _HeadKl(torch.autograd.Function):
    """Mean KL(large || small) over positions, with its gradient taken in the same pass."""

    @staticmethod
    def forward(ctx: Any, small_PE: Tensor, large_PE: Tensor, embed: Tensor) -> Tensor:
        total = torch.zeros(())
        grads = []
        for small, large in zip(small_PE.split(_CHUNK), large_PE.split(_CHUNK), strict=True):
            log_s = F.log_softmax((small @ embed.T).float(), -1)
            log_t = F.log_softmax((large @ embed.T).float(), -1)
            p_t = log_t.exp()
            total += (p_t * (log_t - log_s)).sum()
            grads.append(log_s.exp_().sub_(p_t).to(torch.bfloat16) @ embed)
        ctx.save_for_backward(torch.cat(grads))
        return total / len(small_PE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_PE,) = ctx.saved_tensors
        return (grad_PE * (grads[0] / len(grad_PE))).to(torch.bfloat16), None, None


@dataclass
class Trainer:
    """Large model, trained adapter (fp32) and the optimizer's state."""

    embed: Tensor
    large: list[llama.Layer]
    large_norm: Tensor
    adapter: dict[str, Tensor]
    peak_lr: float

    def __post_init__(self) -> None:
        for weight in self.adapter.values():
            weight.requires_grad_()
        self.optimizer = torch.optim.AdamW(
            self.adapter.values(), lr=self.peak_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.mean = {name: weight.detach().clone() for name, weight in self.adapter.items()}
        self.steps = 0

    def large_states(self, tokens_NT: Tensor) -> Tensor:
        """The large model's outputs [N, T, S, E] at the layers that TAKEN corresponds to."""
        wanted = [KEPT_LAYERS[at] for at in TAKEN]
        states = llama.hidden_states(self.embed, self.large, tokens_NT, wanted)
        return torch.stack(states, 1).view(*tokens_NT.shape, len(TAKEN), -1)

    def step(self, tokens_NT: Tensor, target_PSE: Tensor, lr_scale: float) -> tuple[float, float]:
        """One optimizer step; returns the mean KL (nats) and the mean relative hidden error."""
        layers = llama.small_layers(self.large, self.adapter)
        states = llama.hidden_states(self.embed, layers, tokens_NT, TAKEN)
        hidden = torch.zeros(())
        for at, state_TE in enumerate(states):
            target_PE = target_PSE[:, at].float()
            error = (state_TE[1::2].float() - target_PE).square().sum(-1)
            hidden = hidden + (error / target_PE.square().sum(-1)).mean()
        picked = torch.randperm(len(target_PSE))[:KL_POSITIONS]
        small = llama.norm(states[-1][1::2][picked], self.adapter["norm.weight"].bfloat16())
        with torch.no_grad():
            large = llama.norm(target_PSE[picked, -1], self.large_norm)
        kl: Tensor = _HeadKl.apply(small, large, self.embed)  # type: ignore[no-untyped-call]
        (kl + HIDDEN_WEIGHT * hidden / len(TAKEN)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.adapter.values(), 1.0)
        warm = min(1.0, (self.steps + 1) / _WARM_UP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_lr * lr_scale * warm
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        decay = min(_MEAN_DECAY, self.steps / (self.steps + 9))
        with torch.no_grad():
            for name, weight in self.adapter.items():
                self.mean[name].lerp_(weight, 1 - decay)
        return kl.item(), hidden.item() / len(TAKEN)

    @torch.inference_mode()
    def perplexity(self, rows: list[Tensor], *, small: bool) -> float:
        """Perplexity of the mean adapter's model, or of the large one, over rows [1, T]."""
        layers = llama.small_layers(self.large, self.mean) if small else self.large
        weight = self.mean["norm.weight"].bfloat16() if small else self.large_norm
        losses = []
        for row in rows:
            (state,) = llama.hidden_states(self.embed, layers, row, [len(layers) - 1])
            logits = (llama.norm(state[:-1], weight) @ self.embed.T).float()
            losses.append(F.cross_entropy(logits, row[0, 1:]))
        return float(torch.stack(losses).mean().exp())

    def save(self, out: Path) -> None:
        """Writes the mean adapter in bf16; `out` is never half written."""
        weights = {name: w.detach().to(torch.bfloat16).clone() for name, w in self.mean.items()}
        partial = out.with_suffix(".partial")
        about = {"layers": str(list(KEPT_LAYERS)), "rank": str(LORA_RANK)}
        save_file(weights, partial, metadata=about)
        partial.replace(out)


def heldout_rows(folder: Path, tokenizer: Any, most: int) -> dict[str, list[Tensor]]:
    """Rows [1, T] of unseen text, one list for each file in `folder`."""
    found = {}
    for name, lists in read_texts(folder, "heldout", tokenizer).items():
        cut = [tokens[:_HELDOUT_TOKENS] for tokens in lists if len(tokens) >= 64]
        found[name] = [torch.tensor([tokens]) for tokens in cut[:most]]
    return found


def main(
    texts: Annotated[Path | None, typer.Option(help="Folder of *.jsonl.gz.")] = None,
    model: Annotated[Path | None, typer.Option(help="The large model's folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("distill"),
    minutes: Annotated[float, typer.Option(help="Length of the run.")] = 95.0,
    init: Annotated[Path | None, typer.Option(help="Adapter to start from.")] = None,
    peak_lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 1.5e-3,
    fall_minutes: Annotated[float, typer.Option(help="Last part, with a falling rate.")] = 8.0,
    checkpoint_minutes: Annotated[float, typer.Option(help="Between checkpoints.")] = 5.0,
    cache_gb: Annotated[float, typer.Option(help="Disk for the large model's states.")] = 8.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    export: Annotated[
        Path | None, typer.Option(help="Only put this checkpoint into the package.")
    ] = None,
) -> None:
    """Train the small model's adapter, or export a checkpoint into the package."""
    if export is not None:
        partial = ADAPTER_FILE.with_suffix(".partial")
        shutil.copyfile(export, partial)
        partial.replace(ADAPTER_FILE)
        return
    if texts is None or model is None:
        raise typer.BadParameter("Name the folders: --texts and --model.")
    from transformers import AutoTokenizer

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rng = random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    (out / "finish").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    embed, large, large_norm = llama.load_large(model)
    adapter = llama.new_factors(large, large_norm) if init is None else load_file(init)
    adapter = {name: weight.float() for name, weight in adapter.items()}
    trainer = Trainer(embed, large, large_norm, adapter, peak_lr)
    cache = TeacherCache(out / "states.bin", trainer.large_states, int(cache_gb * 2**30))
    unseen = heldout_rows(texts, tokenizer, 24)
    bars = {name: trainer.perplexity(rows, small=False) for name, rows in unseen.items()}

    started = time.monotonic()
    fall_at = (minutes - fall_minutes) * 60
    next_save = 0.0
    seen_tokens = 0
    figures: dict[str, Any] = {}
    recent: list[tuple[float, float]] = []

    def checkpoint(elapsed: float, file: str) -> None:
        trainer.save(out / file)
        small = {name: trainer.perplexity(rows, small=True) for name, rows in unseen.items()}
        figures.update(
            elapsed_s=round(elapsed),
            steps=trainer.steps,
            seen_tokens=seen_tokens,
            tokens_per_s=round(seen_tokens / max(elapsed, 1)),
            kl=round(sum(kl for kl, _ in recent) / max(len(recent), 1), 4),
            hidden_error=round(sum(error for _, error in recent) / max(len(recent), 1), 4),
            perplexity_large={name: round(value, 2) for name, value in bars.items()},
            perplexity_small={name: round(value, 2) for name, value in small.items()},
            ratio={name: round(small[name] / bars[name], 3) for name in bars},
            checkpoint=file,
            pid=os.getpid(),
        )
        partial = out / "status.partial"
        partial.write_text(json.dumps(figures, indent=1) + "\n")
        partial.replace(out / "status.json")
        print(json.dumps(figures), flush=True)
        recent.clear()

    # Texts are read again at each pass, so that files may be added while it runs.
    while True:
        lists = [text for file in read_texts(texts, "train", tokenizer).values() for text in file]
        rows = make_rows(lists, random.Random(0))
        print(f"pass over {sum(map(len, rows))} tokens in {len(rows)} rows", flush=True)
        for batch in batches(rows, rng):
            elapsed = time.monotonic() - started
            if elapsed < fall_at and (out / "finish").exists():
                fall_at = elapsed
            if elapsed >= fall_at + fall_minutes * 60:
                checkpoint(elapsed, "final.safetensors")
                return
            if elapsed >= next_save:
                next_save = elapsed + checkpoint_minutes * 60
                checkpoint(elapsed, f"step-{trainer.steps:06d}.safetensors")
            lr_scale = min(1.0, 1 - (elapsed - fall_at) / (fall_minutes * 60))
            recent.append(trainer.step(torch.tensor(batch), cache(batch), lr_scale))
            seen_tokens += sum(map(len, batch))
            if trainer.steps % 10 == 0:
                kl = sum(kl for kl, _ in recent[-10:]) / len(recent[-10:])
                spent = time.monotonic() - started
                print(
                    f"{spent:6.0f} s  step {trainer.steps}  KL {kl:.3f}  "
                    f"{seen_tokens / spent:.0f} tokens/s",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
