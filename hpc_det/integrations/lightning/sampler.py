"""A sampler whose passes can be resumed in the middle."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpc_det.core import Core
from hpc_det.errors import UsageError

ENTRY = "hpc_det.lightning"
"""Our entry in metadata.json, with the position in the pass, and in Lightning's checkpoint."""


class ResumableSampler(DistributedSampler[int]):
    """This rank's share of the records, in an order that depends on the trial's seed and the pass alone.

    After a resume in the middle of a pass it omits the records that are done. Lightning leaves it as it is.
    """

    def __init__(self, core: Core, dataset: Dataset[Any], *, shuffle: bool = True, drop_last: bool = False) -> None:
        gang = core.distributed
        super().__init__(dataset, gang.size, gang.rank, shuffle, core.info.trial_seed, drop_last)
        # Lightning makes an iterator before it calls set_epoch, so the pass is set here.
        position = _position(core.latest_checkpoint)
        self.epoch = self._resumed = position.get("epoch", 0)
        self._done: int = position.get("records", 0)

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        return iter(order[self._done :] if self.epoch == self._resumed else order)


def resumable_batch_size(trainer: Trainer, core: Core) -> int:
    """Return the batch size of the training loader, if it has a ResumableSampler; else print a note and return 0.

    Raises UsageError for a loader that saves its position itself, which is one batch ahead.
    """
    loaders = trainer.train_dataloader
    loader = loaders[0] if isinstance(loaders, list | tuple) and len(loaders) == 1 else loaders
    if hasattr(loader, "state_dict"):
        raise UsageError(
            f"lightning: {type(loader).__name__} saves its own position; use torch's DataLoader with "
            f"sampler=ResumableSampler(core, dataset)"
        )
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, ResumableSampler) and loader.batch_size:
        return int(loader.batch_size)
    if core.distributed.is_chief:
        print(
            "hpc-det: lightning: a pass that is resumed in the middle trains other records than the rest of the pass; "
            "use one DataLoader with sampler=ResumableSampler(core, dataset)",
            file=sys.stderr,
            flush=True,
        )
    return 0


def hide_warning_of_resume() -> None:
    """Ignore Lightning's warning that a loader cannot be resumed, since it checks only whether it has a state_dict."""
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")


def _position(checkpoint: Path | None) -> dict[str, int]:
    """Return the pass and the records of this rank that are done in it; {} without a checkpoint of the callback."""
    path = checkpoint and checkpoint / "metadata.json"
    return dict(json.loads(path.read_text(encoding="utf-8")).get(ENTRY, {})) if path and path.exists() else {}
