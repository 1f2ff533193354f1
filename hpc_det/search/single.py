"""The `single` searcher: one trial with the constant hyperparameters of the experiment."""

from __future__ import annotations

import hashlib


def trial_seed(experiment_seed: int, trial_id: int) -> int:
    """0 .. 2**31-1, a pure function, so that running an experiment again gives the same trials."""
    digest = hashlib.sha256(f"{experiment_seed}/{trial_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
