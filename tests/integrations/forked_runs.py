"""A table of trainings: each without a stop, and stopped after some batches and resumed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.forked import ForkedRuns

Cell = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The results of one cell, by rank."""

    whole: list[Any]
    stopped: list[list[Any]]
    """Those of the attempts that were stopped."""
    resumed: list[Any]
    root: Path
    """HPC_DET_ROOT of the stopped and resumed run."""


def results_of(module: str, folder: Path, cells: dict[str, Cell]) -> dict[str, Results]:
    """Return the results of the cells by name. `ranks`: number of ranks of a cell, 1 by default; `stops`: batches."""
    with closing(ForkedRuns(module)) as runs:
        return {name: _results(runs, module, folder / name, **cell) for name, cell in cells.items()}


def _results(
    runs: ForkedRuns, module: str, folder: Path, *, stops: list[int], ranks: int = 1, **options: Any
) -> Results:
    def results(root: Path, name: str, **more: Any) -> list[Any]:
        found, codes, log = runs.run(module, root, name, ranks, **options, **more)
        assert codes == [0] * ranks, log
        return found

    folder.mkdir(parents=True)
    root = folder / "resumed"
    return Results(
        whole=results(folder / "whole", "whole"),
        stopped=[results(root, str(number), stop_at=stop) for number, stop in enumerate(stops)],
        resumed=results(root, "resumed"),
        root=root,
    )
