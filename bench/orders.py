"""Orders to another process, and there: a line of JSON each, and a line of JSON back.

An order is the name of one of the worker's methods and its arguments. It knows no methods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TextIO


class Orders:
    """The end that gives orders to a process whose standard input and output are pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def give(self, do: str, **order: Any) -> Any:
        """Have one carried out; its answer. RuntimeError when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"do": do, **order}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended while it did {do!r}; what went wrong is above")
        return json.loads(line)

    def end(self, *, kill: bool = False) -> None:
        """Give no more, and wait for the process, which may then close what it has."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        if kill:
            self._process.kill()
        self._process.wait()


def answers() -> TextIO:
    """Where answers go; from now on whatever prints goes to standard error instead."""
    found = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return found


def carry_out(worker: Any, to: TextIO) -> None:
    """Do what standard input says until it ends."""
    for line in sys.stdin:
        order = json.loads(line)
        work: Callable[..., Any] = getattr(worker, order.pop("do"))
        print(json.dumps(work(**order)), file=to, flush=True)
