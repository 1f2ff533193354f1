"""The slots of this machine: its GPUs if there are enough for a trial, else ranks on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.conf_files import find
from hpc_det.config.local_slots import torch_has_cuda, with_local_slots
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import from_file, from_hydra, on_one_slot
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from tests.facts import refused, unnamed
from tests.nvml import Nvml, installed

BARE = {"name": "desk", "scheduler": "local", "max_nodes": 1}
TWO = Nvml("GPU-a", "GPU-b")


def slots(profile: dict[str, Any], per_trial: int = 1) -> tuple[Any, Any]:
    found = with_local_slots(profile, per_trial, {}).profile
    return found.get("slots_per_node"), found.get("slot_type")


@pytest.mark.parametrize(
    ("library", "per_trial", "expected"),
    [
        (TWO, 1, (2, "gpu")),
        (TWO, 2, (2, "gpu")),
        (TWO, 3, (2, "cpu")),
        (Nvml("GPU-a", "GPU-b", "GPU-c"), 4, (3, "gpu")),
        (Nvml("GPU-a"), 4, (2, "cpu")),
        (None, 1, (2, "cpu")),
        (Nvml(), 1, (2, "cpu")),
        (Nvml("GPU-a", mig=("MIG-x", "MIG-y")), 1, (1, "gpu")),
    ],
    ids=[
        "more than enough",
        "just enough",
        "too few",
        "too few, but more than ranks on CPUs",
        "fewer than ranks on CPUs",
        "no driver",
        "a driver that does not answer",
        "parts of a GPU",
    ],
)
def test_a_trial_has_gpus_if_there_are_enough(
    library: Nvml | None, per_trial: int, expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, library)
    assert slots(BARE, per_trial) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"slot_type": "cpu"}, (2, "cpu")),
        ({"slot_type": "cpu", "slots_per_node": 6}, (6, "cpu")),
        ({"slot_type": "gpu"}, (2, "gpu")),
        ({"slots_per_node": 1}, (1, "gpu")),
        ({"slots_per_node": None, "slot_type": None}, (2, "gpu")),
        ({"scheduler": "slurm"}, (None, None)),
    ],
)
def test_what_a_profile_sets_stays(
    given: dict[str, Any], expected: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, TWO)
    assert slots({**BARE, **given}) == expected


def test_a_profile_for_gpus_on_a_machine_without_one_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert slots({**BARE, "slot_type": "gpu"}) == (None, "gpu")


def test_a_profile_for_gpus_whose_driver_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Nvml())
    with refused(UsageError, "cluster.slot_type", "gpu", "NVIDIA driver", "nvidia-smi"):
        slots({**BARE, "slot_type": "gpu"})


def test_gpus_are_not_used_by_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, TWO)
    monkeypatch.setattr("hpc_det.config.local_slots.torch_has_cuda", lambda: False)
    assert slots(BARE) == (2, "cpu")
    assert unnamed(with_local_slots(BARE, 1, {}).note, "2 GPUs", "torch", "CUDA", "CPUs") == []
    assert slots({**BARE, "slot_type": "gpu"}) == (2, "gpu")


@pytest.mark.parametrize(
    ("line", "has_cuda"),
    [("cuda: Optional[str] = None", False), ("cuda = None", False), ("cuda: Optional[str] = '12.8'", True)],
)
def test_the_build_of_torch_is_read_without_importing_it(
    line: str, has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '3'\n{line}\nhip: Optional[str] = None\n")
    monkeypatch.setattr(
        "hpc_det.config.local_slots.find_spec", lambda name: ModuleSpec(name, None, origin=f"{tmp_path}/__init__.py")
    )
    assert torch_has_cuda() is has_cuda
    (tmp_path / "version.py").unlink()
    assert torch_has_cuda()


def test_the_user_is_told_why_gpus_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, TWO)
    assert unnamed(with_local_slots(BARE, 4, {}).note, 4, 2, "CPUs", "resources.slots_per_trial=2") == []
    installed(monkeypatch, Nvml())
    assert unnamed(with_local_slots(BARE, 1, {}).note, "NVIDIA driver", "CPUs", "nvidia-smi") == []


# --- in an experiment


@pytest.fixture
def created(tmp_path: Path, code: Path, env: dict[str, str]) -> Callable[..., Effective]:
    config = tmp_path / "tiny.yaml"
    config.write_text("entrypoint: python3 -m train\nsearcher: {metric: loss, max_length: 10}\n")

    def create(*overrides: str, local: bool = False) -> Effective:
        request = from_file(config, code, overrides, None, "local" if local else None, env)
        return effective(on_one_slot(request) if local else request)

    return create


def test_an_experiment_on_this_machine_trains_on_its_gpus(
    created: Callable[..., Effective], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, TWO)
    found = created("resources.slots_per_trial=2")
    assert (found.cluster.slot_type, found.cluster.slots_per_node) == ("gpu", 2)
    assert unnamed(found.choice, "local", "2 GPUs", "NVIDIA H200") == []
    alone = created("resources.slots_per_trial=4", local=True)
    assert (alone.cluster.slot_type, alone.experiment.resources.slots_per_trial) == ("gpu", 1)


def test_the_choice_names_the_profile_that_an_override_of_hydra_names(
    env: dict[str, str], user_file: Callable[[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, TWO)
    user_file("cluster/desk.yaml", BARE)
    overrides = ["cluster=desk", "entrypoint=python3 -m train", "searcher.metric=loss", "searcher.max_length=10"]
    assert unnamed(effective(from_hydra(overrides, env)).choice, "desk", "2 GPUs") == []


def test_a_trial_with_more_slots_than_gpus_trains_on_cpus_with_a_note(
    created: Callable[..., Effective], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, Nvml("GPU-a"))
    found = created("resources.slots_per_trial=2")
    assert (found.cluster.slot_type, found.choice) == ("cpu", "")
    assert any(not unnamed(note, "resources.slots_per_trial=1") for note in found.notes)
    with refused(Exception, "resources.slots_per_trial", 3, 2):
        created("resources.slots_per_trial=3")


def test_the_profile_of_hpc_det_for_this_machine_leaves_both_open(env: dict[str, str]) -> None:
    assert load_yaml(find("cluster", "local", env)).keys().isdisjoint({"slots_per_node", "slot_type"})
