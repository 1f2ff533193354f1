"""Launchers for anyone's Hydra app: hydra/launcher=hpc_slurm, hpc_pbs or hpc_local. What they do lies in hpc_det.sweep.

`hydra_plugins` itself has no __init__.py: it is a namespace that Hydra's plugins share.
"""

from __future__ import annotations
