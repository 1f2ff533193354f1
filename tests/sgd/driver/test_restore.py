"""Snapshots in the middle of a pass, restored by new runners."""

from __future__ import annotations

import io
import pickle
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rng import restore_rng, rng_state, seed_everything
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankPlace
from hpc_det.sgd.rank.runner import Runner
from tests.distributed.ranks import OnRanks
from tests.facts import unnamed
from tests.sgd.runners import Augmented, Regression, alone, settings


class Snapshot:
    """A snapshot of one rank as bytes, as it is written to memory files and sent to the driver."""

    def __init__(self, runner: Runner) -> None:
        runner.level()
        file = io.BytesIO()
        torch.save(runner.shared(), file)
        self.shared = file.getvalue()
        self.own = pickle.dumps(runner.own())

    def restored(self, runner: Runner, *, has_shared: bool = True, has_own: bool = True) -> Runner:
        shared = torch.load(io.BytesIO(self.shared), weights_only=True) if has_shared else None
        runner.restore(shared, pickle.loads(self.own) if has_own else None)
        return runner


def story(runner: Runner) -> list[Any]:
    """Return all results after a snapshot, exactly and as text, because NaN does not equal NaN."""
    calls = [
        runner.train(2),
        runner.validate(2),
        runner.train(),
        runner.validate(),
        runner.train(5),
        runner.epochs_done,
        runner.operator.global_step,
    ]
    return [*map(repr, calls), stored(runner.state_dict())]


def stored(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def begun(runner: Runner) -> Runner:
    runner.train()
    runner.train(2)
    runner.validate(1)
    return runner


# --- without any snapshot


def trained_plainly(distributed: Distributed, epochs: int) -> tuple[bytes, bytes]:
    """Return the weights of a runner, and those of a plain DDP loop as in torch's tutorials."""
    place = RankPlace(distributed.rank, distributed.local_rank, distributed.size)
    runner = Runner(settings(size=2, num_workers=2, config={"length": 41}), place)
    for _ in range(epochs):
        runner.train()
    seed_everything(place.rank)
    torch.manual_seed(3)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
    sampler: DistributedSampler[Any] = DistributedSampler(Augmented(41), 2, place.rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y, _ in DataLoader(Augmented(41), batch_size=3, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            random.random() + np.random.random()
    return stored(runner.models()[0].state_dict()), stored(model.module.state_dict())


def test_a_runner_computes_what_a_plain_loop_does(on_ranks: OnRanks) -> None:
    for ours, plain in on_ranks(2, trained_plainly, 2):
        assert ours == plain


# --- the same number of ranks


@pytest.fixture
def _own_generators() -> Any:
    before = rng_state()
    yield
    restore_rng(before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("_own_generators")
def test_one_worker_goes_on_bit_for_bit_with_the_users_loader(workers: int) -> None:
    config = {"workers": workers}
    with closing(alone(config=config)) as undisturbed, closing(alone(config=config)) as again:
        begun(undisturbed)
        snapshot, expected = Snapshot(undisturbed), story(undisturbed)
        seed_everything(99)
        assert story(snapshot.restored(again)) == expected


@pytest.mark.usefixtures("_own_generators")
def test_persistent_workers_go_on_at_the_right_sample() -> None:
    config = {"workers": 1, "persistent": True}
    with closing(alone(config=config)) as undisturbed, closing(alone(config=config)) as again:
        begun(undisturbed)
        snapshot = Snapshot(undisturbed)
        undisturbed.train()
        undisturbed.train()
        snapshot.restored(again)
        again.train()
        again.train()
        assert again.operator.seen == undisturbed.operator.seen  # type: ignore[attr-defined]


def on_and_again(distributed: Distributed, *, of_rank: int = 0, **options: Any) -> tuple[bool, list[Any]]:
    """Return whether a restore of the snapshot of `of_rank` gives the same results as an uninterrupted run, and the
    results.
    """
    place = RankPlace(distributed.rank, distributed.local_rank, distributed.size)
    given = settings(size=place.size, num_workers=place.size, **options)
    undisturbed = begun(Runner(given, place))
    undisturbed.train(1)  # before the next batch, each rank has different running means of batch norm
    snapshot, expected = Snapshot(undisturbed), story(undisturbed)
    written = [snapshot.shared]
    dist.broadcast_object_list(written, src=of_rank)
    (snapshot.shared,) = written
    seed_everything(99)
    other = {**given.config, "seed": 98}
    again = snapshot.restored(
        Runner(settings(size=place.size, num_workers=place.size, **{**options, "config": other}), place),
        has_shared=place.rank == 0,
    )
    repeated = story(again)
    undisturbed.close()
    again.close()
    return repeated == expected, repeated


def all_cases(distributed: Distributed, cases: list[dict[str, Any]]) -> list[Any]:
    return [on_and_again(distributed, **case) for case in cases]


CASES: list[dict[str, Any]] = [
    {"config": {"workers": 0}},
    {"config": {"workers": 0}, "of_rank": 1},
    {"config": {"workers": 2}},
    {"config": {"ddp_args": {"broadcast_buffers": False}}},
    {"add_dist_sampler": False},
    {"use_fp16": True, "scheduler_step_freq": "epoch"},
]


@pytest.mark.parametrize(("size", "cases"), [(2, CASES), (3, CASES[:1])])
def test_ranks_go_on_bit_for_bit(on_ranks: OnRanks, size: int, cases: list[dict[str, Any]]) -> None:
    results = on_ranks(size, all_cases, cases)
    for case, ranks in zip(cases, zip(*results, strict=True), strict=True):
        assert all(is_same for is_same, _ in ranks), case
        assert len({result[0] for _, result in ranks}) == size, "ranks have different generators and samples"


# --- another number of ranks


def some_of_a_pass(distributed: Distributed, size: int, steps: int | None, snapshots: list[Snapshot] | None) -> Any:
    place = RankPlace(distributed.rank, distributed.local_rank, distributed.size)
    runner = Runner(settings(size=place.size, num_workers=size, config={"length": 40}), place)
    if snapshots:
        own = snapshots[place.rank] if place.rank < len(snapshots) else None
        (own or snapshots[0]).restored(runner, has_shared=place.rank == 0, has_own=own is not None)
    runner.operator.load_state_dict({"seen": []})
    result = runner.train(steps)
    return (
        runner.state_dict()["operator"]["seen"],
        result,
        Snapshot(runner),
        runner.operator.global_step,
        runner.epochs_done,
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("_own_generators")
def test_a_gang_shrinks_and_grows_in_the_middle_of_a_pass(on_ranks: OnRanks, size: int) -> None:
    """6 samples per step for any size: 12, then 12, then 16 of 40."""
    first = on_ranks(size, some_of_a_pass, size, 2, None)
    only = [some_of_a_pass(Distributed(), size, 2, [part[2] for part in first])]
    last = on_ranks(size, some_of_a_pass, size, None, [part[2] for part in only])
    seen = [[index for part in gang for index in part[0]] for gang in (first, only, last)]
    fill = -16 % size
    assert [len(part) for part in seen] == [12, 12, 16 + fill]
    assert {index for part in seen for index in part} == {*range(40)}
    assert [part[1]["batch_count"] for gang in (first, only, last) for part in gang] == [2] * (size + 1) + [3] * size
    assert all(part[1]["epoch"] == 1 for gang in (first, only, last) for part in gang)
    assert [part[3:] for part in last] == [(7, 1)] * size
    assert [part[3:] for part in only] == [(4, 0)]


# --- the way over the process group


class Large(TrainingOperator):
    """A model of 200 MB."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Linear(5000, 10000, bias=False)
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))


def memory_mb(what: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1]) / 1024


def restored_large(distributed: Distributed) -> tuple[float, float]:
    place = RankPlace(distributed.rank, distributed.local_rank, distributed.size)
    runner = Runner(settings(Large, num_workers=2), place)
    weight = next(runner.models()[0].parameters())
    weight.data.fill_(place.rank + 1)
    shared = runner.shared() if place.rank == 0 else None
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    runner.restore(shared, None)
    return memory_mb("VmHWM") - before, weight.mean().item()


def test_a_large_state_reaches_other_ranks_without_more_than_one_copy(on_ranks: OnRanks) -> None:
    (growth_0, value_0), (growth_1, value_1) = on_ranks(2, restored_large)
    assert (value_0, value_1) == (1.0, 1.0)
    assert growth_0 < 100
    assert growth_1 < 300


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def restore_of_another_run(distributed: Distributed, path: Path) -> str:
    place = RankPlace(distributed.rank, distributed.local_rank, distributed.size)
    runner = Runner(settings(size=2, num_workers=2), place, secret=b"ours" if place.rank else b"theirs")
    try:
        runner.restore({"state": Trap(path)} if place.rank == 0 else None, None)
    except Exception as error:
        return str(error)
    return ""


def test_what_another_run_sends_is_not_unpickled(on_ranks: OnRanks, tmp_path: Path) -> None:
    said = on_ranks(2, restore_of_another_run, tmp_path / "executed")
    assert unnamed(said[1], "rank 1", "rank 0", "HPC_DET_ROOT") == []
    assert not (tmp_path / "executed").exists()


def operators_state(distributed: Distributed) -> list[Any]:
    """Return whether the operator's state is in the rank's part: if it differs between ranks, if not, and without any
    state.
    """
    place = RankPlace(distributed.rank, distributed.local_rank, distributed.size)
    has_own = []
    for operator_cls in (Regression, SameEverywhere, Large):
        runner = Runner(settings(operator_cls, size=2, num_workers=2), place)
        if operator_cls is Regression:
            runner.train(1)
        has_own.append("operator" in runner.own())
        runner.close()
    return has_own


class SameEverywhere(Regression):
    def state_dict(self) -> dict[str, Any]:
        return {"average": torch.ones(3), "lists": [[1, 2.5, None]]}


def test_the_operators_state_is_kept_for_each_rank_where_it_differs(on_ranks: OnRanks) -> None:
    assert on_ranks(2, operators_state) == [[True, False, False]] * 2
