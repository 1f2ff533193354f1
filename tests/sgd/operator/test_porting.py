from __future__ import annotations

import socket

from hpc_det.sgd.operator.porting import find_free_port, override
from hpc_det.sgd.operator.training_operator import TrainingOperator
from tests.facts import refused


def test_override_marks_a_method_and_refuses_a_name_that_overrides_nothing() -> None:
    def train_batch() -> int:
        return 3

    def train_bach() -> int:
        return 3

    assert override(TrainingOperator)(train_batch) is train_batch
    with refused(ValueError, "train_bach", "TrainingOperator"):
        override(TrainingOperator)(train_bach)


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("", find_free_port())) as server:
        assert server.getsockname()[1] > 0
