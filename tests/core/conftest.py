from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import _fork_server, on_ranks

__all__ = ["_fork_server", "on_ranks"]


@pytest.fixture(scope="session", autouse=True)
def _torch_ready() -> None:
    """Create an optimizer: the first one of a process loads torch's compiler, which sets environment variables."""
    torch.set_num_threads(1)  # no test here is large enough for more
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
