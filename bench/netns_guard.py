"""Removes a run's namespaces and files when standard input ends: then its owner is gone.

Standard input is a pipe of which only the owner holds the other end, so that it ends however the
owner does, by SIGKILL too. It does not know what runs in the namespaces.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.netns_network import remove


def main(prefix: str) -> None:
    """Wait for the end of the owner of `prefix`, then clean up."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.buffer.read()
    remove(prefix)


if __name__ == "__main__":
    main(sys.argv[1])
