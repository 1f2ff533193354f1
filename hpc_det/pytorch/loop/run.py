"""Training a trial class in one attempt: the run's services meet the trial, its schedule and its loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.core.portable import Portable
from hpc_det.core.run import Outcome, Purpose, Run
from hpc_det.distributed.preempt import ForcedStop
from hpc_det.pytorch.loop.loop import Loop, WarmStart
from hpc_det.pytorch.loop.schedule import Schedule
from hpc_det.pytorch.profiling.measurements import Measurements
from hpc_det.pytorch.state.class_name import recorded_class
from hpc_det.pytorch.trial.trial import BuiltTrial, Trial, kind_of
from hpc_det.pytorch.trial.trial_context import TrialContext

if TYPE_CHECKING:
    from hpc_det.pytorch.state.resume_trace import ResumeTrace


def new_context(run: Run, trial_class: type[Trial]) -> TrialContext:
    return trial_class.strategy_class.context_class(run.spec, run.distributed, run.folder)


def train(
    run: Run,
    trial: Trial,
    context: TrialContext,
    schedule: Schedule,
    *,
    is_trainer: bool,
    warm_start: Path | None = None,
    profiling_enabled: bool = False,
) -> Outcome:
    """Train until the end or an agreed stop; rank 0 writes the outcome.

    `profiling_enabled` overrides the configuration. Raises UsageError for a trial that wraps no model; exceptions of
    the trial are passed on.
    """
    built = BuiltTrial(trial, context, trial.strategy_class(trial, context))
    built.strategy.check()
    context.trains_on = run.purpose.trains_on
    trace = _resume_trace(run, built)
    save_schedule = run.new_save_schedule()
    if is_trainer and schedule.checkpoint_period:
        save_schedule.leave_to_period()
    weights = run.spec.get("warm_start")
    loop = Loop(
        built,
        adapted(schedule, run.purpose, run.spec["config"]),
        stop=run.stop,
        log=run.log,
        checkpointing=run.checkpointing(
            schedule.kept, smaller_is_better=schedule.smaller_is_better, save_schedule=save_schedule
        ),
        portable=portable_of(run.spec, type(trial), run.job.code if run.job else None, is_trainer=is_trainer),
        searcher=run.job.searcher if run.job else None,
        warm_start=WarmStart(checkpoint=warm_start, weights=Path(weights) if weights else None),
        measurements=_measurements(run, profiling_enabled),
    )
    steps = loop.run().steps
    if trace:
        trace.end(loop.end, steps)
    return run.write_outcome(loop.end, steps, saved=loop.is_saved)


def portable_of(spec: Mapping[str, Any], trial_class: type[Trial], code: Path | None, *, is_trainer: bool) -> Portable:
    """Return the files with which a checkpoint of this trial class can be loaded outside the experiment."""
    return Portable(
        spec,
        code,
        trial_type=kind_of(trial_class).__name__,
        **recorded_class(trial_class, code),
        is_trainer=is_trainer,
    )


def adapted(schedule: Schedule, purpose: Purpose, config: Mapping[str, Any]) -> Schedule:
    """Return `schedule` as a run with this purpose needs it. `config`: the experiment's configuration."""
    if purpose.trains_on:
        return schedule.for_throughput(config)
    if purpose.forced_stops is not None:
        return schedule.as_configured(config)
    return schedule.for_test() if purpose.test else schedule


def _measurements(run: Run, enabled: bool) -> Measurements | None:
    profiling = run.spec["config"].get("profiling", {})
    if not enabled and not profiling.get("enabled"):
        return None
    return Measurements(profiling, run.folder, run.attempt, run.distributed)


def _resume_trace(run: Run, built: BuiltTrial) -> ResumeTrace | None:
    stops = run.purpose.forced_stops
    if stops is None:
        return None
    from hpc_det.pytorch.state.resume_trace import ResumeTrace  # not imported in other trainings

    assert isinstance(run.stop, ForcedStop)
    return ResumeTrace(built, run.stop, stops, run.folder, run.attempt)
