"""GPUs of this host, without torch: a driver on a login node, or of a search, need not load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")


def gpus_here(env: Mapping[str, str]) -> list[str]:
    """Those that CUDA would show on this host, as CUDA_VISIBLE_DEVICES names them.

    CUDA stops at the first name that is none (CUDA C++ Programming Guide, environment variables).
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))
