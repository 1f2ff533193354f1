"""How often hooks of a callback are called, as Determined's test of its PyTorch trials counts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpc_det.pytorch import Batch
from tests.conformance.row import Row

TRIALS = "harness/tests/experiment/pytorch/test_pytorch_trial.py"
BATCHES = 16
"""Two epochs of eight batches."""


@dataclass(frozen=True, kw_only=True)
class Calls(Row):
    """A training of two epochs that reports once at its end, with these options of `fit`."""

    options: dict[str, Any] = field(default_factory=dict)
    validations: int
    checkpoints: int
    reports: int
    """Calls of on_training_workload_end."""


FIRST = "one more checkpoint, before the last validation, so that a validation that fails does not lose the training"

ROWS = [
    Calls(case="hooks without periods", follows=TRIALS, differs=FIRST, validations=1, checkpoints=2, reports=1),
    Calls(
        case="hooks with a validation after each half",
        follows=TRIALS,
        differs=FIRST,
        options={"validation_period": Batch(BATCHES // 2)},
        validations=2,
        checkpoints=3,
        reports=2,
    ),
    Calls(
        case="hooks with a checkpoint after each half",
        follows=TRIALS,
        differs=FIRST,
        options={"checkpoint_period": Batch(BATCHES // 2)},
        validations=1,
        checkpoints=3,
        reports=2,
    ),
    Calls(
        case="hooks with a report after each quarter",
        follows=TRIALS,
        differs=FIRST,
        options={"reporting_period": Batch(BATCHES // 4)},
        validations=1,
        checkpoints=2,
        reports=4,
    ),
]
