"""Starts and stops the quickstart cascade for the routing bench, and calibrates it.

It uses the product's own commands, each as a process of its own. It does not know what is asked.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cluster.config import load_serve_config
from cluster.errors import EngineError
from cluster.local import endpoint_url
from router.record import read_log

_START_S = 600.0
_STOP_S = 120.0
_POLL_S = 0.5


def variant(document: Mapping[str, Any], routing: Mapping[str, Any], port: int) -> dict[str, Any]:
    """A Serve config with these keys of `routing`, on this port; all else stays."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    changed["http_options"] = {**changed.get("http_options", {}), "port": port}
    args = changed["applications"][0]["args"]
    args["routing"] = {**args.get("routing", {}), **routing}
    return changed


def watching(log_file: Path) -> dict[str, Any]:
    """`routing` that scores every answer of the small model, logs it and never escalates.

    No mean of margins is below 0.
    """
    return {
        "policy": "margin",
        "margin_threshold": 0.0,
        "log_file": str(log_file.resolve()),
        "log_margins": True,
    }


def calibrated(calibration: Path) -> dict[str, Any]:
    """`routing` whose thresholds come from the file; requests name their target."""
    return {"policy": "margin", "calibration": str(calibration.resolve())}


def calibrate(log_file: Path, target_fraction: float, out: Path) -> None:
    """`kvcascade calibrate` on what the routed model answered, each prompt once.

    Answers of a model that was asked by its own name are in the log, too, and left out, and a
    run that went on after an interruption may have asked twice.
    """
    once = {one.request_hash: one for one in read_log(log_file) if one.policy == "margin"}
    chosen = log_file.with_name("calibration-log.jsonl")
    chosen.write_text("".join(f"{one.model_dump_json()}\n" for one in once.values()))
    command = [_kvcascade(), "calibrate", "--log", str(chosen), "--out", str(out)]
    subprocess.run([*command, "--target-fraction", str(target_fraction)], check=True)


@contextmanager
def served(config: Path) -> Iterator[str]:
    """`kvcascade serve CONFIG` until the block ends; yields the URL.

    Its output goes into a file beside the config. Raises EngineError when it ends early.
    """
    url = endpoint_url(load_serve_config(config)[0])
    log_file = config.with_suffix(".log")
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [_kvcascade(), "serve", str(config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # A shell starts background jobs with SIGINT ignored, and that would be inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        _wait(url, process, log_file)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + _START_S
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EngineError(f"`kvcascade serve` ended; see {log_file}")
            try:
                if client.get(f"{url}/health").is_success:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(_POLL_S)
    raise EngineError(f"the cascade did not start within {_START_S:.0f} s; see {log_file}")


def _kvcascade() -> str:
    return str(Path(sys.executable).with_name("kvcascade"))
