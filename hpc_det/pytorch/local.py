"""A trial in this process alone: no job, no agent, no other rank."""

from __future__ import annotations

import os
import pdb
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_det.core.distributed import Distributed
from hpc_det.errors import HpcDetError
from hpc_det.launch.signals import STOP_SIGNALS, SignalPipe
from hpc_det.pytorch.harness import train_by_name
from hpc_det.pytorch.run import Run
from hpc_det.store.folders import TrialFolder
from hpc_det.store.root import state_root

STOP_SIGNALS_BUT_INTERRUPT = [number for number in STOP_SIGNALS if number != signal.SIGINT]
"""Somebody sits at the keyboard: Control-C means now."""


def run_locally(trial_name: str, spec: dict[str, Any], context_dir: Path, *, test: bool, debug: bool) -> Path | None:
    """Train `module:Class` from `context_dir`, also after a change of a file there; the folder of the run.

    `test`: one batch of everything, and no folder remains. `debug`: an error of the trial opens the debugger where it
    was raised.
    """
    os.chdir(context_dir)
    sys.path.insert(0, str(context_dir))
    folder = new_folder(Distributed())
    with closing(SignalPipe(STOP_SIGNALS_BUT_INTERRUPT)) as signals, _debugged(debug):
        run = Run.unmanaged(spec, folder, Distributed(), signals, os.environ)
        train_by_name(trial_name, run, test=test)
        run.close()
    if test:
        shutil.rmtree(folder.path)
        return None
    return folder.path


def new_folder(distributed: Distributed) -> TrialFolder:
    """Collective: a new folder below the state root, for a run that no scheduler knows."""
    path = None
    if distributed.is_chief:
        parent = state_root(os.environ) / "local"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = tempfile.mkdtemp(prefix=datetime.now().strftime("%Y%m%d-%H%M%S-"), dir=parent)
        TrialFolder(Path(path)).checkpoints.mkdir(mode=0o700)
        print(f"hpc-det: checkpoints and metrics are in {path}", flush=True)
    return TrialFolder(Path(distributed.broadcast_json(path)))


@contextmanager
def _debugged(debug: bool) -> Iterator[None]:
    try:
        yield
    except HpcDetError:
        raise
    except Exception as error:
        if debug:
            print(f"hpc-det: {type(error).__name__}: {error}", file=sys.stderr)
            pdb.post_mortem(error.__traceback__)
        raise
