"""hpc-det experiment sync: upload the offline runs of W&B and MLflow from a machine with network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import click

from hpc_det.cli.arguments import experiment_argument
from hpc_det.cli.output import at_once, show
from hpc_det.config.secrets import without_secrets
from hpc_det.errors import HpcDetError, UsageError, count, pip_install
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.view.state import effective_config

Settings: TypeAlias = Mapping[str, Any]


@click.command()
@experiment_argument
@click.option("--logger", "kind", type=click.Choice(["wandb", "mlflow"]), help="Only this logger; default: all.")
@click.option("--dry-run", is_flag=True, help="Only print what would be uploaded.")
def sync(experiment: ExperimentFolder, kind: str | None, dry_run: bool) -> None:
    """Upload offline runs of the experiment's loggers.

    Attempts of a trial are uploaded in their order, and runs that were uploaded before are skipped. If the upload of a
    trial fails, the command continues with the others and exits with 1.

    \b
    Example:
      hpc-det experiment sync 12 --dry-run
    """
    config = effective_config(experiment)
    entries = config.get("loggers") or ()
    found = {name: settings for entry in entries for name, settings in entry.items() if settings is not None}
    if kind is not None and kind not in found:
        raise UsageError(f"--logger {kind}: experiment {experiment.id} has {' and '.join(found) or 'no loggers'}")
    wanted = {name: found[name] for name in found if kind in (None, name)}
    if not wanted:
        show(f"Experiment {experiment.id} has no loggers")
    name = str(config.get("name") or "experiment")
    uploads = [(trial, logger) for trial in experiment.trials() for logger in wanted]
    at_once(uploads, lambda item: _sync(*item, settings=wanted[item[1]], name=name, dry_run=dry_run))


def _sync(trial: TrialFolder, logger: str, *, settings: Settings, name: str, dry_run: bool) -> None:
    """Upload the offline runs of a trial and print what was done. Raises HpcDetError."""
    place = f"trial {trial.experiment().id}/{trial.id}: {logger}"
    lines = 0
    try:
        for line in _UPLOADS[logger](trial, {"experiment_name": name} | _given(settings), dry_run):
            show(f"{place}: {line}")
            lines += 1
    except ModuleNotFoundError as error:
        raise UsageError(f"{place}: {error}; run {pip_install(f'hpc_det[{logger}]')}") from None
    except UsageError as error:
        raise UsageError([f"{place}: {problem}" for problem in error.problems]) from None
    except Exception as error:  # of the logger's library
        raise HpcDetError(f"{place}: {without_secrets(str(error), os.environ)}") from None
    if not lines:
        show(f"{place}: nothing to upload")


def _wandb(trial: TrialFolder, settings: Settings, dry_run: bool) -> Iterator[str]:
    from hpc_det.integrations import wandb

    running = Journal(trial.journal).open_attempt() if trial.journal.exists() else None
    runs = wandb.offline_runs(trial.loggers / "wandb")
    # `wandb sync` marks a run as uploaded, also one to which a job still writes.
    ended = [run for run in runs if wandb.attempt_of(run) != running]
    if dry_run:
        yield from (f"would upload {run.name} of attempt {wandb.attempt_of(run)}" for run in ended)
    else:
        yield from wandb.upload(ended, settings)
    if len(ended) < len(runs):
        yield f"attempt {running} is running; run the command again after its end"


def _mlflow(trial: TrialFolder, settings: Settings, dry_run: bool) -> Iterator[str]:
    from hpc_det.integrations import mlflow

    folder = trial.loggers / "mlflow"
    if not mlflow.has_offline_run(folder):
        return
    uri = settings.get("tracking_uri") or os.environ.get(mlflow.URI)
    if not uri:
        raise UsageError(f"the experiment has no tracking_uri; set the variable {mlflow.URI}")
    run = mlflow.OfflineRun(folder, uri)
    shown = without_secrets(uri, os.environ)
    if dry_run:
        missing = sum(map(len, run.missing().values()))
        yield f"would copy {count(missing, 'value')} to {shown}"
    else:
        yield f"copied {count(run.copy(settings['experiment_name']), 'value')} to {shown}"


_UPLOADS = {"wandb": _wandb, "mlflow": _mlflow}


def _given(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}
