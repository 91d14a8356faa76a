"""One optimizer step of the distillation, the running mean of its weights, and perplexities.

It does not know of files of text, checkpoints' schedule or how many processes there are beyond
averaging gradients with them.

Shapes: N rows, T tokens of a batch, P = T / 2 positions with known targets, S taken layers,
E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from cluster.quickstart import llama
from cluster.quickstart.adapter import KEPT_LAYERS, LORA_RANK

# The small model's layers whose output must look like the large one's; the last gives the logits.
TAKEN = (4, 8, 9, 10, 11, 12, 14)
HIDDEN_WEIGHT = 0.5
KL_POSITIONS = 512

_WARM_UP_STEPS = 40
_MEAN_DECAY = 0.99
_CHUNK = 128


class HeadKl(torch.autograd.Function):
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
    forward: llama.Forward

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
        states = self.forward(self.embed, self.large, tokens_NT, wanted)
        return torch.stack(states, 1).view(*tokens_NT.shape, len(TAKEN), -1)

    def step(self, tokens_NT: Tensor, target_PSE: Tensor, lr_scale: float) -> tuple[float, float]:
        """One optimizer step; returns the mean KL (nats) and the mean relative hidden error."""
        layers = llama.small_layers(self.large, self.adapter)
        states = self.forward(self.embed, layers, tokens_NT, TAKEN)
        hidden = torch.zeros(())
        for at, state_TE in enumerate(states):
            target_PE = target_PSE[:, at].float()
            error = (state_TE[1::2].float() - target_PE).square().sum(-1)
            hidden = hidden + (error / target_PE.square().sum(-1)).mean()
        picked = torch.randperm(len(target_PSE))[:KL_POSITIONS]
        small = llama.norm(states[-1][1::2][picked], self.adapter["norm.weight"].bfloat16())
        with torch.no_grad():
            large = llama.norm(target_PSE[picked, -1], self.large_norm)
        kl: Tensor = HeadKl.apply(small, large, self.embed)  # type: ignore[no-untyped-call]
        (kl + HIDDEN_WEIGHT * hidden / len(TAKEN)).backward()
        self._average_gradients()
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

    def _average_gradients(self) -> None:
        grads = [weight.grad for weight in self.adapter.values() if weight.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    @torch.no_grad()
    def perplexity(self, batch_list: list[Tensor], *, small: bool) -> float:
        """Perplexity of the mean adapter's model, or of the large one, over batches [N, T]."""
        layers = llama.small_layers(self.large, self.mean) if small else self.large
        weight = self.mean["norm.weight"].bfloat16() if small else self.large_norm
        losses = []
        for tokens_NT in batch_list:
            (state,) = self.forward(self.embed, layers, tokens_NT, [len(layers) - 1])
            state = llama.norm(state, weight).view(*tokens_NT.shape, -1)
            for row, tokens_T in zip(state, tokens_NT, strict=True):
                logits = (row[:-1] @ self.embed.T).float()
                losses.append(F.cross_entropy(logits, tokens_T[1:]))
        return float(torch.stack(losses).mean().exp())

    def save(self, out: Path) -> None:
        """Writes the mean adapter in bf16; `out` is never half written."""
        weights = {name: w.detach().to(torch.bfloat16).clone() for name, w in self.mean.items()}
        partial = out.with_suffix(".partial")
        about = {"layers": str(list(KEPT_LAYERS)), "rank": str(LORA_RANK)}
        save_file(weights, partial, metadata=about)
        partial.replace(out)
