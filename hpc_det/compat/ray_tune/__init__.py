"""`ray.tune`, as far as programs for RaySGD use it: searches over trainers, by hpc_det.sgd.tune.

tune               run, the search
sample             ranges of hyperparameters
schedulers         ASHAScheduler, PopulationBasedTraining and FIFOScheduler
analysis           ExperimentAnalysis, the results
progress_reporter  CLIReporter, the table of results
callback           Callback, whose subclasses are not called
helpers            ray.tune.utils: functions for dicts, and the callbacks of Ray's own examples
error, logger, trainable, suggest
"""

from __future__ import annotations

from hpc_det.compat.ray_tune import schedulers
from hpc_det.compat.ray_tune.analysis import Analysis, ExperimentAnalysis
from hpc_det.compat.ray_tune.callback import Callback
from hpc_det.compat.ray_tune.error import TuneError
from hpc_det.compat.ray_tune.progress_reporter import CLIReporter, JupyterNotebookReporter, ProgressReporter
from hpc_det.compat.ray_tune.sample import (
    choice,
    function,
    grid_search,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from hpc_det.compat.ray_tune.schedulers import create_scheduler
from hpc_det.compat.ray_tune.tune import run
from hpc_det.sgd.tune import Trainable

__all__ = [
    "Analysis",
    "CLIReporter",
    "Callback",
    "ExperimentAnalysis",
    "JupyterNotebookReporter",
    "ProgressReporter",
    "Trainable",
    "TuneError",
    "choice",
    "create_scheduler",
    "function",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "run",
    "sample_from",
    "schedulers",
    "uniform",
]
