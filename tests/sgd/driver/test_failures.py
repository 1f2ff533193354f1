"""Whose failure it is that a rank tells of."""

from __future__ import annotations

import pytest

from hpc_det.sgd.driver.failures import Raised, is_of_the_gang


@pytest.mark.parametrize(
    ("said", "is_its"),
    [
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited", True),
        ("DistStoreError: waited 300 s for gang/0", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),  # of a user's download
        ("TimeoutError: timed out", False),
        ("ValueError: nccl", False),
        ("RuntimeError: my loss is NaN", False),
    ],
)
def test_a_connection_of_the_users_own_is_no_failure_of_the_gang(said: str, is_its: bool) -> None:
    assert is_of_the_gang(Raised(0, said, "", b"")) == is_its
