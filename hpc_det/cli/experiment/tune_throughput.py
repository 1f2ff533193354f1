"""hpc-det experiment tune-throughput: measure variations of an experiment, in sequence or in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from hpc_det.cli.arguments import request_options
from hpc_det.cli.experiment.short_runs import Ended, Series, ShortRuns, effective_of, once
from hpc_det.cli.output import Column, Output, column, output_options
from hpc_det.client.creation import say_notes
from hpc_det.client.lookup import store
from hpc_det.config.request import Request
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.short_training import problems
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import samples_per_second
from hpc_det.submit.submission import prepare, submit
from hpc_det.view.formatting import columns, number_if_known, percent, ratio
from hpc_det.view.performance.findings import Finding, efficiency, findings, scaled
from hpc_det.view.performance.short_trainings import Aim, Measurement, Throughput, Variations, larger_batch, variations


@click.command("tune-throughput")
@request_options
@click.option(
    "--batches",
    type=click.IntRange(min=10),
    default=200,
    show_default=True,
    metavar="N",
    help="Length of each training in batches; the first tenth is not measured.",
)
@click.option(
    "--max-slots",
    "most_slots",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure 1, 2, 4, ... up to N slots; default: the experiment's own slots.",
)
@click.option("--keep", is_flag=True, help="Keep the experiments of all trainings, not only of failed ones.")
@click.option("--dry-run", is_flag=True, help="Only print what would be measured.")
@output_options
def tune_throughput(
    request: Request,
    batches: int,
    most_slots: int | None,
    keep: bool,
    dry_run: bool,
    output: Output,
) -> None:
    """Find what limits the throughput of an experiment, and which settings to try.

    Runs short trainings and compares them with the experiment as configured. Each differs in one setting: it trains
    repeatedly on the first batch (is data loading the limit?), rarely exchanges gradients (is it the network?), uses
    fewer slots, or uses larger batches. The trainings are separate experiments that save nothing and are deleted
    afterwards. Without a scheduler they run in sequence. Ctrl-C ends them all.

    \b
    Example:
      hpc-det experiment tune-throughput digits.yaml . --config hyperparameters.lr=0.01 \\
          --cluster slurm --max-slots 4 --dry-run
    """
    tuning = Tuning.of(request, batches, most_slots)
    if dry_run:
        show_plan(tuning.variations, output)
    else:
        show_results(tuning.variations, tuning.run(keep=keep), output)


SIDE_BY_SIDE = 16  # measurements submitted at a time, if a scheduler queues jobs and gives each its own slots


@dataclass(frozen=True)
class Tuning:
    """One call of the command."""

    request: Request
    found: Effective
    batches: int
    variations: Variations

    @classmethod
    def of(cls, request: Request, batches: int, most_slots: int | None) -> Tuning:
        """Plan the measurements; raise UsageError with all problems of all of them."""
        found = effective(request)
        if wrong := list(problems(found)):
            raise UsageError(wrong)
        say_notes(found)
        request = replace(request, cluster=found.profile)  # a training with other slots uses the same kind of them
        tuning = cls(request, found, batches, variations(found.tree, found.cluster, most_slots))
        tuning._check()
        return tuning

    def run(self, *, keep: bool) -> list[Throughput]:
        """Run all measurements, the experiment as configured first; raise HpcDetError if that one fails."""
        with ShortRuns(self._submit, measured, keep=keep) as runs:
            (baseline,) = runs.run_all([once(self.variations.baseline)], side_by_side=1)
            if baseline.failure:
                raise HpcDetError(f"the experiment as configured cannot be measured: {baseline.failure}")
            series: list[Series[Measurement, Throughput]] = [
                once(measurement) for measurement in self.variations.others
            ]
            if self.variations.grows_batches:
                series.append(self._larger_batches(baseline))
            side_by_side = SIDE_BY_SIDE if self.found.cluster.has_queue else 1
            others = runs.run_all(series, side_by_side=side_by_side)
        return sorted([baseline, *others], key=_place)

    def _larger_batches(self, baseline: Throughput) -> Series[Measurement, Throughput]:
        """Yield measurements with growing batches; each depends on the results before it."""
        found, is_memory_bound = [baseline], self.found.cluster.slot_type == "gpu"
        while measurement := larger_batch(found, is_memory_bound=is_memory_bound):
            found.append((yield measurement))

    def _submit(self, measurement: Measurement) -> ExperimentFolder:
        return submit(self._effective(measurement), store())

    def _effective(self, measurement: Measurement) -> Effective:
        return effective_of(self.request, measurement.config(self.found.tree, self.batches))

    def _check(self) -> None:
        if problems := list(dict.fromkeys(self._problems())):
            raise UsageError(problems)

    def _problems(self) -> Iterator[str]:
        experiments = store()
        for measurement in (self.variations.baseline, *self.variations.others):
            try:
                prepare(self._effective(measurement), experiments.folder(experiments.next_id()))
            except UsageError as error:
                yield from error.problems


def measured(measurement: Measurement, ended: Ended) -> Throughput:
    """Return the throughput of a training that has ended, or its failure."""
    failure, reports = ended.failure, list[float]()
    if ended.experiment and not failure:
        reports = samples_per_second(ended.experiment.trial().metrics)
        if len(reports) < 2:
            failure = "no throughput was reported; only trials and the Trainer of hpc_det.pytorch do that"
    if failure:
        return Throughput(measurement=measurement, samples_per_s=None, failure=failure, experiment=ended.id)
    return Throughput.of_reports(measurement, reports, ended.id)


def _place(measured: Throughput) -> tuple[int, int, int]:
    """Return the sort key of a measurement: its aim, slots and batch size."""
    measurement = measured.measurement
    return list(Aim).index(measurement.aim), measurement.slots, measurement.batch_size or 0


# --- output: tables, bars and sentences for people, records for programs


Record = dict[str, Any]
WIDTH = 40  # of a bar, in characters
PLANNED = (
    column("TEST", "test"),
    column("SLOTS", "slots"),
    column("BATCH SIZE", "global_batch_size"),
)
MEASURED = (
    *PLANNED,
    Column("SAMPLES/S", lambda record: number_if_known(record["samples_per_second"])),
    Column("RATIO", lambda record: ratio(record["ratio"])),
    column("FAILURE", "failure", missing=""),
)


def show_plan(wanted: Variations, output: Output) -> None:
    """Print the measurements that would be run."""
    records = [_planned(measurement) for measurement in (wanted.baseline, *wanted.others)]
    output.table(records, PLANNED)
    if output.is_for_people:
        if wanted.grows_batches:
            click.echo("Then doubled batches, until memory or data are exhausted or throughput stops growing")
        _show_left_out(wanted)


def show_results(wanted: Variations, found: Sequence[Throughput], output: Output) -> None:
    """Print the measurements, the scaling efficiency and the findings."""
    records, conclusions = _records(found), findings(found, wanted.conditions)
    if output.as_json:
        output.details([{"tests": records, "left_out": wanted.left_out, "findings": [*map(_finding, conclusions)]}])
        return
    output.table(records, MEASURED)
    if output.is_for_people:
        click.echo("\n".join([*_scaling(found), "", *_in_words(conclusions)]))
        _show_left_out(wanted)


def _show_left_out(wanted: Variations) -> None:
    for reason in wanted.left_out:
        click.echo(f"Left out: {reason}")


def _planned(measurement: Measurement) -> Record:
    return {
        "test": measurement.title,
        "about": measurement.aim.value,
        "slots": measurement.slots,
        "global_batch_size": measurement.batch_size,
        "aggregation_frequency": measurement.aggregation_frequency,
        "trains_on": measurement.trains_on,
    }


def _records(found: Sequence[Throughput]) -> list[Record]:
    """Return a record per measurement; `ratio` is relative to the experiment as configured."""
    baseline = next(each.samples_per_s for each in found if each.measurement.aim is Aim.BASELINE)
    return [
        {
            **_planned(each.measurement),
            "samples_per_second": each.samples_per_s,
            "ratio": each.samples_per_s and baseline and each.samples_per_s / baseline,
            "efficiency": efficiency(each, found),
            "out_of_memory": each.is_out_of_memory,
            "failure": each.failure and each.summary,
            "experiment": each.experiment,
        }
        for each in found
    ]


def _scaling(found: Sequence[Throughput]) -> Iterator[str]:
    """Yield the lines of a bar chart: the scaling efficiency for each number of slots."""
    shares = [(each.measurement.slots, efficiency(each, found)) for each in scaled(found)]
    rows = [[str(slots), percent(share), "█" * round(share * WIDTH)] for slots, share in shares if share is not None]
    if rows:
        yield from ("", *columns([["SLOTS", "EFFICIENCY", ""], *rows]))


def _in_words(conclusions: Sequence[Finding]) -> Iterator[str]:
    for finding in conclusions:
        yield f"{finding.about.capitalize()}: {finding.text}"
        for advice in finding.advice:
            yield f"  try: {advice.text}"
            yield from [f"       {advice.setting}"] if advice.setting else []


def _finding(finding: Finding) -> Record:
    """Return the record of a finding; `settings` has each advice and its setting as one text."""
    settings = [f"{each.text}: {each.setting}" if each.setting else each.text for each in finding.advice]
    return {**asdict(finding), "settings": settings}
