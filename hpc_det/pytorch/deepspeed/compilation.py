"""Reports the minutes in which DeepSpeed compiles an op, such as FusedAdam, at its first use on a machine.

In a job rank 0 writes them to a file, which lists and descriptions of the experiment show. Ranks whose op is compiled
already only load it, within seconds.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder

from hpc_det.node.json_files import write_json
from hpc_det.store.attempt import Attempt


def report_compilations() -> None:
    """Report each compilation of this process from now on. May be called again."""
    if not hasattr(OpBuilder.jit_load, "__wrapped__"):
        OpBuilder.jit_load = _reported(OpBuilder.jit_load)


def _reported(jit_load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jit_load)
    def reported(builder: Any, *arguments: Any, **options: Any) -> Any:
        with _compiling(builder.name):
            return jit_load(builder, *arguments, **options)

    return reported


@contextmanager
def _compiling(op: str) -> Iterator[None]:
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    file, began = _file(), time.time()
    print(f"hpc-det: compiling DeepSpeed op {op}, or loading it if it is compiled already", flush=True)
    _write(file, began, None)
    try:
        yield
        print(f"hpc-det: DeepSpeed op {op} is loaded after {time.time() - began:.0f} s", flush=True)
    finally:
        _write(file, began, time.time())


def _file() -> Path | None:
    """Return the file for this attempt; None outside a job."""
    if not Attempt.is_in(os.environ):
        return None
    attempt = Attempt.from_env(os.environ)
    return attempt.trial.compilation(attempt.number)


def _write(file: Path | None, began: float, ended: float | None) -> None:
    if file:
        with suppress(OSError):  # a full disk does not keep an op from being compiled
            write_json(file, {"began": began, "ended": ended})
