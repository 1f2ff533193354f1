from __future__ import annotations

from tests.distributed.ranks import _fork_server, on_ranks
from tests.pytorch.conftest import _torch_ready

__all__ = ["_fork_server", "_torch_ready", "on_ranks"]
