"""`ray.tune.suggest`: grid_search. Search algorithms have no counterpart here."""

from __future__ import annotations

from hpc_det.compat.ray_tune.sample import grid_search

__all__ = ["grid_search"]
