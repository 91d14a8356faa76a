"""Trains the small model's adapter: self-distillation from the large model on the CPU.

`python -m cluster.quickstart.distill --texts FOLDER --minutes N` writes checkpoints and a
`status.json` into its output folder. The learning rate is held, then falls to zero over the last
minutes; a file named `finish` in the output folder starts that fall early. Checkpoints hold a
running mean of the weights, so each of them is usable. `--export CHECKPOINT` puts one in the
package. It does not know where texts come from.

Each process trains on its own rows with one thread and averages the gradients with the others
once per step: on a busy machine this loses far less than threads that wait for each other within
every multiplication.

Shapes: N rows, T tokens.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from cluster.quickstart import llama
from cluster.quickstart.adapter import ADAPTER_FILE
from cluster.quickstart.distill_data import (
    BATCH_TOKENS,
    Row,
    TeacherCache,
    batches,
    make_rows,
    read_texts,
)
from cluster.quickstart.trainer import TAKEN, Trainer

_HELDOUT_ROW_TOKENS = 512


def heldout_batches(folder: Path, tokenizer: Any, most: int) -> dict[str, list[Tensor]]:
    """Batches [N, T] of unseen text, at most `most` for each file with enough of it."""
    found = {}
    for name, lists in read_texts(folder, "heldout", tokenizer).items():
        joined = torch.tensor([token for tokens in lists for token in tokens], dtype=torch.long)
        batch_list = list(joined.split(BATCH_TOKENS))[:most]
        full = [batch for batch in batch_list if len(batch) == BATCH_TOKENS]
        if full:
            found[name] = [batch.view(-1, _HELDOUT_ROW_TOKENS) for batch in full]
    return found


def endless_batches(texts: Path, tokenizer: Any, rank: int, ranks: int) -> Iterator[list[Row]]:
    """Batches of this process's share of the rows, shuffled anew in each pass.

    A pass ends early when files appear, so that text may be added while it runs. Each file makes
    rows of its own: those of the old files, and what is kept for them, stay as they are.
    """
    rng = random.Random(rank)
    while True:
        files = sorted(texts.glob("*.jsonl.gz"))
        rows: list[Row] = []
        for lists in read_texts(texts, "train", tokenizer).values():
            rows += make_rows(lists, random.Random(0))[rank::ranks]
        print(f"process {rank}: pass over {sum(map(len, rows))} tokens", flush=True)
        for at, batch in enumerate(batches(rows, rng)):
            yield batch
            if at % 20 == 0 and files != sorted(texts.glob("*.jsonl.gz")):
                break


@dataclass(frozen=True)
class Run:
    """What `main` was asked for."""

    texts: Path
    model: Path
    out: Path
    minutes: float
    init: Path | None
    peak_lr: float
    fall_minutes: float
    checkpoint_minutes: float
    cache_gb: float
    processes: int
    port: int


def train(rank: int, run: Run) -> None:
    """The life of one training process."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{run.port}",
        rank=rank,
        world_size=run.processes,
        timeout=timedelta(hours=2),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(run.model))
    embed, large, large_norm = llama.load_large(run.model)
    torch.manual_seed(0)
    adapter = llama.new_factors(large, large_norm) if run.init is None else load_file(run.init)
    torch.manual_seed(rank)
    adapter = {name: weight.float() for name, weight in sorted(adapter.items())}
    trainer = Trainer(embed, large, large_norm, adapter, run.peak_lr, llama.Forward(fused=True))
    states_file = run.out / f"states-{rank}.bin"
    cache = TeacherCache(
        states_file,
        trainer.large_states,
        (len(TAKEN), llama.HIDDEN),
        int(run.cache_gb * 2**30) // run.processes,
    )
    report = Report(run, trainer, heldout_batches(run.texts, tokenizer, 2)) if rank == 0 else None
    fall_at = (run.minutes - run.fall_minutes) * 60
    started = time.monotonic()
    for batch in endless_batches(run.texts, tokenizer, rank, run.processes):
        elapsed = time.monotonic() - started
        if elapsed < fall_at and (run.out / "finish").exists():
            fall_at = elapsed
        # The first process sets the pace; all must use the same rate.
        lr_scale = torch.tensor(min(1.0, 1 - (elapsed - fall_at) / (run.fall_minutes * 60)))
        dist.broadcast(lr_scale, 0)
        if lr_scale.item() <= 0:
            break
        kl, error = trainer.step(torch.tensor(batch), cache(batch), lr_scale.item())
        if report is not None:
            report.note(elapsed, kl, error)
    if report is not None:
        report.checkpoint(time.monotonic() - started, "final.safetensors")
    dist.destroy_process_group()
    states_file.unlink()


class Report:
    """Progress line, checkpoints and `status.json` of the first process."""

    def __init__(self, run: Run, trainer: Trainer, unseen: dict[str, list[Tensor]]) -> None:
        self._run = run
        self._trainer = trainer
        self._unseen = unseen
        self._large = self._perplexities(small=False)
        self._recent: list[tuple[float, float]] = []
        self._next_save_s = 0.0

    def _perplexities(self, *, small: bool) -> dict[str, float]:
        found = self._unseen.items()
        return {name: self._trainer.perplexity(rows, small=small) for name, rows in found}

    def note(self, elapsed_s: float, kl: float, error: float) -> None:
        """Counts one step; prints every tenth and checkpoints when it is time."""
        self._recent.append((kl, error))
        steps = self._trainer.steps
        if steps % 10 == 0:
            kl = sum(kl for kl, _ in self._recent[-10:]) / len(self._recent[-10:])
            speed = self._seen_tokens() / elapsed_s
            print(
                f"{elapsed_s:6.0f} s  step {steps}  KL {kl:.3f}  {speed:.0f} tokens/s", flush=True
            )
        if elapsed_s >= self._next_save_s:
            self._next_save_s = elapsed_s + self._run.checkpoint_minutes * 60
            self.checkpoint(elapsed_s, f"step-{steps:06d}.safetensors")

    def _seen_tokens(self) -> int:
        return self._trainer.steps * BATCH_TOKENS * self._run.processes

    def checkpoint(self, elapsed_s: float, file: str) -> None:
        """Saves the mean adapter and what it reaches on unseen text."""
        self._trainer.save(self._run.out / file)
        small = self._perplexities(small=True)
        count = max(len(self._recent), 1)
        figures = {
            "checkpoint": file,
            "elapsed_s": round(elapsed_s),
            "steps": self._trainer.steps,
            "seen_tokens": self._seen_tokens(),
            "kl": round(sum(kl for kl, _ in self._recent) / count, 4),
            "hidden_error": round(sum(error for _, error in self._recent) / count, 4),
            "perplexity_large": {name: round(value, 2) for name, value in self._large.items()},
            "perplexity_small": {name: round(value, 2) for name, value in small.items()},
            "ratio": {name: round(small[name] / self._large[name], 3) for name in small},
            "pid": os.getppid(),
        }
        partial = self._run.out / "status.partial"
        partial.write_text(json.dumps(figures, indent=1) + "\n")
        partial.replace(self._run.out / "status.json")
        print(json.dumps(figures), flush=True)
        self._recent.clear()


def main(
    texts: Annotated[Path | None, typer.Option(help="Folder of *.jsonl.gz.")] = None,
    model: Annotated[Path | None, typer.Option(help="The large model's folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("distill"),
    minutes: Annotated[float, typer.Option(help="Length of the run.")] = 95.0,
    init: Annotated[Path | None, typer.Option(help="Adapter to start from.")] = None,
    peak_lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 1.5e-3,
    fall_minutes: Annotated[float, typer.Option(help="Last part, with a falling rate.")] = 8.0,
    checkpoint_minutes: Annotated[float, typer.Option(help="Between checkpoints.")] = 6.0,
    cache_gb: Annotated[float, typer.Option(help="Disk for the large model's states.")] = 8.0,
    processes: Annotated[int, typer.Option(help="Training processes.")] = 2,
    port: Annotated[int, typer.Option(help="Local port where they meet.")] = 29517,
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
    out.mkdir(parents=True, exist_ok=True)
    (out / "finish").unlink(missing_ok=True)
    run = Run(
        texts=texts,
        model=model,
        out=out,
        minutes=minutes,
        init=init,
        peak_lr=peak_lr,
        fall_minutes=fall_minutes,
        checkpoint_minutes=checkpoint_minutes,
        cache_gb=cache_gb,
        processes=processes,
        port=port,
    )
    spawn(train, args=(run,), nprocs=processes)


if __name__ == "__main__":
    typer.run(main)
