"""The probable causes of a difference between two short trainings, and their remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpc_det.store.trace_names import GENERATOR, LOADER, WRAPPED_BY, unwrapped
from hpc_det.view.resume_check import Comparison, Difference

Kind = Literal[
    "state",  # a value that no checkpoint holds
    "generator",  # a random generator that no checkpoint holds, or that begins anew with another seed
    "module",  # this and the next three: an object that the trial did not wrap with its context
    "optimizer",
    "scheduler",
    "scaler",
    "data",  # the data set, its workers or a sampler
    "not restored",  # the value differs as soon as the checkpoint is loaded
    "nondeterminism",  # the trainings may differ without any stop
    "hidden state",  # what is neither in a checkpoint nor in a value that is compared
]

_STOPS_0 = "`--stops 0` shows whether trainings differ without any stop"


@dataclass(frozen=True, kw_only=True)
class _Words:
    """The words for the parts of a training in remedies."""

    program: str
    """What the user has written."""
    in_a_checkpoint: str
    """How to save a value."""
    deterministic_in: str
    """Where to make torch deterministic."""
    seed: str
    draws: str
    """Where a draw is not repeated."""

    @property
    def deterministic(self) -> str:
        return (
            f"draw from seeded generators alone; call torch.use_deterministic_algorithms(True) "
            f"{self.deterministic_in}, on a GPU with CUBLAS_WORKSPACE_CONFIG=:4096:8 in "
            f"environment.environment_variables"
        )

    @property
    def seeded(self) -> str:
        return (
            f"seed every generator of the data set and of its workers from the trial's seed ({self.seed}), or draw "
            f"from the generators of torch, numpy and random, which are seeded for each worker"
        )


_OF_TRIAL = _Words(
    program="the trial",
    in_a_checkpoint="make it a buffer of a wrapped model (register_buffer), or keep it in a callback with state_dict "
    "and load_state_dict, which checkpoints hold",
    deterministic_in="in the trial's __init__",
    seed="context.get_trial_seed()",
    draws="let hooks such as on_training_start neither draw nor change it after a resume",
)
_OF_SCRIPT = _Words(
    program="the loop",
    in_a_checkpoint="pass it to core.track: an object with state_dict and load_state_dict, or a dict that contains it",
    deterministic_in="at the beginning of the script",
    seed="core.info.trial_seed",
    draws="create objects that change it, as a scheduler changes its optimizer, before core.track; a loop without "
    "core.batches calls core.restore_generators() after it has fetched its first batch",
)


@dataclass(frozen=True)
class Cause:
    """The probable cause of a difference, and its remedy."""

    kind: Kind
    name: str | None
    """Name of the value that is lost or differs; None if unknown."""
    what: str
    remedy: str


def causes(found: Comparison) -> list[Cause]:
    """Return the causes, the most probable first; for equal trainings, the state that was lost without an effect."""
    words = _OF_SCRIPT if found.is_script else _OF_TRIAL
    if found.is_identical:
        return _each_once(found.lost, words)
    first = found.first[0]
    resumed = max((batch for batch in found.resumes if batch <= first.batch), default=None)
    if resumed is None:
        return [_before_any_stop(found, first, words)]
    lost = _each_once((each for each in found.lost if each.batch <= first.batch), words)
    if first.part == "state" and first.batch == resumed:
        # an untracked scheduler, when it is created, changes the optimizer that was restored
        return [*(cause for cause in lost if found.is_script and cause.kind in WRAPPED_BY), _not_restored(first, words)]
    if first.part == "data":
        return [cause for cause in lost if LOADER in str(cause.name)] or [_lost_by_data(words), *lost]
    return lost or list(_unknown(first, resumed, words))


def _each_once(lost: Iterable[Difference], words: _Words) -> list[Cause]:
    return list(dict.fromkeys(_of_lost(each, words) for each in lost))


def _of_lost(lost: Difference, words: _Words) -> Cause:
    for kind, method in WRAPPED_BY.items():
        name, is_unwrapped, _ = lost.name.partition(f" {unwrapped(kind)}")
        if is_unwrapped:
            what, remedy = f"{name}: an unwrapped {kind}", f"wrap it with context.{method}"
            if words is _OF_SCRIPT:
                what, remedy = f"{name}: an untracked {kind}", f"pass it to core.track({kind}=...)"
            return Cause(kind, name, what, remedy)  # type: ignore[arg-type]
    if (lost.undisturbed or "").startswith(GENERATOR):
        remedy = f"draw from torch's own generator, which checkpoints hold, or {words.in_a_checkpoint}"
        return Cause("generator", lost.name, f"{lost.name}: a random generator that no checkpoint holds", remedy)
    return Cause("state", lost.name, f"{lost.name}: state that no checkpoint holds", words.in_a_checkpoint)


def _not_restored(first: Difference, words: _Words) -> Cause:
    return Cause(
        "not restored",
        first.name,
        f"{first.name}: differs as soon as the checkpoint is loaded",
        f"give a buffer persistent=True; {words.draws}",
    )


def _lost_by_data(words: _Words) -> Cause:
    what = "the data set, its workers or a sampler have a state or a generator that a resume loses"
    return Cause("data", None, what, words.seeded)


def _unknown(first: Difference, resumed: int, words: _Words) -> Iterator[Cause]:
    """Yield the possible causes of a difference after the resume at batch `resumed`, the more probable first."""
    hidden = Cause(
        "hidden state",
        None,
        f"{words.program} computes with something that is neither in a checkpoint nor in an attribute or variable, "
        f"such as a file or an iterator",
        f"{words.in_a_checkpoint}; {_STOPS_0}",
    )
    kernel = _nondeterminism(f"{words.deterministic}; {_STOPS_0}")
    # state is recorded before a batch, so a difference in it arose in the batch before
    is_at_once = first.batch - (first.part == "state") <= resumed
    yield from (hidden, kernel) if is_at_once else (kernel, hidden)


def _before_any_stop(found: Comparison, first: Difference, words: _Words) -> Cause:
    for each in found.unlike:
        if (each.undisturbed or "").startswith(GENERATOR):
            what = f"{each.name}: a generator with another seed in each run"
            return Cause("generator", each.name, what, words.seeded)
    if first.part == "data":
        what = "the data differ without any stop: an unseeded worker, or data read in no fixed order"
        return Cause("data", None, what, words.seeded)
    if any(each.name.startswith("generators") for each in found.first):
        what = f"{words.program} draws more random numbers in one training than in the other"
        return Cause("nondeterminism", None, what, "find what it draws that depends on time or on the machine")
    return _nondeterminism(words.deterministic)


def _nondeterminism(remedy: str) -> Cause:
    return Cause(
        "nondeterminism", None, "a kernel that is not deterministic, or a random source without a seed", remedy
    )
