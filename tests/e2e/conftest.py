from __future__ import annotations

import pytest

from tests.e2e.story import Story


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The story on two slots of this machine, without any trouble."""
    return told(tmp_path_factory, "resources.slots_per_trial=2")


@pytest.fixture(scope="package")
def undisturbed_alone(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The same on one slot."""
    return told(tmp_path_factory)


def told(tmp_path_factory: pytest.TempPathFactory, *overrides: str) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("undisturbed")))
        story = Story.begin(*overrides)
        story.wait()
    return story
