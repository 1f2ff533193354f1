"""Compute the effective training time ratio (ETTR) from measured costs and published failure rates.

ETTR = 1 / (1 + sqrt(2 C / M) + R / M), where C is the time for which a save stalls training, R the time of a restart
until training continues, and M the mean time between failures; a save is due every sqrt(2 C M) (Young, Daly). The
constants come from tables of docs/reference/performance.md.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from tests.benchmarks.table import show

STALL_S = 0.086
"""Table "Saves", hpc_det, column Stall: 1000 MB in one process."""
LOST_S = 0.349
"""Table "Saves", second table, hpc_det, column Lost per save: the same with training on all cores."""
RESTART_S = 0.43
"""Table "Restart of a gang", a job, column Median: from the end of a rank to the next batch."""
RESUME_S = 0.906
"""Table "Resumes", hpc_det, warm, column Median: 1000 MB until the first batch."""
NCCL_S = (10.0, 30.0)
"""Start of NCCL, which hpc_det does not control: an estimate, not measured here."""


class Machine(NamedTuple):
    """A machine with a published time between failures."""

    gpus: int
    source: str
    between_failures_s: float


# Llama 3: arXiv 2407.21783, 419 unplanned interruptions in 54 days. RSC: arXiv 2410.21680, the last one a projection.
MACHINES = (
    Machine(1024, "Meta RSC", 7.9 * 3600),
    Machine(16384, "Llama 3", 54 * 86400 / 419),
    Machine(16384, "Meta RSC", 1.8 * 3600),
    Machine(131072, "Meta RSC, projected", 14 * 60),
)


def ettr(stall_s: float, restart_s: float, between_failures_s: float) -> float:
    """Return the share of the time in which training makes progress that is kept."""
    return 1 / (1 + sqrt(2 * stall_s / between_failures_s) + restart_s / between_failures_s)


def main() -> None:
    own_s = RESTART_S + RESUME_S
    cases = [(STALL_S, own_s), *((STALL_S, own_s + nccl_s) for nccl_s in NCCL_S), (LOST_S, own_s + NCCL_S[-1])]
    show(
        "Effective training time ratio",
        ("machine", "M", "save every [s]", *(f"C {stall_s:g} s, R {restart_s:.1f} s" for stall_s, restart_s in cases)),
        [
            (
                f"{gpus:,} GPUs, {source}",
                f"{between_s / 3600:.1f} h" if between_s >= 3600 else f"{between_s / 60:.0f} min",
                f"{sqrt(2 * STALL_S * between_s):.0f}",
                *(f"{ettr(stall_s, restart_s, between_s):.4f}" for stall_s, restart_s in cases),
            )
            for gpus, source, between_s in MACHINES
        ],
    )


if __name__ == "__main__":
    main()
