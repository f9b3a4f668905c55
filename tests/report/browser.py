"""A headless browser, driven by the Chrome DevTools Protocol without any library.

The protocol (https://chromedevtools.github.io/devtools-protocol/) sends JSON messages that end in a
zero byte through file descriptors 3 and 4 of the browser (`--remote-debugging-pipe`).
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")
_SECONDS = 30
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    """Return the program in TACIT_BROWSER, or the first Chromium-like browser on the path."""
    named = os.environ.get("TACIT_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One headless browser with one tab; `complaints` lists what its console reported."""

    def __init__(self, program: str, profile: Path) -> None:
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        # Copies numbered 20 and above, because the launcher overwrites 3 and 4 with them.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (there, back)]
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]
        flags += ["--no-first-run", "--hide-scrollbars", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *map(str, theirs), program, *flags, "about:blank"],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (there, back, *theirs):
            os.close(fd)
        self._numbers, self._rest, self._events = itertools.count(1), b"", []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            self.call(f"{part}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: object) -> dict:
        """Send one command, and return the browser's answer."""
        number = next(self._numbers)
        message: dict = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._events.append(answer)

    def open(self, page: Path, *, scheme: str, width: int, height: int = 900) -> None:
        """Show a file in a window of the given size, with the given preferred color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=wanted)
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + _SECONDS
        while self.run("document.readyState + location.href") != f"complete{page.as_uri()}":
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.02)

    def run(self, script: str) -> object:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release one key."""
        code = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> Path:
        """Save the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the page was opened."""
        self.run("0")  # its answer comes after all earlier messages
        found = []
        for event in self._events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(str(params["entry"]))
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(str(params["args"]))
        return found

    def _receive(self) -> dict:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
