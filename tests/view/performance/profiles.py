"""Profiles of trials on disk, as nodes and ranks write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hpc_det.node.files import make_folder
from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder

BEGAN = 1_795_000_000.0
BATCHES, WALL_S = 100, 10.0
"""Batches and seconds of a stretch, which is one line of a rank."""
SECONDS = {"dataloader_next": 0.2, "to_device": 0.1, "train_batch": 9.4, "reduce_metrics": 0.1}
SAMPLE: dict[str, Any] = {
    "cpu_util": 40.0,
    "memory_free": 8 * 2**30,
    "disk_iops": 12.0,
    "disk_read": 5e6,
    "disk_write": 1e6,
    "net_sent": 2e6,
    "net_received": 3e6,
    "gpus": {},
}


def stretch(
    folder: TrialFolder,
    rank: int = 0,
    *,
    batches: int = BATCHES,
    count: int = BATCHES,
    attempt: int = 1,
    host: str = "n1",
    exposed_s: float | None = None,
    end: float | None = None,
    wall_s: float = WALL_S,
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Append a line of a rank whose clock began at BEGAN. `seconds` override those of SECONDS."""
    make_folder(folder.profile)
    line = {
        "time": BEGAN + batches * WALL_S / BATCHES if end is None else end,
        "attempt": attempt,
        "host": host,
        "epoch": 0,
        "batches": batches,
        "count": count,
        "wall_s": wall_s,
        "records": 32 * count,
        "samples_per_second": 64 * count / wall_s,
        "seconds": {**SECONDS, **seconds},
        "exposed_communication_s": exposed_s,
    }
    append_line(folder.timings(rank), line, durable=False)


def sample(folder: TrialFolder, node: int = 0, *, at: float, attempt: int = 1, host: str = "n1", **values: Any) -> None:
    """Append a line of a node, `at` seconds after BEGAN. `values` override those of SAMPLE."""
    make_folder(folder.profile)
    line = {"time": BEGAN + at, "attempt": attempt, "host": host, **SAMPLE, **values}
    append_line(folder.system_metrics(node), line, durable=False)


def gpus(**utils: float) -> dict[str, dict[str, float]]:
    """Return samples of GPUs by UUID, with these utilisations and 20 GiB of free memory each."""
    return {f"GPU-{name}": {"util": util, "memory_free": 20 * 2**30} for name, util in utils.items()}


def profiled(folder: TrialFolder, *, stretches: int = 4, hosts: tuple[str, ...] = ("n1",)) -> None:
    """Write lines of two data-bound ranks per host, and a sample of each node every second."""
    for batches in range(BATCHES, (stretches + 1) * BATCHES, BATCHES):
        for rank in range(2 * len(hosts)):
            seconds = {"dataloader_next": 6.2 + rank / 10, "train_batch": 3.4 - rank / 10}
            stretch(folder, rank, batches=batches, host=hosts[rank // 2], exposed_s=0.6 - rank / 5, seconds=seconds)
    for at in range(round(stretches * WALL_S)):
        for node, host in enumerate(hosts):
            sample(folder, node, at=at, host=host, gpus=gpus(d9a1=30.0 + at % 5, f07c=28.0 + at % 3))
