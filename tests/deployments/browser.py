"""A headless Chromium, driven over its DevTools protocol: what a test of a page needs of one.

It opens one tab, evaluates expressions in it and keeps what the tab requested and logged.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
]
_PATIENCE_S = 60.0


class Tab:
    """One tab. `requests` are URLs that it asked for, `complaints` what its console said."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._next = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command's result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            found = json.loads(self._socket.recv(timeout=_PATIENCE_S))
            if found.get("id") == self._next:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._note(found.get("method"), found.get("params", {}))

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)

    def close(self) -> None:
        """Close the tab, and with it its connections."""
        self.call("Page.close")

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value; AssertionError when it throws."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (condition, self.complaints)
            time.sleep(0.05)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Another window, in a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """A key, down and up, where the focus is."""
        text = {"Enter": "\r"}.get(key, "")
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=codes[key],
            )

    def type(self, text: str) -> None:
        """Text, where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")


@contextmanager
def browser(program: str, profile: Path) -> Iterator[ClientConnection]:
    """A running Chromium's DevTools connection; it ends with the block."""
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + _PATIENCE_S
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, "no Chromium"
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as socket:
            yield socket
    finally:
        process.terminate()
        process.wait(timeout=20)
