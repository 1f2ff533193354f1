"""An experiment from its creation to its fork, from Python, with real ranks on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hpc_det import client
from tests.e2e.story import HERE, WARM
from tests.wait import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm")]


def test_an_experiment_is_created_read_forked_and_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or torch sets it when a checkpoint is loaded
    experiment = client.create(HERE / "story.yaml", HERE / "trial", cluster="local", overrides=[WARM])
    lines = [*experiment.logs(follow=True)]
    assert experiment.wait(DEADLINE_S) == "COMPLETED"
    assert [line for line in lines if "attempt 1 begins" in line]

    result = experiment.result()
    values = [report["metrics"]["accuracy"] for report in experiment.metrics()]
    assert (len(values), result.value) == (4, max(values))
    assert len([*experiment.trials()[0].metrics("training")]) == 40

    top = experiment.top_checkpoint()
    assert top
    assert top == result.checkpoint
    assert {"steps_completed": top.steps, "format": "pickle"}.items() <= top.metadata.items()
    top.add_metadata({"stage": "production"})
    assert client.get_checkpoint(top.uuid).metadata["stage"] == "production"
    assert type(top.load()).__name__ == "StoryTrial"
    assert top.download(tmp_path / "best").joinpath("state_dict.pth").exists()

    forks = [experiment.fork({"searcher.max_length.batches": batches}) for batches in (10, 20)]

    async def awaited() -> list[client.Result]:
        return list(await asyncio.wait_for(asyncio.gather(*forks), DEADLINE_S))

    assert [found.value for found in asyncio.run(awaited())] == [values[0], max(values[:2])]
    assert [found.id for found in client.list("COMPLETED")] == [1, 2, 3]

    forks[0].continue_({"searcher.max_length.batches": 20})
    assert forks[0].result(DEADLINE_S).value == max(values[:2])
