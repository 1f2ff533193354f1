"""From the name of a trial class to its outcome: what one rank does between its start and its last word."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping

from hpc_det.distributed.rank_process import RankProcess
from hpc_det.distributed.rng import seed_everything
from hpc_det.errors import UsageError
from hpc_det.pytorch.loop.run import Outcome, Run
from hpc_det.pytorch.loop.schedule import Schedule
from hpc_det.pytorch.trial.trial import Trial, interface_problems


def run_trial(trial_name: str, process: RankProcess, env: Mapping[str, str]) -> None:
    """Train `module:Class` to its end or to an agreed stop, as a rank of an attempt.

    Raises UsageError for a class that cannot be a trial; whatever the trial raises goes through.
    """
    with Run.of_attempt(process, env) as run:
        train_by_name(trial_name, run)


def train_by_name(trial_name: str, run: Run) -> Outcome:
    trial_class = load_trial_class(trial_name)
    seed_everything(run.spec["trial_seed"])
    context = run.new_context(trial_class)
    schedule = Schedule.from_config(run.spec["config"], run.spec["hparams"].get("global_batch_size"))
    with trial_class.strategy_class.explained():
        trial = trial_class(context)
    return run.train(trial, context, schedule, is_trainer=False)


def load_trial_class(name: str) -> type[Trial]:
    """The class `module:Class`. Raises UsageError with one sentence that says what is wrong where."""
    module_name, separator, class_name = name.partition(":")
    if not separator:
        raise UsageError(f"--trial {name}: not of the form module:Class, for example model_def:MyTrial")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"--trial {name}: cannot import {module_name}: {_cause(error)}") from None
    trial_class = getattr(module, class_name, None)
    if trial_class is None:
        raise UsageError(f"--trial {name}: {module.__file__} has no {class_name}")
    if not (isinstance(trial_class, type) and issubclass(trial_class, Trial)):
        raise UsageError(
            f"--trial {name}: {class_name} is no subclass of hpc_det.pytorch.PyTorchTrial, nor of "
            f"hpc_det.pytorch.deepspeed.DeepSpeedTrial"
        )
    if problems := interface_problems(trial_class):
        raise UsageError([f"--trial {name}: {class_name} {problem}" for problem in problems])
    return trial_class


def _cause(error: Exception) -> str:
    """The error and the user's own line that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"
