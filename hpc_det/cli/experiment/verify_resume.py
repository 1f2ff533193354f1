"""hpc-det experiment verify-resume: compare two short trainings, one of them stopped and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from hpc_det.cli.arguments import request_options
from hpc_det.cli.experiment.short_runs import Ended, Series, ShortRuns, effective_of, once
from hpc_det.cli.output import Output, output_options, show
from hpc_det.client.creation import say_notes
from hpc_det.client.lookup import store
from hpc_det.config.merge import Tree
from hpc_det.config.rank_variables import RESUME_CHECK, stops_as_value
from hpc_det.config.request import Request, on_slots
from hpc_det.errors import HpcDetError, UsageError, count, length_in_words
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.short_training import problems, short_training
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.submission import submit
from hpc_det.view.resume_causes import Cause, causes
from hpc_det.view.resume_check import Comparison, Difference, compare


@click.command("verify-resume")
@request_options
@click.option(
    "--batches",
    type=click.IntRange(min=3),
    default=40,
    show_default=True,
    metavar="N",
    help="Length of each training in batches.",
)
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", help="Slots of each training; default: the experiment's own."
)
@click.option(
    "--stops",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Number of stops of the second training; 0 compares two undisturbed trainings.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the stops, and of the experiment if it sets none.",
)
@click.option("--keep", is_flag=True, help="Keep both experiments, not only failed ones.")
@output_options
@click.pass_context
def verify_resume(
    context: click.Context,
    request: Request,
    batches: int,
    ranks: int | None,
    stops: int,
    seed: int,
    keep: bool,
    output: Output,
) -> None:
    """Check that a training resumes bit for bit from its checkpoints.

    Trains a trial class, or a script on hpc_det.core, twice for a few batches: once undisturbed, and once with stops
    after random batches, each followed by a resume from the checkpoint in new processes. Data, metrics, weights,
    optimizer states and random generators are compared bit for bit, for every batch and rank. The first difference is
    shown with its likely cause, such as a generator in a Python attribute or a non-deterministic kernel. The exit code
    is 1 if the trainings differ. Both are separate experiments and are deleted afterwards. See
    docs/how-to/check-exact-resume.md.

    \b
    Example:
      hpc-det experiment verify-resume digits.yaml . --cluster slurm --ranks 2 --stops 5
    """
    found = Check.of(request, batches, ranks, stops, seed).run(keep=keep)
    show_result(found, output)
    context.exit(0 if found.is_identical else 1)


LABEL = "resume-check"
REPORTS = 4  # training reports of each training, and as many validations, the last of each at the end


@dataclass(frozen=True)
class Training:
    """One of the two trainings."""

    title: str
    stops: tuple[int, ...]
    """The numbers of batches after which the training is stopped."""

    def config(self, experiment: Tree, batches: int, seed: int) -> Tree:
        """Return the configuration of the training, made from the experiment's effective configuration."""
        tree = short_training(
            experiment,
            title=self.title,
            label=LABEL,
            batches=batches,
            reports=REPORTS,
            variable=f"{RESUME_CHECK}={stops_as_value(self.stops)}",
        )
        tree["min_validation_period"] = {"batches": max(batches // REPORTS, 1)}
        if tree["reproducibility"]["experiment_seed"] is None:  # both trainings need the same seed
            tree["reproducibility"]["experiment_seed"] = seed
        return tree


@dataclass(frozen=True)
class Trained:
    """A training that has ended."""

    training: Training
    ended: Ended

    @property
    def is_a_result(self) -> bool:
        return self.ended.failure is None

    @property
    def summary(self) -> str:
        return self.ended.failure or "trained"


@dataclass(frozen=True)
class Check:
    """One call of the command."""

    request: Request
    found: Effective
    batches: int
    stops: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, request: Request, batches: int, ranks: int | None, stops: int, seed: int) -> Check:
        """Plan the check; raise UsageError with all problems that prevent it."""
        if ranks is not None:
            request = on_slots(request, ranks)
        wrong = list(_too_many(stops, batches))
        try:
            found = effective(request)
            wrong += problems(found, scripts=True)
        except UsageError as error:
            wrong += error.problems
        if wrong:
            raise UsageError(wrong)
        say_notes(found)
        request = replace(request, cluster=found.profile)
        return cls(request, found, batches, places(batches, stops, seed), seed)

    def run(self, *, keep: bool) -> Comparison:
        """Run both trainings and compare them; raise HpcDetError if one fails or writes no trace."""
        title = f"stopped after {', '.join(map(str, self.stops))} batches" if self.stops else "once more"
        both = [Training("undisturbed", ()), Training(title, self.stops)]
        with ShortRuns[Training, Trained](self._submit, Trained, keep=keep) as runs:
            series = [once(each) for each in both] if self.found.cluster.has_queue else [_in_turn(both)]
            trained = runs.run_all(series, side_by_side=len(both))
            if failed := [each for each in trained if not each.is_a_result]:
                raise HpcDetError([f"{each.training.title}: {each.summary}" for each in failed])
            experiments = {each.training: each.ended.experiment for each in trained}
            compared = compare(*(each.trial() for training in both if (each := experiments[training])))
        if self.stops and not compared.resumes:
            length = length_in_words(compared.batches, "batches")
            raise HpcDetError(
                f"the training of {length} was never stopped: it ended before batch {self.stops[0]}, or its loop "
                f"neither uses core.batches nor calls core.should_stop at each step"
            )
        return compared

    def _submit(self, training: Training) -> ExperimentFolder:
        config = training.config(self.found.tree, self.batches, self.seed)
        return submit(effective_of(self.request, config), store())


def places(batches: int, stops: int, seed: int) -> tuple[int, ...]:
    """Return `stops` different random numbers of batches after which to stop, in ascending order."""
    # from 2 on: after one batch it is not yet known which attributes are the same in each training
    return tuple(sorted(random.Random(seed).sample(range(2, batches), stops)))


def _too_many(stops: int, batches: int) -> Iterator[str]:
    if stops > (most := batches - 2):
        yield (
            f"--stops {stops}: a training of --batches {batches} can be stopped at most {count(most, 'time')}, after "
            f"2 batches or more; give --batches {stops + 2} or more"
        )


def _in_turn(wanted: Sequence[Training]) -> Series[Training, Trained]:
    """Yield the trainings in sequence, and none after a failure: without a queue both would share the same slots."""
    for training in wanted:
        trained = yield training
        if not trained.is_a_result:
            return


MOST_SHOWN = 10  # differences or causes in a list
_WHERE = {
    "state": "before batch {}",
    "data": "the data of batch {}",
    "metrics": "the metrics at batch {}",
    "training": "the report of training after {} batches",
    "validation": "the validation after {} batches",
}


def show_result(found: Comparison, output: Output) -> None:
    """Print the result of the comparison."""
    if output.is_for_people:
        show("\n".join(_in_words(found)))
    else:
        output.details([_record(found)])


def _record(found: Comparison) -> dict[str, Any]:
    return {
        "identical": found.is_identical,
        "batches": found.batches,
        "resumes": list(found.resumes),
        "first_differences": [asdict(each) for each in found.first],
        "not_in_checkpoints": [asdict(each) for each in found.lost],
        "different_from_the_start": [asdict(each) for each in found.unlike],
        "stops_without_checkpoint": [{"stopped": stop, "resumed": resumed} for stop, resumed in found.repeated],
        "causes": [asdict(each) for each in causes(found)],
    }


def _in_words(found: Comparison) -> Iterator[str]:
    trained = length_in_words(found.batches, "batches")
    resumed = f"resumed at batch {', '.join(map(str, found.resumes))}" if found.resumes else "never stopped"
    if found.is_identical:
        yield f"Identical: data, metrics, weights, optimizers and generators of {trained}, {resumed}"
    else:
        first = found.first[0]
        yield f"Different: {trained}, {resumed}"
        yield f"First difference: {_WHERE[first.part].format(first.batch)}"
        yield from _values(found.first)
    for stop, begin in found.repeated:
        yield (
            f"Stopped after batch {stop}, but resumed at batch {begin}: no checkpoint was saved at the stop; pass "
            f"the objects to core.track, or save in core.checkpoint when core.should_stop() is true"
        )
    if found.lost:
        effect = ", with no effect on these batches" if found.is_identical else ""
        yield f"Lost by a resume, since no checkpoint holds it{effect}:"
        yield from _values(found.lost)
    if found.unlike and not found.is_identical and not found.lost:
        yield "Different from the start, before any stop:"
        yield from _values(found.unlike)
    for remedy, named in _by_remedy(causes(found)).items():
        if not found.is_identical:
            yield from (f"Likely cause: {cause.what}" for cause in named[:MOST_SHOWN])
        yield f"  try: {remedy}"


def _by_remedy(found: Sequence[Cause]) -> dict[str, list[Cause]]:
    """Return the causes, keyed by remedy, in the order of their likelihood."""
    grouped: dict[str, list[Cause]] = {}
    for cause in found:
        grouped.setdefault(cause.remedy, []).append(cause)
    return grouped


def _values(differences: Sequence[Difference]) -> Iterator[str]:
    for each in differences[:MOST_SHOWN]:
        rank = "" if each.rank is None else f", rank {each.rank}"
        was, now = (value if value is not None else "absent" for value in (each.undisturbed, each.stopped))
        yield f"  {each.name or 'the batch'}{rank}: {was} undisturbed, {now} after stops"
    if len(differences) > MOST_SHOWN:
        yield f"  and {len(differences) - MOST_SHOWN} more (--json has all)"
