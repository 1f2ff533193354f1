"""Measure checkpoints beside the limits of the machine: a copy in memory, a write and a read of as many bytes, in
turns.

`python -m tests.benchmarks checkpoint`. CHECKPOINT_MB and CHECKPOINT_ROUNDS make it shorter, CHECKPOINT_PARTS selects
parts of it (saves, meanwhile, notices, resumes).
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.benchmarks import checkpoint_meanwhile, checkpoint_resume, checkpoint_savers
from tests.benchmarks.table import show

SIZE_MB = int(os.environ.get("CHECKPOINT_MB", 1000))
ROUNDS = int(os.environ.get("CHECKPOINT_ROUNDS", 5))


def main() -> None:
    parts = {"saves": saves, "meanwhile": meanwhile, "notices": notices, "resumes": resumes}
    for name in os.environ.get("CHECKPOINT_PARTS", ",".join(parts)).split(","):
        with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINT_FOLDER")) as root:
            parts[name](Path(root))


def saves(root: Path) -> None:
    taken = checkpoint_savers.measured(root, SIZE_MB, ROUNDS)
    added = {name: max(each.added_mb for each in results) for name, results in taken.items()}
    counted = {name: results[1:] for name, results in taken.items()}
    copies = [each.stall_s for each in counted.pop("copy")]
    writes = [each.durable_s for each in counted["raw write and fsync"]]
    firsts = {name: results[0] for name, results in taken.items() if name not in ("copy", *checkpoint_savers.RAW)}
    show(
        f"the first save of each, seconds; a copy takes {statistics.median(copies):.3f}",
        ("way", "stall", "durable"),
        [
            (name, f"{first.stall_s:.3f}", "never" if first.durable_s is None else f"{first.durable_s:.3f}")
            for name, first in firsts.items()
        ],
    )
    show(
        f"{SIZE_MB} MB of float32 in 50 tensors, {ROUNDS} rounds in turns, seconds; a copy of them into warm memory "
        f"takes {statistics.median(copies):.3f}",
        ("way", "stall", "to the copy (quartiles)", "durable", "to the raw write (quartiles)", "MB added"),
        [
            (
                name,
                *of(copies, [each.stall_s for each in results]),
                *of(writes, [each.durable_s for each in results]),
                f"{added[name]:.0f}",
            )
            for name, results in counted.items()
        ],
    )


def meanwhile(root: Path) -> None:
    show(
        f"training on all cores while {SIZE_MB} MB are written behind it, {ROUNDS} rounds in turns",
        ("way", "a batch, to one without a save (quartiles)", "lost [s]"),
        [
            (
                name,
                of([1.0] * len(results), [each.ratio for each in results])[1],
                f"{statistics.median(each.lost_s for each in results):.3f}",
            )
            for name, results in checkpoint_meanwhile.measured(root, SIZE_MB, ROUNDS).items()
        ],
    )


def notices(root: Path) -> None:
    floors, seconds = checkpoint_resume.notices(root, SIZE_MB, ROUNDS)
    show(
        f"a trial of {SIZE_MB} MB in training, {ROUNDS} notices, seconds",
        ("", "median", "to copy and raw write (quartiles)"),
        [("from the notice to the committed checkpoint", *of(floors, seconds))],
    )


def resumes(root: Path) -> None:
    taken = checkpoint_resume.resumes(root, SIZE_MB, ROUNDS)
    for state in ("cold", "warm"):
        floors = taken.pop((state, checkpoint_resume.FLOOR))
        show(
            f"a trial of {SIZE_MB} MB from its start to its first batch, the files {state}, {ROUNDS} rounds in turns, "
            f"seconds; {checkpoint_resume.FLOOR} take {statistics.median(floors):.3f}",
            ("way", "median", "ratio (quartiles)"),
            [(name, *of(floors, seconds)) for (its_state, name), seconds in taken.items() if its_state == state],
        )
    show(
        "two ranks of a node that resume from it",
        ("way", "bytes read, of the checkpoint's"),
        [(name, f"{share:.2f}") for name, share in checkpoint_resume.bytes_read_by_two(root, SIZE_MB).items()],
    )
    pairs = [checkpoint_resume.read_and_broadcast_s(root, SIZE_MB) for _ in range(ROUNDS)]
    show(
        f"{SIZE_MB} MB from one rank to another of the same machine, {ROUNDS} rounds, seconds",
        ("way", "median", "to a raw read of cold files (quartiles)"),
        [("gloo, in blocks", *of(*zip(*pairs, strict=True)))],
    )


def of(floors: Sequence[float | None], seconds: Iterable[float | None]) -> tuple[str, str]:
    """Return the median, and the median ratio to the floor of the same round, with quartiles."""
    pairs = [(one, floor) for one, floor in zip(seconds, floors, strict=True) if one is not None and floor is not None]
    if not pairs:
        return "never", ""
    ratios = [one / floor for one, floor in pairs]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return (
        f"{statistics.median(one for one, _ in pairs):.3f}",
        f"{statistics.median(ratios):.2f} ({low:.2f}, {high:.2f})",
    )


if __name__ == "__main__":
    main()
