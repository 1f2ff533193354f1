"""A real Chromium without a screen, from Debian's package, and the result of loading a page."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

LOCK = Path("/var/tmp/hpc-det-apt.lock")
"""Shared with tests/labs/slurm-up: apt-get fails while another one runs."""
INSTALL = "apt-get update -q && apt-get install -qy --no-install-recommends chromium fonts-dejavu-core"
OPTIONS = (
    "--headless",
    "--no-sandbox",  # Chromium refuses to run as root with a sandbox; the pages are the tests' own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-breakpad",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
)
_CONSOLE = re.compile(r'CONSOLE[:(]\d+[)\]]+ "(.*)", source:')


@dataclass(frozen=True)
class Loaded:
    """A page after its script has run."""

    dom: str
    console: list[str]
    """Messages of scripts, and requests that the page was refused."""


@dataclass(frozen=True)
class Chromium:
    program: str
    profile: Path

    def load(self, page: Path, screenshot: Path, *, fragment: str = "", size: str = "1400,3000") -> Loaded:
        command = [self.program, *OPTIONS, f"--user-data-dir={self.profile}", f"--window-size={size}"]
        command += [f"--screenshot={screenshot}", "--dump-dom", f"file://{page}{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return Loaded(done.stdout, _CONSOLE.findall(done.stderr))

    @contextmanager
    def tab(self, page: Path) -> Iterator[Tab]:
        """Open a page and keep it open for the block."""
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        options = [*OPTIONS, f"--user-data-dir={self.profile}", "--window-size=1000,700", "--remote-debugging-pipe"]
        # Chromium reads requests from descriptor 3 and writes answers to descriptor 4
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        command = ["bash", "-c", script, "bash", self.program, *options]
        descriptors = {"pass_fds": (theirs_in, theirs_out), "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, **descriptors)  # type: ignore[call-overload]
        os.close(theirs_in)
        os.close(theirs_out)
        with os.fdopen(ours_out, "wb") as requests, os.fdopen(ours_in, "rb") as answers:
            tab = Tab(requests, answers)
            try:
                tab.open(page)
                yield tab
            finally:
                tab.close()
                process.wait(60)


class Tab:
    """An open page. Chromium is controlled over pipes, with NUL after each message (--remote-debugging-pipe)."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers = requests, answers
        self._session: str | None = None
        self._number = 0

    def open(self, page: Path) -> None:
        target = self._call("Target.createTarget", url=f"file://{page}")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def close(self) -> None:
        """End Chromium with all its processes."""
        self._session = None
        self._call("Browser.close")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        self._requests.write(json.dumps(request).encode() + b"\0")
        self._requests.flush()
        while (answer := json.loads(self._message())).get("id") != self._number:
            pass  # an event
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> bytes:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "Chromium has exited"
            found += byte
        return bytes(found)


@pytest.fixture
def chromium(tmp_path: Path) -> Chromium:
    """Return Chromium; the first test process installs it if it is missing."""
    program = shutil.which("chromium") or _installed()
    return Chromium(program, tmp_path / "chromium")


def _installed() -> str:
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        pytest.skip("needs chromium; as root on Debian the tests install it themselves")
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shutil.which("chromium"):
            env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            command = ["sh", "-c", INSTALL]
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"needs chromium, and apt-get failed: {done.stderr.strip().splitlines()[-1:]}")
    found = shutil.which("chromium")
    assert found
    return found
