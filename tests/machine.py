"""How busy this machine is: where a deadline has passed, the reason may be that it stood still."""

from __future__ import annotations

import os
from pathlib import Path


def busy() -> str:
    """The load, the shares of the last 10, 60 and 300 s in which something waited for a core, the disk or memory, and
    the share since the boot in which a hypervisor gave the cores to others (proc(5): /proc/pressure, /proc/stat).
    """
    pressures = [f"{file.name}: {file.read_text().splitlines()[0]}" for file in _pressures()]
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return "\n".join([f"load: {os.getloadavg()}", *pressures, f"stolen: {ticks[7] / sum(ticks):.1%}"])


def _pressures() -> list[Path]:
    """None on a kernel without."""
    return [file for name in ("cpu", "io", "memory") if (file := Path("/proc/pressure", name)).exists()]
