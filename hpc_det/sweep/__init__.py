"""Sweeps of any `@hydra.main` app, as an experiment of hpc_det with a trial for each of Hydra's jobs.

launcher   on the login node: composes the points, saves and submits them
app        on the compute nodes: a rank, which runs the app's function with its saved configuration
"""

from __future__ import annotations


def may_stop() -> None:
    """Call the app's checkpoint() and exit if the job has to stop; call this function in the loop of a Hydra app.

    An app that never calls it is interrupted at any place of its code. In a gang, every rank must make the same calls,
    after `torch.distributed.init_process_group`; all ranks stop at the same call. Outside of a sweep's job it does
    nothing.
    """
    from hpc_det.sweep import stops

    if stops.current:
        stops.current.may_stop()
