"""The random number generators of a rank: Python's, numpy's, torch's, the GPU's, as tensors, to load without pickle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """`seed`: 0 .. 2**32-1 (numpy's range)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Everything `restore_rng` needs, as tensors and numbers (loadable with weights_only=True)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937"
    assert version == 3
    state: dict[str, Any] = {
        "python": {"words": torch.from_numpy(np.array(words, dtype=np.int64)), "gauss": gauss},
        "numpy": {
            "keys": torch.tensor(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """After the block they are as before it, whatever was drawn within."""
    before = rng_state()
    yield
    restore_rng(before)


def restore_rng(state: dict[str, Any]) -> None:
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((3, tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    position, has_gauss, cached = numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
