"""The state of a trial's models in a checkpoint's folder: ours or Determined's.

Files are read without unpickling anything but tensors, numbers, texts and plain containers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from hpc_det.checkpoint.content import read
from hpc_det.checkpoint.page_cache import is_in_memory
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch.state.state import STATE_DICT

PLACES = (STATE_DICT, f"determined/{STATE_DICT}", f"pedl/{STATE_DICT}", "checkpoint.pt")
"""Where the state is, ours and Determined's through the years."""
_DDP_PREFIX = "module."


def stored_state(folder: Path, models: Sequence[torch.nn.Module] = (), **options: Any) -> dict[str, Any]:
    """The content of a checkpoint's state_dict.pth, at any of its places, with the four keys of the API guide.

    Fitted to `models`: Determined stored those of several slots with DDP's "module." before each name.

    `options` are torch.load's `map_location` and `mmap`. Without the second, the file is mapped where it is in memory
    anyway, as after CheckpointContext.newest: all ranks of a node share that. So keep copies of tensors alone.

    Raises UsageError where there is no such file, HpcDetError for one that is damaged, holds objects, or is none.
    """
    file = state_file(folder)
    state = read(file, **{"mmap": is_zipfile(file) and is_in_memory(file), **options})
    if not isinstance(state, dict) or "models_state_dict" not in state:
        raise HpcDetError(f"{file}: has no models_state_dict, so it is not the state of a PyTorchTrial")
    stored = state["models_state_dict"]
    fitted = [_without_prefix(content, model) for content, model in zip(stored, models, strict=False)]
    return {
        "optimizers_state_dict": [],
        "lr_schedulers_state_dict": [],
        "callbacks": {},
        **state,
        "models_state_dict": [*fitted, *stored[len(fitted) :]],
    }


def state_file(folder: Path) -> Path:
    found = next((folder / place for place in PLACES if (folder / place).is_file()), None)
    if found is None:
        raise UsageError(f"{folder}: none of {', '.join(PLACES)} is there; name the folder of a checkpoint")
    return found


def _without_prefix(content: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A model may have a child called `module` itself."""
    if content.keys() != model.state_dict().keys() and all(name.startswith(_DDP_PREFIX) for name in content):
        consume_prefix_in_state_dict_if_present(content, _DDP_PREFIX)
    return content
