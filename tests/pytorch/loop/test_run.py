"""The gang of a script that torchrun alone has started, and the owner of its process group: the script or hpc_det."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hpc_det.checkpoint.pinned_staging import PinnedStaging
from hpc_det.core.run import process_group
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.pytorch import Batch, Trainer, init
from hpc_det.store.folders import TrialFolder
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed
from tests.pytorch.trials import Tiny

HPARAMS = {"global_batch_size": 4, "workers": 0}
CONFIG = {"searcher": {"metric": "loss"}}


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"stop-agreement", "stop-listener"}


class Terminated(Tiny):
    """Rank 1 receives a SIGTERM."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2 and self.context.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_batch(batch, epoch_idx, batch_idx)


def stopped(distributed: Distributed, root: Path) -> tuple[int, bool, set[str]]:
    """Return the batches of this rank; after the block, whether the process group exists, and the running threads."""
    os.environ["HPC_DET_ROOT"] = str(root)
    with init(hparams=HPARAMS, exp_conf=CONFIG) as context:
        Trainer(Terminated(context), context).fit(max_length=Batch(100_000))
        batches = context.current_train_batch() + 1
    return batches, dist.is_initialized(), threads()


def test_all_ranks_leave_at_the_same_batch_and_a_group_of_the_scripts_own_stays(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    first, second = on_ranks(2, stopped, tmp_path)
    assert first == second
    batches, group_stays, left_over = first
    (folder,) = (tmp_path / "local").iterdir()
    assert read_json(TrialFolder(folder).outcome) == {"attempt": 1, "kind": "stopped", "steps": batches, "saved": True}
    assert group_stays
    assert not left_over


def failing(distributed: Distributed, root: Path) -> tuple[set[str], bool]:
    os.environ["HPC_DET_ROOT"] = str(root)
    before = handlers()
    with pytest.raises(ArithmeticError), init(hparams=HPARAMS):
        raise ArithmeticError
    return threads(), handlers() == before


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]


@pytest.mark.parametrize("size", [1, 2])
def test_after_a_failure_nobody_listens_for_stops(on_ranks: OnRanks, tmp_path: Path, size: int) -> None:
    assert on_ranks(size, failing, tmp_path) == [(set(), True)] * size


def refusal(distributed: Distributed, described: Distributed, folder: Path) -> str:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    with pytest.raises(UsageError) as error, process_group(described):
        raise AssertionError("it was taken")
    return str(error.value)


def test_a_group_with_another_rank_than_the_variables_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    (message,) = on_ranks(1, refusal, Distributed(rank=1, size=2), tmp_path)
    assert unnamed(message, "process group", "rank 0 of 1", "rank 1 of 2", "RANK", "WORLD_SIZE") == []


# --- where copies of what is saved lie


def trained(root: Path, **config: Any) -> Any:
    """Train two batches in this process and return the outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(root))
        with init(hparams=HPARAMS, exp_conf={**CONFIG, **config}) as context:
            Trainer(Tiny(context), context).fit(max_length=Batch(2))
    (folder,) = (root / "local").iterdir()
    return read_json(TrialFolder(folder).outcome)


def test_they_lie_in_a_folder_of_the_node_where_its_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Path | None] = []
    new_chunk = PinnedStaging._new_chunk

    def noted(copies: PinnedStaging, storages: Any) -> Any:
        used.append(copies._folder)
        return new_chunk(copies, storages)

    monkeypatch.setattr(PinnedStaging, "_new_chunk", noted)
    monkeypatch.setenv("NODES_DISK", str(tmp_path))
    assert trained(tmp_path, checkpoint_staging="$NODES_DISK")["saved"]
    assert {*used} == {tmp_path}


def test_a_folder_that_the_node_does_not_have_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with refused(UsageError, "checkpoint_staging: ", "'$NO_SUCH_DISK'", socket.gethostname()):
        trained(tmp_path, checkpoint_staging="$NO_SUCH_DISK")
