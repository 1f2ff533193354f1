"""What `hpc-det experiment tune-throughput` shows, as tables, bars and sentences, and as records for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from hpc_det.cli.output import Column, Output, column
from hpc_det.view.formatting import columns, number_if_known, percent, ratio
from hpc_det.view.performance.findings import Finding, efficiency, findings, scaled
from hpc_det.view.performance.short_trainings import Aim, Measurement, Throughput, Variations

Record = dict[str, Any]
WIDTH = 40
"""Of a bar, in characters."""
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
    """What would be measured."""
    records = [_planned(measurement) for measurement in (wanted.baseline, *wanted.others)]
    output.table(records, PLANNED)
    if output.is_for_people:
        if wanted.grows_batches:
            click.echo("Then batches twice as large, and again, until memory, data or the gain comes to its end")
        _show_left_out(wanted)


def show_results(wanted: Variations, found: Sequence[Throughput], output: Output) -> None:
    records, told = _records(found), findings(found, wanted.conditions)
    if output.as_json:
        output.details([{"tests": records, "left_out": wanted.left_out, "findings": [*map(_finding, told)]}])
        return
    output.table(records, MEASURED)
    if output.is_for_people:
        click.echo("\n".join([*_scaling(found), "", *_in_words(told)]))
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
    """Ratios are to the experiment as configured."""
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
    shares = [(each.measurement.slots, efficiency(each, found)) for each in scaled(found)]
    rows = [[str(slots), percent(share), "█" * round(share * WIDTH)] for slots, share in shares if share is not None]
    if rows:
        yield from ("", *columns([["SLOTS", "EFFICIENCY", ""], *rows]))


def _in_words(told: Sequence[Finding]) -> Iterator[str]:
    for finding in told:
        yield f"{finding.about.capitalize()}: {finding.text}"
        for advice in finding.advice:
            yield f"  try: {advice.text}"
            yield from [f"       {advice.setting}"] if advice.setting else []


def _finding(finding: Finding) -> Record:
    """`settings` has the same as `advice`, each in one text."""
    settings = [f"{each.text}: {each.setting}" if each.setting else each.text for each in finding.advice]
    return {**asdict(finding), "settings": settings}
