from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.distributed.ranks import _fork_server
from tests.e2e.engine_story import EngineStory, UndisturbedEngines, four_slots
from tests.e2e.story import WARM, Story
from tests.e2e.warm.server import warm_ranks

__all__ = ["_fork_server"]


@pytest.fixture(scope="session")
def warm(_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let ranks with the entrypoint `WARM` start at once."""
    with warm_ranks(tmp_path_factory.mktemp("warm")):
        yield


@pytest.fixture(scope="package")
def undisturbed(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Return the story on two slots of this machine, without any trouble."""
    return run_undisturbed(tmp_path_factory, "resources.slots_per_trial=2", WARM)


@pytest.fixture(scope="package")
def undisturbed_alone(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Return the story on one slot, without any trouble."""
    return run_undisturbed(tmp_path_factory, WARM)


def run_undisturbed(tmp_path_factory: pytest.TempPathFactory, *overrides: str) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("undisturbed")))
        story = Story.begin(*overrides)
        story.wait()
    return story


@pytest.fixture(scope="session")
def undisturbed_engines(warm: None, tmp_path_factory: pytest.TempPathFactory) -> UndisturbedEngines:
    """Return a function that runs the story of an engine, with `accumulation` micro batches per batch, on slots of this
    machine.
    """

    @functools.cache
    def run(engine: str, accumulation: int, slots: int = 4) -> EngineStory:
        with pytest.MonkeyPatch.context() as patch:
            root = tmp_path_factory.mktemp("undisturbed")
            patch.setenv("HPC_DET_ROOT", str(root))
            four_slots(root)
            on_slots = f"resources.slots_per_trial={slots}"
            story = EngineStory.with_engine(engine, accumulation, on_slots, launcher="warm")
            story.wait()
        return story

    return run
