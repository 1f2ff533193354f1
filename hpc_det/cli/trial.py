"""hpc-det trial: inspect, profile or kill one trial of an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from hpc_det.cli import describe_trial
from hpc_det.cli.arguments import any_trial_argument, trial_argument
from hpc_det.cli.commands import Group
from hpc_det.cli.experiment.download import copy, of_one_trial, output_dir
from hpc_det.cli.experiment.list_checkpoints import best_option, show_checkpoints
from hpc_det.cli.experiment.logs import LogChoices, log_options, print_trial
from hpc_det.cli.output import Column, Output, Record, column, output_options, rows, show, show_description
from hpc_det.client.stopping import kill_trial
from hpc_det.errors import count, length_in_words, printable
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.view.checkpoints import of_trial, set_aside_in
from hpc_det.view.formatting import NONE, columns, duration, iso, number, percent, quantity, section, values_in_words
from hpc_det.view.performance.profile import profile as profile_record
from hpc_det.view.performance.system import GPU_UNITS, UNITS
from hpc_det.view.state import ExperimentView, effective_config


@click.group(cls=Group)
def trial() -> None:
    """Inspect, profile or kill one trial of an experiment."""


@trial.command()
@any_trial_argument
@click.option("--metrics", "with_metrics", is_flag=True, help="Show only the metric reports, all of them.")
@output_options
def describe(trial: TrialFolder, with_metrics: bool, output: Output) -> None:
    """Describe a trial: state, hyperparameters, attempts, metrics and checkpoints.

    The state is QUEUED, RUNNING, PAUSED, COMPLETED, ERROR, INVALID or CANCELED. PAUSED: the search may train it
    further; INVALID: the trial reported that its hyperparameters cannot work.

    \b
    Example:
      hpc-det trial describe 12/7 --metrics
      hpc-det trial describe 12/7 --json
      {"id": 7, "state": "PAUSED", "worker": null, "job_id": "4711_3",
       "hyperparameters": {"lr": 0.01}, "seed": 1729,
       "batches": 100, "total_batches": 100,
       "training": {"loss": 0.1}, "validation": {"accuracy": 0.96},
       "best": {...}, "profile": "well used: ...",
       "checkpoints": [...], "set_aside": [], "attempts": [...]}
    `worker` is the number of the worker that trains it now. `profile` is the verdict of
    `hpc-det trial profile`, null if there is no profile or it is too large to be read
    quickly. For the last keys see `hpc-det experiment describe --help`.
    """
    if with_metrics:
        output.table(reports_of(trial), REPORT_COLUMNS, REPORT_KEYS)
        return
    found = describe_trial.of(trial)
    if output.is_for_people:
        show_description(describe_trial.in_words(found))
    else:
        output.details([describe_trial.as_json(found)])


@trial.command()
@any_trial_argument
@output_options
def profile(trial: TrialFolder, output: Output) -> None:
    """Show where the time of a trial is spent, and what to do about it.

    Prints a verdict (data loader bound, copy bound, communication bound, checkpoint bound, validation bound, callback
    bound, loop bound, slow rank, idle GPUs, well used), the share of time it is based on, and settings to try. Below it
    are the measurements: timings as the mean over ranks with the longest one, and system metrics of whole nodes, which
    include other jobs there. A trial is measured while `profiling.enabled` is true; otherwise only the times of saves
    and validations are known.

    \b
    Example:
      hpc-det trial profile 12/7
      hpc-det trial profile 12/7 --csv
      hpc-det trial profile 12/7 --json
      {"id": 7, "verdict": "data loader bound", "share": 0.62, "why": "...",
       "rank": null, "advice": [{"text": "...", "setting": "..."}],
       "also": [], "notes": [], "ranks": 2, "batches": 400,
       "samples_per_second": 640.0, "parts": {"loading": 24.8, ...},
       "timings": [{"timing": "dataloader_next", "mean_s": 24.8,
                    "share": 0.62, "batch_s": 0.062, "longest_s": 25.0,
                    "longest_rank": 1, "longest_host": "n1"}, ...],
       "nodes": [{"host": "n1", "samples": 40,
                  "metrics": {"cpu_util": {"mean": 40.0, "min": ...}},
                  "gpus": {"GPU-...": {"util": {...}}}}]}
    `rank` is the single rank to which the verdict applies and for which the others wait, or null.
    `also` contains further verdicts with smaller shares. `parts` are seconds of the slowest rank.
    Units are seconds, bytes and bytes per second; usage is in percent.
    """
    found = profile_of(trial)
    if output.is_for_people:
        show(profile_in_words(trial, found))
    elif output.as_csv:
        output.table(measures(found), (), MEASURE_KEYS)
    else:
        output.details([found])


@trial.command("list-checkpoints")
@any_trial_argument
@best_option
@output_options
def list_checkpoints(trial: TrialFolder, best: int | None, output: Output) -> None:
    """List the checkpoints of a trial, newest first.

    \b
    Example:
      hpc-det trial list-checkpoints 12/7
    """
    config = effective_config(trial.experiment())
    found, set_aside = of_trial(trial, config), set_aside_in(trial, config)
    show_checkpoints(found, set_aside, config["searcher"], best, output)


@trial.command()
@any_trial_argument
@output_dir
@click.option("--best", is_flag=True, help="Copy the checkpoint with the best validation, by the searcher's metric.")
@click.option("--latest", is_flag=True, help="Copy the newest checkpoint (default).")
@click.option("--uuid", metavar="UUID", help="Copy the checkpoint whose UUID begins like this.")
def download(trial: TrialFolder, target: Path, best: bool, latest: bool, uuid: str | None) -> None:
    """Copy a checkpoint of a trial and print its folder.

    Every byte is verified against the checksums in the manifest, and existing files are never overwritten.

    \b
    Example:
      hpc-det trial download 12/7 --best -o best
    """
    if best + latest + (uuid is not None) > 1:
        raise click.UsageError("give only one of --best, --latest and --uuid")
    copy([of_one_trial(trial, uuid, best=best)], target)


@trial.command()
@trial_argument
def kill(trial: TrialFolder) -> None:
    """Kill one trial, without saving a checkpoint. The other trials of its experiment continue.

    \b
    Example:
      hpc-det trial kill 13/1
    """
    show(kill_trial(trial))


@trial.command()
@any_trial_argument
@log_options
def logs(trial: TrialFolder, choices: LogChoices) -> None:
    """Print the output of a trial's ranks, by attempt and merged by time.

    For details see `hpc-det experiment logs --help`.

    \b
    Example:
      hpc-det trial logs 12/7 --follow --rank 0
      hpc-det trial logs 12/7 --tail 100 --timestamps
    """
    print_trial(trial, choices)


REPORT_KEYS = "time attempt kind batches metrics"  # of a record
REPORT_COLUMNS = (
    column("TIME", "time"),
    column("ATTEMPT", "attempt"),
    column("KIND", "kind"),
    column("BATCHES", "batches"),
    Column("METRICS", lambda record: values_in_words(record["metrics"])),
)


def reports_of(trial: TrialFolder) -> list[Record]:
    """Return a record per metric report, oldest first, without reports of work that was lost and trained again."""
    return [
        {
            "time": iso(report["time"]),
            "attempt": report["attempt"],
            "kind": report["kind"],
            "batches": report["steps"],
            "metrics": report["metrics"],
        }
        for report in read_reports(trial.metrics)
    ]


SHOWN_DIGITS = 12  # characters to which a GPU's UUID is cut: enough to distinguish the GPUs of a node
_TIMINGS = (
    Column("TIMING", lambda timing: timing["timing"]),
    Column("MEAN", lambda timing: duration(timing["mean_s"])),
    Column("SHARE", lambda timing: percent(timing["share"])),
    Column("A BATCH", lambda timing: duration(timing["batch_s"])),
    Column("LONGEST", lambda timing: duration(timing["longest_s"])),
    Column("OF RANK", lambda timing: f"{timing['longest_rank']} on {timing['longest_host']}"),
)


_METRICS = (
    Column("HOST", lambda measure: measure["host"]),
    Column("GPU", lambda measure: (measure["gpu"] or NONE)[:SHOWN_DIGITS]),
    Column("METRIC", lambda measure: measure["measure"]),
    Column("MEAN", lambda measure: quantity(measure["mean"], measure["unit"])),
    Column("MIN", lambda measure: quantity(measure["min"], measure["unit"])),
    Column("MAX", lambda measure: quantity(measure["max"], measure["unit"])),
)


MEASURE_KEYS = "measure unit host gpu mean min max share batch_s rank"  # of a record of `measures`


def profile_of(trial: TrialFolder) -> Record:
    """Return the record that `trial profile --json` prints."""
    return {"id": trial.id, **profile_record(ExperimentView(trial.experiment()), trial)}


def measures(found: Record) -> list[Record]:
    """Return a record for each timing, and for each metric of a node or GPU: the rows of `--csv`."""
    return [*map(_of_timing, found["timings"]), *_of_nodes(found)]


def _of_timing(timing: Record) -> Record:
    return {
        "measure": timing["timing"],
        "unit": "s",
        "host": timing["longest_host"],
        "gpu": None,
        "mean": timing["mean_s"],
        "min": None,
        "max": timing["longest_s"],
        "share": timing["share"],
        "batch_s": timing["batch_s"],
        "rank": timing["longest_rank"],
    }


def _of_nodes(found: Record) -> Iterator[Record]:
    for node in found["nodes"]:
        yield from _of_metrics(node["host"], None, node["metrics"], UNITS)
        for gpu, metrics in node["gpus"].items():
            yield from _of_metrics(node["host"], gpu, metrics, GPU_UNITS)


def _of_metrics(host: str, gpu: str | None, metrics: Record, units: Mapping[str, str]) -> Iterator[Record]:
    for name, usage in metrics.items():
        about = {"measure": name, "unit": units[name], "host": host, "gpu": gpu}
        yield {**about, **usage, "share": None, "batch_s": None, "rank": None}


def profile_in_words(trial: TrialFolder, found: Record) -> str:
    """Return the profile as text for people: the verdict, advice, and then the measurements."""
    heading = [f"Trial {trial.experiment().id}/{trial.id}: {found['verdict']}", f"  {found['why']}"]
    also = [section(f"Also {other['verdict']}: {other['why']}", _advice(other)) for other in found["also"]]
    timings = section(_timings_heading(found), _table(found["timings"], _TIMINGS))
    nodes = section("System metrics, of whole nodes", _table(list(_of_nodes(found)), _METRICS))
    parts = [heading, section("To try", _advice(found)), *also, timings, nodes, section("Notes", found["notes"])]
    return "\n\n".join("\n".join(map(printable, lines)) for lines in parts if lines)


def _advice(verdict: Record) -> list[str]:
    return [line for its in verdict["advice"] for line in [f"- {its['text']}", *_setting(its)]]


def _setting(advice: Record) -> list[str]:
    """Return the line with the setting, if the advice has one."""
    return [f"    {advice['setting']}"] if advice["setting"] else []


def _timings_heading(found: Record) -> str:
    batches, ranks = length_in_words(found["batches"], "batches"), count(found["ranks"], "rank")
    speed = number(found["samples_per_second"])
    return f"Timings of {batches} on {ranks}, {speed} samples a second"


def _table(records: Sequence[Record], shown: Sequence[Column]) -> list[str]:
    return columns(rows(records, shown)) if records else []
