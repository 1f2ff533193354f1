"""A whole run of a training script, and the same one stopped and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import committed
from hpc_det.store.metrics import read_reports
from tests.integrations.forked import ForkedRuns


class Compared:
    """A whole run, and the same one stopped after step `stop_at` and resumed."""

    def __init__(
        self,
        runs: ForkedRuns,
        script: str,
        folder: Path,
        stop_at: int,
        options: Mapping[str, Any] | None = None,
        ranks: int = 1,
    ) -> None:
        options = options or {}
        self.whole, codes, log = runs.run(script, folder / "whole", "whole", ranks, **options)
        assert codes == [0] * ranks, log
        root = folder / "stopped"
        self.stopped, codes, log = runs.run(script, root, "first", ranks, stop_at=stop_at, **options)
        assert codes == [0] * ranks, log
        self.checkpoints = {each.steps for each in committed(Path(self.stopped[0]["folder"], "checkpoints"))}
        self.leftovers = [*Path(self.stopped[0]["folder"], "trainer").glob("checkpoint-*")]
        self.resumed, codes, self.log = runs.run(script, root, "second", ranks, **options)
        assert codes == [0] * ranks, self.log

    def assert_same(self, stop_at: int) -> None:
        assert [(each["step"], each["stop"]) for each in self.stopped] == [(stop_at, "preempted")] * len(self.whole)
        for whole, stopped, resumed in zip(self.whole, self.stopped, self.resumed, strict=True):
            assert (resumed["step"], resumed["stop"]) == (whole["step"], None)
            assert stopped["seen"] + resumed["seen"] == whole["seen"]
            assert resumed["weights"] == whole["weights"]
            assert stopped["weights"] != whole["weights"]
        assert self.leftovers == []
        assert stop_at in self.checkpoints

    @property
    def series(self) -> list[list[tuple[str, int, dict[str, float]]]]:
        """The reported metrics of the whole run, and of the other one."""
        return [series(each[0]["folder"]) for each in (self.whole, self.resumed)]


def series(folder: str) -> list[tuple[str, int, dict[str, float]]]:
    found = read_reports(Path(folder, "metrics.jsonl"))
    return [(record["kind"], record["steps"], record["metrics"]) for record in found]
