from __future__ import annotations

from tests.pytorch.conftest import _torch_ready

__all__ = ["_torch_ready"]
