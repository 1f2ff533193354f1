from __future__ import annotations

from hpc_det.pytorch.deepspeed import runtime  # its first import sets environment variables

__all__ = ["runtime"]
