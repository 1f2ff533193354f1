from __future__ import annotations

from tests.distributed.ranks import _fork_server, on_ranks

__all__ = ["_fork_server", "on_ranks"]
