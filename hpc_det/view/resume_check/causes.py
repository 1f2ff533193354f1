"""Where a difference probably comes from, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpc_det.store.trace_names import GENERATOR, LOADER, WRAPPED_BY, unwrapped
from hpc_det.view.resume_check.comparison import Comparison, Difference

Kind = Literal[
    "state",  # a value that no checkpoint holds
    "generator",  # a random generator that no checkpoint holds, or that begins anew with another seed
    "module",  # the four objects that a context wraps, and did not
    "optimizer",
    "scheduler",
    "scaler",
    "data",  # the data set, its workers or a sampler
    "not restored",  # the value differs as soon as the checkpoint is loaded
    "nondeterminism",  # the trainings may differ without any stop
    "hidden state",  # what is neither in a checkpoint nor in a value that is compared
]

_IN_A_CHECKPOINT = (
    "make it a buffer of a wrapped model (register_buffer), or keep it in a callback with state_dict and "
    "load_state_dict, which checkpoints hold"
)
_DETERMINISTIC = (
    "draw from seeded generators alone; call torch.use_deterministic_algorithms(True) in the trial's __init__, on a "
    "GPU with CUBLAS_WORKSPACE_CONFIG=:4096:8 in environment.environment_variables"
)
_SEEDED = (
    "seed every generator of the data set and of its workers from the trial's seed (context.get_trial_seed()), or draw "
    "from the generators of torch, numpy and random, which are seeded for each worker"
)
_STOPS_0 = "`--stops 0` shows whether trainings differ without any stop"


@dataclass(frozen=True)
class Cause:
    kind: Kind
    name: str | None
    """The value that is lost or differs; None where it is not known."""
    what: str
    remedy: str


def causes(found: Comparison) -> list[Cause]:
    """The likeliest first. Where the trainings are the same: the lost state that had no effect."""
    if found.is_identical:
        return _each_once(found.lost)
    first = found.first[0]
    resumed = max((batch for batch in found.resumes if batch <= first.batch), default=None)
    if resumed is None:
        return [_before_any_stop(found, first)]
    if first.part == "state" and first.batch == resumed:
        return [_not_restored(first)]
    lost = _each_once(each for each in found.lost if each.batch <= first.batch)
    if first.part == "data":
        return [cause for cause in lost if LOADER in str(cause.name)] or [_lost_by_data(), *lost]
    return lost or list(_unknown(first, resumed))


def _each_once(lost: Iterable[Difference]) -> list[Cause]:
    return list(dict.fromkeys(map(_of_lost, lost)))


def _of_lost(lost: Difference) -> Cause:
    for kind, method in WRAPPED_BY.items():
        name, is_unwrapped, _ = lost.name.partition(f" {unwrapped(kind)}")
        if is_unwrapped:
            return Cause(kind, name, f"{name}: an unwrapped {kind}", f"wrap it with context.{method}")  # type: ignore[arg-type]
    if (lost.undisturbed or "").startswith(GENERATOR):
        remedy = f"draw from torch's own generator, which checkpoints hold, or {_IN_A_CHECKPOINT}"
        return Cause("generator", lost.name, f"{lost.name}: a random generator that no checkpoint holds", remedy)
    return Cause("state", lost.name, f"{lost.name}: state that no checkpoint holds", _IN_A_CHECKPOINT)


def _not_restored(first: Difference) -> Cause:
    return Cause(
        "not restored",
        first.name,
        f"{first.name}: differs as soon as the checkpoint is loaded",
        "give a buffer persistent=True; let hooks such as on_training_start neither draw nor change it after a resume",
    )


def _lost_by_data() -> Cause:
    what = "the data set, its workers or a sampler have a state or a generator that a resume loses"
    return Cause("data", None, what, _SEEDED)


def _unknown(first: Difference, resumed: int) -> Iterator[Cause]:
    """The state after a batch is the next one's."""
    hidden = Cause(
        "hidden state",
        None,
        "the trial computes with something that is neither in a checkpoint nor in an attribute, such as a file or an "
        "iterator",
        f"{_IN_A_CHECKPOINT}; {_STOPS_0}",
    )
    kernel = _nondeterminism(f"{_DETERMINISTIC}; {_STOPS_0}")
    is_at_once = first.batch - (first.part == "state") <= resumed
    yield from (hidden, kernel) if is_at_once else (kernel, hidden)


def _before_any_stop(found: Comparison, first: Difference) -> Cause:
    for each in found.unlike:
        if (each.undisturbed or "").startswith(GENERATOR):
            return Cause("generator", each.name, f"{each.name}: a generator with another seed in each run", _SEEDED)
    if first.part == "data":
        what = "the data differ without any stop: an unseeded worker, or data read in no fixed order"
        return Cause("data", None, what, _SEEDED)
    if any(each.name.startswith("generators") for each in found.first):
        what = "the trial draws more random numbers in one training than in the other"
        return Cause("nondeterminism", None, what, "find what it draws that depends on time or on the machine")
    return _nondeterminism(_DETERMINISTIC)


def _nondeterminism(remedy: str) -> Cause:
    return Cause(
        "nondeterminism", None, "a kernel that is not deterministic, or a random source without a seed", remedy
    )
