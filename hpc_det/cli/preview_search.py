"""hpc-det preview-search: show the trials of a search without running them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from hpc_det.cli.arguments import request_options
from hpc_det.cli.output import Output, output_options
from hpc_det.client.creation import say_notes
from hpc_det.config.request import Request
from hpc_det.errors import UsageError, count, length_in_words
from hpc_det.plan.effective import effective
from hpc_det.search.by_name import search_of
from hpc_det.search.custom import CustomSearch
from hpc_det.search.method import SearchMethod
from hpc_det.search.sample import Sample
from hpc_det.search.simulate import at_random, simulate
from hpc_det.view.formatting import setting

SHOWN_TRIALS = 5  # the first trials, whose hyperparameters are shown


@click.command("preview-search")
@request_options
@output_options
def preview_search(request: Request, output: Output) -> None:
    """Show what the search of an experiment would train.

    CONFIG and CONTEXT_DIR are checked as by `experiment create`; nothing is created. A search that depends on the
    metric is simulated with random values, so its numbers are those of one possible run.

    \b
    Example:
      hpc-det preview-search digits.yaml --config searcher.max_trials=64 --json
      {"searcher": "adaptive_asha", "trials": 64, "concurrent": 16,
       "unit": "batches", "lengths": [{"length": 100, "trials": 50}, ...],
       "total": 12300, "full_trials": 13.67, "experiment_seed": 7,
       "first": [{"trial": 1, "hparams": {"lr": 0.01}, "seed": 183393}]}
    `full_trials` is `total` divided by the length of a full trial. If the search
    has no max_length, `unit`, `length`, `total` and `full_trials` are null. If
    hyperparameters are chosen only when a worker takes a trial, `first` is empty.
    """
    found = effective(request)
    say_notes(found)
    tree = found.tree
    seed = tree["reproducibility"]["experiment_seed"]
    record = previewed(tree["searcher"], tree["hyperparameters"], seed, found.searchers_code())
    if output.is_for_people:
        click.echo(in_words(record))
    else:
        output.details([record])


def previewed(
    searcher: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    experiment_seed: int | None,
    code: Path | None = None,
) -> dict[str, Any]:
    """Return the record that `preview-search --json` prints, from parts of an effective configuration.

    An `experiment_seed` of None counts as 0. Raises UsageError if the user's own search method in the folder `code` is
    broken.
    """
    parts = {"searcher": searcher, "hyperparameters": hyperparameters}
    method, samples = search_of({**parts, "reproducibility": {"experiment_seed": experiment_seed}}, [], code)
    concurrent = min(searcher.get("max_concurrent_trials") or method.trials_expected, method.trials_expected)
    _refuse_broken(method)
    lengths = Counter(simulate(method, at_random(), workers=concurrent).reached.values())
    _refuse_broken(method)  # again: a user's method may fail during the simulation
    is_chosen_later = searcher["name"] == "optuna" or (isinstance(method, CustomSearch) and method.chooses)
    shown = 0 if is_chosen_later else SHOWN_TRIALS
    # max_length has one key, its unit
    unit, full = next(iter((searcher.get("max_length") or {None: None}).items()))
    total = sum(length * trials for length, trials in lengths.items() if length)
    return {
        "searcher": searcher["name"],
        "trials": method.trials_expected,
        "concurrent": concurrent,
        "unit": unit,
        "lengths": [{"length": length, "trials": lengths[length]} for length in sorted(lengths, key=lambda x: x or 0)],
        "total": total if unit else None,
        "full_trials": round(total / full, 2) if full else None,
        "experiment_seed": experiment_seed,
        "first": [_trial(trial, samples.sample(trial)) for trial in range(1, method.trials_expected + 1)[:shown]],
    }


def _refuse_broken(method: SearchMethod) -> None:
    """Raise UsageError if the user's own search method has failed."""
    if isinstance(method, CustomSearch) and method.problem:
        raise UsageError(method.problem)


def _trial(trial: int, sample: Sample) -> dict[str, Any]:
    return {"trial": trial, "hparams": sample.hparams, "seed": sample.seed}


def in_words(record: Mapping[str, Any]) -> str:
    """Return the record as text for people."""
    return "\n".join([*_training(record), "", *_first_trials(record)])


def _training(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"{record['searcher']}: {count(record['trials'], 'trial')}, at most {record['concurrent']} at a time"
    for row in record["lengths"]:
        length = length_in_words(row["length"], record["unit"]) if record["unit"] else "their own end"
        yield f"  {count(row['trials'], 'trial')} to {length}"
    if record["unit"]:
        in_all = length_in_words(record["total"], record["unit"])
        yield f"In all {in_all}, {record['full_trials']:g} times a full trial."


def _first_trials(record: Mapping[str, Any]) -> Iterator[str]:
    if not record["first"]:
        yield "The hyperparameters of a trial are chosen when a worker takes it."
        return
    if record["experiment_seed"] is None:
        yield "Hyperparameters with reproducibility.experiment_seed 0; if unset, the time of submission is the seed:"
    else:
        yield f"Hyperparameters with reproducibility.experiment_seed {record['experiment_seed']}:"
    for row in record["first"]:
        yield f"  trial {row['trial']}: {setting(row['hparams'])}"
    if record["trials"] > len(record["first"]):
        yield "  ..."
