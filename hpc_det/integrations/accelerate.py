"""Accelerate: what `Accelerator.prepare` returned, saved and resumed by hpc_det.

with hpc_det.core.init() as core:
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    track(core, accelerator)
    for epoch in core.epochs(10):
        for batch in core.batches(loader):
            ...
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from hpc_det.core import Core
from hpc_det.errors import UsageError, count

_IN_PARTS = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
}
"""Strategies whose state is no state_dict."""


class _Steps:
    """The accelerator's count of batches, which determines when gradients are synchronized."""

    def __init__(self, core: Core, accelerator: Accelerator) -> None:
        self._core = core
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        accelerator = self._accelerator
        return {"step": accelerator.step, "accumulated": accelerator.step % accelerator.gradient_accumulation_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
        if (lost := state.get("accumulated")) and self._core.distributed.is_chief:
            print(
                f"hpc-det: warning: accelerate: the checkpoint at batch {self._core.step} is in the middle of an "
                f"optimizer step, and the gradients of its first {count(lost, 'batch')} are lost; use "
                "core.batches(loader, accumulate=accelerator.gradient_accumulation_steps)",
                file=sys.stderr,
                flush=True,
            )


def track(core: Core, accelerator: Accelerator) -> None:
    """Save everything that `accelerator` has prepared with every checkpoint, and restore it now if this run resumes.

    These are the models, optimizers, schedulers, the scaler of mixed precision, and the objects of
    `register_for_checkpointing`. Call it once, after the last `prepare`. Loaders need no call: `core.batches` restores
    their position.

    With gradient accumulation, `core.batches` needs `accumulate`. Otherwise a checkpoint may be saved in the middle of
    an optimizer step, and a resume loses its gradients, with a warning.

    Raises UsageError if nothing is prepared, for ranks that are not those of the run, and for DeepSpeed, FSDP version 1
    and Megatron-LM, whose state only `Accelerator.save_state` can save.
    """
    _check(core, accelerator)
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    kinds = {"model": models, "optimizer": accelerator._optimizers, "scheduler": accelerator._schedulers}
    objects = _named({**kinds, "custom": accelerator._custom_objects})
    if not objects:
        raise UsageError("accelerate: nothing is prepared; call track after accelerator.prepare(model, optimizer, ...)")
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    core.track(**objects, accelerator=_Steps(core, accelerator))


def _named(kinds: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the objects of each kind by name: model, model_1, ..."""
    return {
        f"{kind}_{number}" if number else kind: each
        for kind, objects in kinds.items()
        for number, each in enumerate(objects)
    }


def _check(core: Core, accelerator: Accelerator) -> None:
    ours = core.distributed
    if (accelerator.process_index, accelerator.num_processes) != (ours.rank, ours.size):
        raise UsageError(
            f"accelerate: the Accelerator has rank {accelerator.process_index} of {accelerator.num_processes}, but the "
            f"run has rank {ours.rank} of {ours.size}; create it inside the block of core.init"
        )
    kind = accelerator.distributed_type
    name = _IN_PARTS.get(kind)
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        name = "FSDP version 1"
    if name:
        raise UsageError(
            f"accelerate: the state of {name} is saved by accelerator.save_state alone; call it in core.checkpoint, "
            f"see docs/how-to/accelerate.md"
        )
