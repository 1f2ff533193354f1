"""From a trial class to an outcome: what one rank does between its start and its last word."""

from __future__ import annotations

import gc
import importlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from hpc_det.core.checkpoint import CheckpointContext
from hpc_det.core.distributed import Distributed
from hpc_det.core.metrics import MetricsLog
from hpc_det.core.preempt import Listener, StopAgreement, give_notice
from hpc_det.core.rng import seed_everything
from hpc_det.errors import UsageError
from hpc_det.launch.attempt import Attempt
from hpc_det.launch.doorbell import Line
from hpc_det.launch.signals import SignalPipe
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.loop import Loop
from hpc_det.pytorch.trial import PyTorchTrial, missing_methods
from hpc_det.store.files import write_json


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """What the rank's process has set up before torch was imported."""

    attempt: Attempt
    signals: SignalPipe
    line: Line


def run_trial(trial_name: str, process: RankProcess, env: Mapping[str, str]) -> None:
    """Train `module:Class` to its end or to an agreed stop, and write the outcome (rank 0).

    Raises UsageError for a class that cannot be a trial; whatever the trial raises goes through.
    """
    spec = json.loads(process.attempt.trial.trial.read_text(encoding="utf-8"))
    distributed = Distributed.from_env(env)
    distributed.start()
    stop = _stop_agreement(process, distributed, env)
    _train(trial_name, spec, process.attempt, distributed, stop)
    distributed.barrier()
    # Objects that hold the process group go first: gloo aborts in their destructors otherwise (pytorch 190489). After
    # a failure the group is not destroyed: with a dead peer that may hang, and the process leaves at once anyway.
    gc.collect()
    distributed.stop()


def _stop_agreement(process: RankProcess, distributed: Distributed, env: Mapping[str, str]) -> StopAgreement:
    stores: list[Store] = [distributed.side_store(env) for _ in range(2)] if distributed.size > 1 else []
    waiting, speaking = stores or [distributed.side_store(env)] * 2
    prefix = f"stop/{process.attempt.secret}"
    Listener(process.signals, process.line, lambda: give_notice(speaking, prefix))
    return StopAgreement(distributed.rank, distributed.size, waiting, prefix)


def _train(
    trial_name: str, spec: dict[str, Any], attempt: Attempt, distributed: Distributed, stop: StopAgreement
) -> None:
    trial_class = load_trial_class(trial_name)
    seed_everything(spec["trial_seed"])
    context = PyTorchTrialContext(spec, distributed)
    trial = trial_class(context)
    _check_wrapped(trial_name, context)
    loop = Loop(
        trial,
        context,
        stop=stop,
        checkpoints=CheckpointContext(attempt.trial.checkpoints, distributed),
        log=MetricsLog(attempt.trial, attempt.number),
    )
    progress = loop.run()
    if distributed.is_chief:
        kind = "stopped" if loop.stopped else "finished"
        write_json(attempt.trial.outcome, {"attempt": attempt.number, "kind": kind, "steps": progress.steps})


def load_trial_class(name: str) -> type[PyTorchTrial]:
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
    if not (isinstance(trial_class, type) and issubclass(trial_class, PyTorchTrial)):
        raise UsageError(f"--trial {name}: {class_name} is no subclass of hpc_det.pytorch.PyTorchTrial")
    if missing := missing_methods(trial_class):
        raise UsageError(f"--trial {name}: {class_name} does not implement {', '.join(missing)}")
    return trial_class


def _check_wrapped(trial_name: str, context: PyTorchTrialContext) -> None:
    problems = [
        f"--trial {trial_name}: __init__ wraps no {what}; call context.wrap_{what}, or a checkpoint would miss it"
        for what, wrapped in (("model", context.models), ("optimizer", context.optimizers))
        if not wrapped
    ]
    if problems:
        raise UsageError(problems)


def _cause(error: Exception) -> str:
    """The error and the user's own line that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"
