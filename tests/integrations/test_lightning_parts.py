"""The parts of the Lightning adapter that need no training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.core import Core
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from tests.facts import unnamed

pytestmark = pytest.mark.integration  # imports Lightning, which takes seconds


@pytest.fixture(scope="module")
def parts() -> Any:
    """Return the names under test, imported only here, so that the collection of all tests does not wait for them."""
    pytest.importorskip("lightning")
    from lightning.fabric.plugins import environments

    from hpc_det.integrations import lightning
    from hpc_det.integrations.lightning import environment, sampler

    return SimpleNamespace(**{**vars(environments), **vars(environment), **vars(sampler), **vars(lightning)})


DATA = cast(Any, range(20))


def core_of(rank: int, folder: Path | None = None) -> Core:
    gang = Distributed(rank=rank, size=4, local_rank=rank % 2, local_size=2, nodes=2)
    fields = {"info": SimpleNamespace(trial_seed=7), "latest_checkpoint": folder, "step": 0}
    return cast(Core, SimpleNamespace(distributed=gang, **fields))


def test_ranks_are_those_of_the_run_and_not_slurms_tasks(parts: Any) -> None:
    environment = parts.HpcDetEnvironment(core_of(3))
    numbers = environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank()
    assert numbers == (4, 3, 1, 1)
    assert environment.creates_processes_externally
    environment.validate_settings(num_devices=2, num_nodes=2)


def test_other_devices_and_nodes_are_refused(parts: Any) -> None:
    with pytest.raises(UsageError) as raised:
        parts.HpcDetEnvironment(core_of(3)).validate_settings(num_devices=4, num_nodes=1)
    assert not unnamed(str(raised.value), "devices=4", "num_nodes=1", "core.distributed.local_size")


def trainer_of(rank: int, size: int, environment: object = None) -> Any:
    return SimpleNamespace(world_size=size, global_rank=rank, strategy=SimpleNamespace(cluster_environment=environment))


def test_a_trainer_that_counts_itself_alone_is_refused(parts: Any) -> None:
    parts.check_ranks(trainer_of(3, 4), core_of(3))
    with pytest.raises(UsageError) as raised:
        parts.check_ranks(trainer_of(0, 1), core_of(3))
    assert not unnamed(str(raised.value), "rank 0 of 1", "rank 3 of 4", "HpcDetEnvironment(core)")


@pytest.mark.filterwarnings("ignore:The .srun. command")  # on a machine with Slurm
def test_lightnings_requeue_is_refused(parts: Any) -> None:
    parts.check_ranks(trainer_of(3, 4, parts.SLURMEnvironment(auto_requeue=False)), core_of(3))
    with pytest.raises(UsageError) as raised:
        parts.check_ranks(trainer_of(3, 4, parts.SLURMEnvironment(auto_requeue=True)), core_of(3))
    assert not unnamed(str(raised.value), "auto_requeue", "HpcDetEnvironment(core)")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "metadata.json").write_text(json.dumps({"hpc_det.lightning": {"epoch": 1, "records": 2}}))
    return tmp_path


def shares(parts: Any, epoch: int, folder: Path | None = None) -> list[list[int]]:
    samplers = [parts.ResumableSampler(core_of(rank, folder), DATA) for rank in range(4)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def test_the_ranks_share_each_pass_in_another_order(parts: Any) -> None:
    assert sorted(index for share in shares(parts, 0) for index in share) == [*range(20)]
    assert shares(parts, 0) != shares(parts, 1)


def test_a_resumed_pass_omits_what_is_done_and_the_next_ones_are_whole(parts: Any, checkpoint: Path) -> None:
    assert shares(parts, 1, checkpoint) == [share[2:] for share in shares(parts, 1)]
    assert shares(parts, 2, checkpoint) == shares(parts, 2)
    resumed = parts.ResumableSampler(core_of(0, checkpoint), DATA)
    assert list(resumed) == shares(parts, 1)[0][2:], "Lightning makes an iterator before it sets the pass"
    assert len(resumed) == 5, "Lightning counts the batches of a whole pass"


def test_a_loader_without_it_gets_a_note_and_one_with_its_own_position_is_refused(
    parts: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = TensorDataset()
    resumable = DataLoader(DATA, batch_size=5, sampler=parts.ResumableSampler(core_of(0), DATA))
    for loader in (resumable, [resumable]):
        assert parts.resumable_batch_size(cast(Any, SimpleNamespace(train_dataloader=loader)), core_of(0)) == 5
    assert capsys.readouterr().err == ""
    for other in (DataLoader(DATA), [resumable, resumable]):
        assert parts.resumable_batch_size(cast(Any, SimpleNamespace(train_dataloader=other)), core_of(0)) == 0
        assert "ResumableSampler" in capsys.readouterr().err
    stateful = SimpleNamespace(state_dict=dict, dataset=data)
    with pytest.raises(UsageError) as raised:
        parts.resumable_batch_size(cast(Any, SimpleNamespace(train_dataloader=stateful)), core_of(0))
    assert not unnamed(str(raised.value), "ResumableSampler")


def test_a_checkpoint_of_something_else_is_refused(parts: Any, checkpoint: Path) -> None:
    assert parts.HpcDetCallback(core_of(0)).ckpt_path is None
    callback = parts.HpcDetCallback(core_of(0, checkpoint))
    with pytest.raises(UsageError) as raised:
        _ = callback.ckpt_path
    assert not unnamed(str(raised.value), "lightning.ckpt", "core.track")
    (checkpoint / "lightning.ckpt").touch()
    assert callback.ckpt_path == checkpoint / "lightning.ckpt"
