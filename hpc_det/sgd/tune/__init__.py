"""Searches over trials that are TorchTrainers, or anything else that a class of the user's trains in steps.

space      grid_search, choice, uniform, loguniform, randint; asha, adaptive_asha, pbt: which of hpc_det.search
run        tune_run: from what was asked for to an Analysis, which says what came of it
driver     gives trials to slots, and starts those again that died
places     slots of this machine, or jobs of submitit
trial      the process of a trial
files      the run folder
"""

from __future__ import annotations

from hpc_det.sgd.tune.run import Analysis, tune_run
from hpc_det.sgd.tune.space import adaptive_asha, asha, choice, grid_search, loguniform, pbt, randint, uniform
from hpc_det.sgd.tune.trainable import Trainable

__all__ = [
    "Analysis",
    "Trainable",
    "adaptive_asha",
    "asha",
    "choice",
    "grid_search",
    "loguniform",
    "pbt",
    "randint",
    "tune_run",
    "uniform",
]
