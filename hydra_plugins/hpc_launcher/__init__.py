"""Launchers for any Hydra app: hydra/launcher=hpc_slurm, hpc_pbs or hpc_local. Their code is in hpc_det.sweep.

`hydra_plugins` has no __init__.py: it is a namespace package that Hydra's plugins share.
"""

from __future__ import annotations
