"""What a checkpoint of a PyTorchTrial holds, and how it comes back.

state_dict.pth    models_state_dict, optimizers_state_dict, lr_schedulers_state_dict, callbacks    rank 0
progress.pth      batches, position, validation state                                              rank 0
rank-R.pth        random generators and the open metrics window of rank R                          each rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_det.core.checkpoint import load
from hpc_det.core.rng import restore_rng, rng_state
from hpc_det.errors import HpcDetError
from hpc_det.pytorch.callback import PyTorchCallback
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import Position

STATE_DICT = "state_dict.pth"
PROGRESS = "progress.pth"


@dataclass
class Progress:
    """Where the trial is. The same on every rank."""

    steps: int = 0
    """Batches trained."""
    position: Position = field(default_factory=Position)
    validated: int = -1
    """Batches at the last validation."""
    best: float | None = None
    """The best value of the searcher metric so far."""
    stop_requested: bool = False
    """By the trial: a stop in the last validation must not make it train on."""


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pth"


def model_state(context: PyTorchTrialContext, callbacks: Mapping[str, PyTorchCallback]) -> dict[str, Any]:
    """The four keys that the PyTorch API guide promises."""
    return {
        "models_state_dict": [model.state_dict() for model in context.models],
        "optimizers_state_dict": [optimizer.state_dict() for optimizer in context.optimizers],
        "lr_schedulers_state_dict": [step.scheduler.state_dict() for step in context.scheduled_steps],
        "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
    }


def restore_models(folder: Path, context: PyTorchTrialContext, callbacks: Mapping[str, PyTorchCallback]) -> None:
    """Raises HpcDetError where the trial no longer wraps as many objects as it did."""
    state = load(folder / STATE_DICT)
    schedulers = [step.scheduler for step in context.scheduled_steps]
    owners: dict[str, list[Any]] = {
        "models_state_dict": context.models,
        "optimizers_state_dict": context.optimizers,
        "lr_schedulers_state_dict": schedulers,
    }
    problems = [
        f"{folder / STATE_DICT}: {key} holds {len(state[key])}, the trial wraps {len(objects)}"
        for key, objects in owners.items()
        if len(state[key]) != len(objects)
    ]
    if problems:
        raise HpcDetError(problems)
    for key, objects in owners.items():
        for owner, content in zip(objects, state[key], strict=True):
            owner.load_state_dict(content)
    for name, callback in callbacks.items():
        if name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][name])


def progress_state(progress: Progress) -> dict[str, Any]:
    return asdict(progress)


def restored_progress(folder: Path) -> Progress:
    state = load(folder / PROGRESS)
    return Progress(**{**state, "position": Position(**state["position"])})


def rank_state(window: Mapping[str, Any]) -> dict[str, Any]:
    return {"rng": rng_state(), "window": dict(window)}


def restored_rank(folder: Path, rank: int) -> dict[str, Any] | None:
    """The open metrics window, with the generators put back; None for a rank that the saved gang did not have."""
    path = folder / rank_file(rank)
    if not path.exists():
        return None
    state = load(path)
    restore_rng(state["rng"])
    window: dict[str, Any] = state["window"]
    return window
