"""Train a trial given by a name such as model_def:MyTrial, as a rank of a job or in this process alone."""

from __future__ import annotations

import bdb
import importlib
import os
import pdb
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_det.core.entry import announce, new_folder, stop_signals_outside_job
from hpc_det.core.run import Outcome, Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rank_process import RankProcess
from hpc_det.distributed.rng import seed_everything
from hpc_det.errors import HpcDetError, UsageError, nearest, or_else
from hpc_det.node import full_disk
from hpc_det.node.process import SignalPipe
from hpc_det.pytorch.loop.run import new_context, train
from hpc_det.pytorch.loop.schedule import Schedule
from hpc_det.pytorch.trial.trial import Trial, interface_problems
from hpc_det.store.folders import TrialFolder


def run_trial(trial_name: str, process: RankProcess, env: Mapping[str, str]) -> None:
    """Train `module:Class` to its end or to an agreed stop, as a rank of an attempt.

    Raises UsageError for a class that cannot be a trial; exceptions of the trial are passed on.
    """
    with Run.of_attempt(process, env) as run:
        train_by_name(trial_name, run)


def train_by_name(trial_name: str, run: Run) -> Outcome:
    """Build the trial `module:Class` and train it by its experiment's configuration."""
    trial_class = load_trial_class(trial_name)
    seed_everything(run.spec["trial_seed"])
    context = new_context(run, trial_class)
    schedule = Schedule.from_config(run.spec["config"], run.spec["hparams"].get("global_batch_size"))
    with trial_class.strategy_class.explained():
        trial = trial_class(context)
    return train(run, trial, context, schedule, is_trainer=False)


def load_trial_class(name: str) -> type[Trial]:
    """Return the class `module:Class`. Raises UsageError with the cause and the place."""
    module_name, separator, class_name = name.partition(":")
    if not separator:
        raise UsageError(f"--trial {name}: not of the form module:Class, for example model_def:MyTrial")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"--trial {name}: cannot import {module_name}: {_cause(error)}{_remedy(error)}") from None
    place = module.__file__ or f"the folder {', '.join(module.__path__)} without an __init__.py"
    try:
        trial_class = attrgetter(class_name)(module)
    except AttributeError:
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        has = or_else(nearest(class_name, known), f"its classes are {', '.join(known) or 'none'}")
        raise UsageError(f"--trial {name}: {place} has no {class_name}; {has}; {_where_from()}") from None
    if not (isinstance(trial_class, type) and issubclass(trial_class, Trial)):
        raise UsageError(
            f"--trial {name}: {class_name} in {place} is not a trial; derive the class from "
            f"hpc_det.pytorch.PyTorchTrial or hpc_det.pytorch.deepspeed.DeepSpeedTrial"
        )
    if problems := interface_problems(trial_class):
        raise UsageError([f"--trial {name}: {class_name} {problem}" for problem in problems])
    return trial_class


def _remedy(error: Exception) -> str:
    """Return what to do about a module that cannot be found; "" for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return (
        f"; install its package for {sys.executable}, or put the module into the code's folder {os.getcwd()}; "
        f"{_where_from()}"
    )


def _where_from() -> str:
    installed = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    own = [path for path in dict.fromkeys(sys.path) if path and not path.startswith(installed)]
    return f"modules are searched for in {', '.join(own) or 'no folder'}, and then among the packages of {sys.prefix}"


def _cause(error: Exception) -> str:
    """Return the error as text, with the user's line that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"


# --- without a job: no agent, no other rank


def run_locally(trial_name: str, spec: dict[str, Any], context_dir: Path, *, test: bool, debug: bool) -> Outcome:
    """Train `module:Class` from `context_dir` in this process.

    `test`: train, validate and save one batch, and delete the files. `debug`: open the debugger where the trial raises
    an exception. Raises HpcDetError after a failure of the trial, whose traceback is printed.
    """
    with _folder(test) as folder, _explained(debug), closing(SignalPipe(stop_signals_outside_job())) as signals:
        os.chdir(context_dir)
        sys.path.insert(0, str(context_dir))
        with Run.unmanaged(spec, folder, Distributed(), signals, test=test) as run:
            return train_by_name(trial_name, run)


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


@contextmanager
def _explained(debug: bool) -> Iterator[None]:
    try:
        yield
    except HpcDetError:
        raise
    except bdb.BdbQuit:  # the user has quit the debugger at a breakpoint() of the trial
        raise KeyboardInterrupt from None
    except Exception as error:
        if full := full_disk.cause_in(error):
            raise HpcDetError(full_disk.sentence(full)) from None
        traceback.print_exc()
        if debug:
            pdb.post_mortem(error.__traceback__)
            sys.stdout.flush()  # so that the debugger's last line precedes the error
        raise HpcDetError(f"the trial failed: {type(error).__name__}: {error}") from None
