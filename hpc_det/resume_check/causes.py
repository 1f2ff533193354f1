"""Where a difference probably comes from, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_det.resume_check.comparison import Comparison, Difference

GENERATOR = "generator at"
"""How the text of a random generator begins."""
OPTIMIZER, MODULE = "(an optimizer that is not wrapped)", "(a module that is not wrapped)"
"""In the names of values that are in such an object."""

_IN_A_CHECKPOINT = (
    "make it a buffer of a wrapped model (register_buffer), or keep it in a callback with state_dict and "
    "load_state_dict, which checkpoints hold"
)
_KERNEL = "a kernel that is not deterministic, or a random source without a seed"
_DETERMINISTIC = (
    "draw from seeded generators alone; call torch.use_deterministic_algorithms(True) in the trial's __init__, on a "
    "GPU with CUBLAS_WORKSPACE_CONFIG=:4096:8 in environment.environment_variables"
)
_SOURCE = (
    "seed every generator of the data set and of its workers from the trial's seed (context.get_trial_seed()), or draw "
    "from the generators of torch, numpy and random, which are seeded for each worker"
)


@dataclass(frozen=True)
class Cause:
    what: str
    remedy: str


def causes(found: Comparison) -> list[Cause]:
    """The likeliest first; none where the trainings are the same. Lost state is named even where it had no effect."""
    named = list(dict.fromkeys(map(_of_lost, found.lost)))
    if named or found.is_identical:
        return named
    return [_of_difference(found, found.first[0])]


def _of_lost(lost: Difference) -> Cause:
    name = lost.name
    if OPTIMIZER in name:
        owner = name.partition(OPTIMIZER)[0].strip()
        return Cause(f"{owner}: an optimizer that no checkpoint holds", "wrap it with context.wrap_optimizer")
    if MODULE in name:
        owner = name.partition(MODULE)[0].strip()
        return Cause(f"{owner}: a module that no checkpoint holds", "wrap it with context.wrap_model")
    kind = "a random generator" if (lost.undisturbed or "").startswith(GENERATOR) else "state"
    remedy = "draw from torch's own generator, which checkpoints hold, or " if kind != "state" else ""
    return Cause(f"{name}: {kind} that no checkpoint holds", f"{remedy}{_IN_A_CHECKPOINT}")


def _of_difference(found: Comparison, first: Difference) -> Cause:
    resumed = max((batch for batch in found.resumes if batch <= first.batch), default=None)
    if resumed is None:
        return _before_any_stop(found, first)
    if first.part == "data":
        return Cause("the data set, its workers or a sampler have a state or a generator that a resume loses", _SOURCE)
    if resumed != first.batch:
        return Cause(_KERNEL, f"{_DETERMINISTIC}; `--stops 0` shows whether that is it")
    if first.part == "state":
        return Cause(f"{first.name}: the checkpoint does not restore it", "see what on_checkpoint_load_start changes")
    return Cause(
        "the trial computes with something that is in no checkpoint and no attribute, such as a closure or a file",
        f"{_IN_A_CHECKPOINT}; `--stops 0` shows whether it is a kernel that is not deterministic",
    )


def _before_any_stop(found: Comparison, first: Difference) -> Cause:
    """Two trainings differ without any stop."""
    for each in _generators(found):
        return Cause(f"{each.name}: a generator with another seed in each run", _SOURCE)
    if first.part == "data":
        return Cause("the data differ without any stop: an unseeded worker, or data read in no fixed order", _SOURCE)
    if any(each.name.startswith("generators") for each in found.first):
        return Cause("the trial draws more random numbers in one run than in the other", "see what depends on time")
    return Cause(_KERNEL, _DETERMINISTIC)


def _generators(found: Comparison) -> Iterator[Difference]:
    return (each for each in found.unlike if (each.undisturbed or "").startswith(GENERATOR))
