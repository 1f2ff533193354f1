"""Hyperparameter searches over TorchTrainers, or over any Trainable class of the user.

space      ranges (grid_search, choice, uniform, loguniform, randint) and searchers (asha, adaptive_asha, pbt)
draws      sample_from, for values that functions draw
run        tune_run, and Analysis, its result
trainable  Trainable, the class that is trained, and the one that TorchTrainer.as_trainable returns
driver     assigns trials to slots, and restarts trials whose process died
table      the progress of the trials on stdout
places     the processes of trials: on this machine, or as jobs
trial      the main program of a trial's process
files      the run folder
"""

from __future__ import annotations

from hpc_det.sgd.tune.draws import sample_from
from hpc_det.sgd.tune.run import Analysis, tune_run
from hpc_det.sgd.tune.space import (
    adaptive_asha,
    asha,
    choice,
    grid_search,
    loguniform,
    pbt,
    randint,
    uniform,
)
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
    "sample_from",
    "tune_run",
    "uniform",
]
