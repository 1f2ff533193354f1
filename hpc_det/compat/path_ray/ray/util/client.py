"""`ray.util.client`, in which programs look up whether they are connected to a Ray server. They never are."""

from __future__ import annotations

from hpc_det.compat.ray_core import RayClient

ray = RayClient()
