"""`ray.tune.utils.release_test_util`: a callback of the same example."""

from __future__ import annotations

from hpc_det.compat.ray_tune.callback import Callback


class ProgressCallback(Callback):
    """Writes the states of trials to a file, in Ray. Here the run folder of the search contains them."""
