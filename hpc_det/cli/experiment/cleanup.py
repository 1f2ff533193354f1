"""hpc-det experiment cleanup: delete logs whose retention has expired. `create` also does it, once a day."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import click

from hpc_det.cli.experiment.delete import finish_deletions
from hpc_det.cli.output import show
from hpc_det.client.lookup import store
from hpc_det.errors import HpcDetError, count, say
from hpc_det.node.files import age_s, make_folder
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.trial_history import read_tolerantly
from hpc_det.view.watch import readable_states, readable_views


@click.command()
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
def cleanup(dry_run: bool) -> None:
    """Delete logs that are older than their experiment's `retention_policy` allows; suitable for cron.

    The logs of an experiment are deleted `log_retention_days` after its end. `experiment create` does the same once a
    day. The command also completes each `experiment delete` that was killed.

    \b
    Example:
      hpc-det experiment cleanup --dry-run
    """
    for line in clean_up(store(), dry_run=dry_run):
        show(line)


DAY_S = 24 * 3600.0


def clean_up(store: ExperimentStore, *, dry_run: bool) -> Iterator[str]:
    """Delete expired logs, and yield a sentence for each experiment. Experiments with damaged files are skipped.

    At the end, deletions that were killed are completed; raises HpcDetError if an object store does not answer.
    """
    due = [experiment for experiment in store.all() if _is_due(experiment)]
    views, _damaged = readable_views(due)
    for number, state in readable_states(views)[0].items():
        if state.is_final:
            yield _delete_logs(store.folder(number), dry_run=dry_run)
    if not dry_run and store.root.exists():
        store.cleaned.touch(mode=0o600)  # before what may raise, so that `create` does not repeat it all day
        finish_deletions(store)


def cleanup_daily(store: ExperimentStore) -> None:
    """Delete expired logs, unless that was done in the last 24 hours. Print failures as a note and do not raise."""
    if age_s(store.cleaned) < DAY_S:
        return
    try:
        for _ in clean_up(store, dry_run=False):
            pass
    except (HpcDetError, OSError) as error:
        say(f"note: `hpc-det experiment cleanup`: {error}")


def _is_due(experiment: ExperimentFolder) -> bool:
    """Return whether logs of the experiment may have expired, judged only by the times of files."""
    # Every event of a search changes the time of its folder, so the experiment cannot have ended later than that. Few
    # experiments pass this test; the scheduler is queried only about these.
    days, quiet_s = _retention_days(experiment), age_s(experiment.search)
    return days is not None and quiet_s > days * DAY_S and age_s(experiment.logs_deleted) > quiet_s


def _retention_days(experiment: ExperimentFolder) -> int | None:
    """Return the days to keep logs after the end of the experiment, or None to keep them forever."""
    config = read_tolerantly(experiment.effective)
    policy = config.get("retention_policy") if isinstance(config, dict) else None
    days: int | None = (policy or {}).get("log_retention_days")
    return None if days == -1 else days


def _delete_logs(experiment: ExperimentFolder, *, dry_run: bool) -> str:
    """Delete the experiment's logs, unless `dry_run`, and return a sentence for the user."""
    folders = [trial.logs for trial in experiment.trials()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    said = f"logs of experiment {experiment.id}: {count(len(files) + len(experiment.job_logs()), 'file')}"
    if dry_run:
        return f"Would delete {said}"
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
    for path in experiment.job_logs():
        path.unlink(missing_ok=True)
    experiment.logs_deleted.touch(mode=0o600)
    return f"Deleted {said}"
