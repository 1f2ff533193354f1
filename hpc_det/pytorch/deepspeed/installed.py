"""Whether the DeepSpeed is there that this package needs, asked before anything imports it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys

AT_LEAST, BELOW = (0, 19), (0, 20)
"""0.18 breaks ZeRO with torch 2.13; what shards.py and universal.py know of DeepSpeed's files is 0.19's."""


def check_installed() -> None:
    """Raises ModuleNotFoundError or ImportError, with the command that mends it."""
    remedy = "run: pip install 'hpc_det[deepspeed]'"
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            f"hpc_det.pytorch.deepspeed needs DeepSpeed, which is not there for {sys.executable}; {remedy}",
            name="deepspeed",
        )
    found = importlib.metadata.version("deepspeed")
    if not AT_LEAST <= _numbers(found) < BELOW:
        wanted = ">={}.{},<{}.{}".format(*AT_LEAST, *BELOW)
        raise ImportError(
            f"hpc_det.pytorch.deepspeed needs DeepSpeed {wanted}, and {sys.executable} has {found}; {remedy}",
            name="deepspeed",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
