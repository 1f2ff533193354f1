"""A trial in this process alone: no job, no agent, no other rank."""

from __future__ import annotations

import bdb
import os
import pdb
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
from hpc_det.pytorch.loop.harness import train_by_name
from hpc_det.pytorch.loop.run import Outcome, Run
from hpc_det.store.experiments import state_root
from hpc_det.store.folders import TrialFolder

STOP_SIGNALS_BUT_INTERRUPT = [number for number in STOP_SIGNALS if number != signal.SIGINT]
"""Somebody sits at the keyboard: Control-C means now."""


def run_locally(trial_name: str, spec: dict[str, Any], context_dir: Path, *, test: bool, debug: bool) -> Outcome:
    """Train `module:Class` from `context_dir`.

    `test`: one batch of everything, of which no file remains. `debug`: an error of the trial opens the debugger where
    it was raised. Raises HpcDetError after a failure of the trial, whose traceback is printed.
    """
    with _folder(test) as folder, _explained(debug), closing(SignalPipe(STOP_SIGNALS_BUT_INTERRUPT)) as signals:
        os.chdir(context_dir)
        sys.path.insert(0, str(context_dir))
        with Run.unmanaged(spec, folder, Distributed(), signals, test=test) as run:
            return train_by_name(trial_name, run)


def new_folder() -> TrialFolder:
    """For a run that no scheduler knows, below the state root."""
    parent = state_root(os.environ) / "local"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = TrialFolder(Path(tempfile.mkdtemp(prefix=datetime.now().strftime("%Y%m%d-%H%M%S-"), dir=parent)))
    folder.checkpoints.mkdir(mode=0o700)
    return folder


@contextmanager
def _folder(test: bool) -> Iterator[TrialFolder]:
    folder = new_folder()
    if not test:
        announce(folder)
    try:
        yield folder
    finally:
        if test:
            shutil.rmtree(folder.path)


def announce(folder: TrialFolder) -> None:
    print(f"hpc-det: checkpoints and metrics are in {folder.path}", flush=True)


@contextmanager
def _explained(debug: bool) -> Iterator[None]:
    try:
        yield
    except HpcDetError:
        raise
    except bdb.BdbQuit:  # out of a breakpoint() of the trial's
        raise KeyboardInterrupt from None
    except Exception as error:
        traceback.print_exc()
        if debug:
            pdb.post_mortem(error.__traceback__)
            sys.stdout.flush()  # the debugger's last line comes before ours
        raise HpcDetError(f"the trial failed: {type(error).__name__}: {error}") from None
