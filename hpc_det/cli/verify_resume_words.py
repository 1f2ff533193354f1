"""What `hpc-det experiment verify-resume` shows, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hpc_det.cli.output import Output, show
from hpc_det.view.formatting import length_in_words
from hpc_det.view.resume_check.causes import Cause, causes
from hpc_det.view.resume_check.comparison import Comparison, Difference

MOST_SHOWN = 10
"""Values in a list of them."""
_WHERE = {
    "state": "before batch {}",
    "data": "the data of batch {}",
    "metrics": "what train_batch returned at batch {}",
    "training": "the report of training after {} batches",
    "validation": "the validation after {} batches",
}


def show_result(found: Comparison, output: Output) -> None:
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
    """The likeliest first."""
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
