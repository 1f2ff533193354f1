"""A real Chromium without a screen, from Debian's package, and the result of loading a page."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
