"""From what TorchTrainer or fit was asked for to a gang that stands."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Literal

from hpc_det.sgd.capacity import Capacity
from hpc_det.sgd.driver.elastic import ElasticGang, Wanted
from hpc_det.sgd.driver.gang import Gang
from hpc_det.sgd.driver.leaving import exit_at_term
from hpc_det.sgd.driver.nodes import Nodes, Patience
from hpc_det.sgd.driver.run_folder import Run
from hpc_det.sgd.operator.errors import BadArgument
from hpc_det.sgd.place import Settings

_log = logging.getLogger("hpc_det.sgd")


def on_devices(
    capacity: Capacity, *, use_gpu: bool | Literal["auto"], timeout_s: float, backend: str = "auto"
) -> dict[str, Any]:
    """`use_gpu`, `backend` and `timeout_s` of Settings. Raises BadArgument for NCCL without GPUs."""
    has_gpus = capacity.has_gpus if use_gpu == "auto" else use_gpu
    if backend == "nccl" and not has_gpus:
        raise BadArgument("backend is 'nccl', and the ranks have no GPU; use 'auto', or an executor with GPUs")
    return {
        "use_gpu": has_gpus,
        "backend": "nccl" if has_gpus and backend != "gloo" else "gloo",
        # With GPUs RaySGD takes it from the environment.
        "timeout_s": float(os.environ.get("NCCL_TIMEOUT_S", timeout_s)) if has_gpus else timeout_s,
    }


def wanted_of(
    capacity: Capacity,
    *,
    num_workers: int,
    min_workers: int,
    settings: Callable[[int], Settings],
    hook: Callable[[], None] | None,
    is_here: bool = False,
) -> Wanted:
    """As many of the workers as there can ever be slots for. Raises BadArgument where that is less than the least."""
    slots = num_workers if capacity.slots is None else capacity.slots + is_here
    if slots < min_workers:
        raise BadArgument(
            f"min_workers is {min_workers}, and there is room for {slots} at most; ask for more nodes or GPUs"
        )
    if slots < num_workers:
        _log.warning("num_workers is %d, and there is room for %d at most: that many will run", num_workers, slots)
    return Wanted(
        most=min(num_workers, slots),
        least=max(min_workers, min(capacity.min_slots, num_workers)),
        is_here=is_here,
        settings=settings,
        hook=hook,
    )


def opened(run: Run, capacity: Capacity, patience: Patience, wanted: Wanted, *, is_durable: bool) -> ElasticGang:
    """Everything is stopped and removed again where it fails."""
    if run.is_temporary:
        exit_at_term()
    try:
        gang = Gang(Nodes(run.folder, capacity, patience), patience.hang_timeout_s)
        try:
            if wanted.is_here:
                gang.live_here()
            if wanted.most > wanted.is_here:
                gang.nodes.start(wanted.most - wanted.is_here)
            elastic = ElasticGang(gang, wanted, is_durable)
            elastic.start()
        except BaseException:
            try:
                gang.end()
            finally:
                gang.nodes.close()
            raise
    except BaseException:
        run.remove_if_temporary()
        raise
    return elastic
