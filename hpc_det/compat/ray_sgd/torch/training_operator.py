"""`ray.util.sgd.torch.training_operator`."""

from __future__ import annotations

from hpc_det.sgd.operator.creators import CreatorSetup as CreatorOperator
from hpc_det.sgd.operator.training_operator import (
    TrainingOperator,
    get_test_metrics_operator,
    get_test_operator,
)

__all__ = ["CreatorOperator", "TrainingOperator", "get_test_metrics_operator", "get_test_operator"]
