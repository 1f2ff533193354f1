"""TorchTrainer on real agents and real ranks of this machine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.sgd import BATCH_SIZE, TorchTrainer, TrainingOperator
from hpc_det.sgd.capacity import Local
from tests.facts import refused, unnamed
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear, weights


def trainer(**arguments: Any) -> TorchTrainer:
    defaults = {"training_operator_cls": Linear, "num_workers": 2, "executor": LocalNodes(1, 2)}
    return TorchTrainer(**{**defaults, **arguments})


def test_two_ranks_train_validate_and_hand_over_their_model() -> None:
    with trainer() as its:
        first = its.train()
        for _ in range(4):
            last = its.train()
        assert last["train_loss"] < first["train_loss"] / 4
        assert (last["num_samples"], last["epoch"], last["batch_count"]) == (64, 5, 8)
        assert its.validate()["num_samples"] == 64
        model = its.get_model()
        assert isinstance(model, torch.nn.Module)
        assert model(torch.tensor([[0.5]])).shape == (1, 1)
        assert its.epochs_done == 5
        with refused(ValueError, "dataset", "register_data", "DataLoader"):
            its.train(dataset=[1, 2])  # type: ignore[arg-type]
        assert its.epochs_done == 5


def test_ranks_share_the_cpus_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with trainer(executor="local") as its:
        assert its.apply_all_workers(torch.get_num_threads) == [max(len(os.sched_getaffinity(0)) // 2, 1)] * 2


def is_executed() -> bool:
    """Return whether this rank is a program other than the fork server's, which names its modules."""
    return "torch._dynamo" not in Path("/proc/self/cmdline").read_text().split("\0")


@pytest.mark.long
def test_where_a_thread_runs_before_the_fork_ranks_are_executed_and_train_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(executor="local") as forked:
        assert forked.apply_all_workers(is_executed) == [False, False]
        expected = forked.train()
        expected_weights = weights(forked)
    starts = "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(starts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with trainer(executor="local") as executed:
        assert executed.apply_all_workers(is_executed) == [True, True]
        assert executed.train() == expected
        found = weights(executed)
        notes = [log.read_text().count("threads") for log in Path(executed.logs).glob("node-*.log")]
        assert notes == [1]
    assert all(torch.equal(found[name], value) for name, value in expected_weights.items())


def test_a_killed_rank_changes_no_bit_of_what_is_trained(tmp_path: Path) -> None:
    with trainer() as undisturbed:
        expected = [undisturbed.train() for _ in range(3)]
        expected_weights = weights(undisturbed)
    with trainer(config={"fatal": (1, 11, str(tmp_path / "once"))}) as disturbed:
        assert [disturbed.train() for _ in range(3)] == expected
        assert (tmp_path / "once").exists()
        found = weights(disturbed)
    assert all(torch.equal(found[name], value) for name, value in expected_weights.items())


def test_an_operator_may_be_in_a_module_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_script.py").write_text(
        "from tests.sgd.trained import Linear as Base\nclass Own(Base): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("beside_the_script").Own
    with trainer(training_operator_cls=own, num_workers=1) as its:
        assert its.train()["num_samples"] == 64


def print_in_a_child() -> None:
    child = os.fork()
    if child == 0:
        print("of a DataLoader's worker", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def test_what_rank_0_prints_is_seen_where_the_driver_is(capsys: pytest.CaptureFixture[str]) -> None:
    with trainer(use_tqdm=True) as its:
        its.train(info={"num_epochs": 7})
        assert "1/7e" in capsys.readouterr().err
        log = its.logs / "attempt-1" / "rank-0.log"
        assert "1/7e" in log.read_text()
        its.apply_all_workers(lambda: print("long" * 2**19))
        assert capsys.readouterr().out == "long" * 2**19 + "\n"
        its.apply_all_workers(print_in_a_child)
        assert "of a DataLoader's worker" in log.read_text()
        its.train()
        assert not (its.logs / "attempt-2").exists()  # no rank was lost


def raise_long_words() -> None:
    raise ValueError("long" * 2**19)


def raise_no_words() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            return self.no_such_words  # type: ignore[attr-defined, no-any-return]

        def __reduce__(self) -> str:
            raise TypeError("nor can it travel")

    raise Unspeakable


def test_a_users_exception_is_raised_at_once_with_the_ranks_traceback() -> None:
    class Bad(Linear):
        def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            if self.world_rank == 1:
                raise KeyError("a mistake of mine")
            return super().train_batch(batch, batch_info)

    with trainer(training_operator_cls=Bad) as its:
        with refused(KeyError, "a mistake of mine") as caught:
            its.train()
        assert "raise KeyError" in str(caught.value.__cause__)
        assert its.apply_all_workers(os.getpid)  # the trainer is still usable
        with refused(ValueError) as long:
            its.apply_all_workers(raise_long_words)
        assert len(str(long.value)) == 2**21
        with refused(RuntimeError, "rank", "Unspeakable", "str()", "AttributeError"):
            its.apply_all_workers(raise_no_words)


def test_a_constructor_that_fails_leaves_nothing() -> None:
    class Bad(Linear):
        def setup(self, config: dict[str, Any]) -> None:
            raise ValueError("no such data")

    with refused(ValueError, "no such data"):
        trainer(training_operator_cls=Bad)


def wait_for_rank_1(operator: TrainingOperator) -> None:
    if operator.world_rank == 1:
        raise ValueError("a mistake of mine")
    dist.barrier()


def test_with_use_local_rank_0_is_in_this_process_and_the_others_are_not() -> None:
    with trainer(use_local=True, timeout_s=3600) as its:
        its.train()
        pids = its.apply_all_workers(os.getpid)
        assert pids[0] == os.getpid() != pids[1]
        assert its.get_local_operator().world_rank == 0
        os.kill(pids[1], 9)
        assert its.train()["epoch"] == 2
        assert its.apply_all_workers(os.getpid)[0] == os.getpid()
        with refused(ValueError, "a mistake of mine"):  # without waiting for the timeout of a collective
            its.apply_all_operators(wait_for_rank_1)


def test_a_debugger_finds_a_single_rank_in_this_process_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gang", "nodes"):
        monkeypatch.setattr(f"hpc_det.sgd.driver.{module}.LEAVE_S", 3600.0)
    with trainer(use_local=True, num_workers=1) as its:
        assert its.train()["epoch"] == 1
        assert its.apply_all_workers(os.getpid) == [os.getpid()]


@pytest.fixture(scope="module")
def shared(_agents_can_be_forked: None) -> Iterator[TorchTrainer]:
    """Yield a trainer for tests that leave it usable."""
    with trainer(config={BATCH_SIZE: 9, "seed": 3}, initialization_hook=hook, scheduler_step_freq="epoch") as its:
        yield its


def hook() -> None:
    os.environ["SAID_BY_THE_HOOK"] = str(os.getpid())


def test_the_hook_ran_on_every_rank_before_setup(shared: TorchTrainer) -> None:
    said = shared.apply_all_workers(lambda: (os.environ["SAID_BY_THE_HOOK"], str(os.getpid())))
    assert all(one == other for one, other in said)
    assert len({one for one, _ in said}) == 2


def test_a_batch_is_divided_and_what_was_asked_for_stays(shared: TorchTrainer) -> None:
    assert shared.apply_all_operators(lambda operator: operator.config[BATCH_SIZE]) == [4, 4]
    assert shared.config[BATCH_SIZE] == 9


def test_steps_go_on_where_the_last_call_stopped_and_wrap_round(shared: TorchTrainer) -> None:
    epoch = shared.train()["epoch"]
    first = shared.train(num_steps=3)
    assert (first["epoch"], first["batch_count"]) == (epoch + 1, 3)
    assert shared.train(num_steps=5)["epoch"] == epoch + 1
    assert shared.train(num_steps=1)["epoch"] == epoch + 2


def test_results_of_each_rank_in_order_and_a_profile(shared: TorchTrainer) -> None:
    results = shared.train(reduce_results=False, profile=True)
    assert len(results) == 2
    assert set(results[0]["profile"]) == {"mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s"}
    assert results[0]["train_loss"] != results[1]["train_loss"]


def test_a_scheduler_is_stepped_by_the_driver(shared: TorchTrainer) -> None:
    shared.update_scheduler(0.5)
    assert shared.apply_all_operators(lambda operator: operator._schedulers[1].best) == [0.5, 0.5]


def test_what_is_saved_is_loaded_into_all_ranks(shared: TorchTrainer, tmp_path: Path) -> None:
    path = shared.save(tmp_path / "state.pt")
    saved = weights(shared)
    shared.train()
    assert any(not torch.equal(saved[name], value) for name, value in weights(shared).items())
    shared.load(path)
    assert all(torch.equal(saved[name], value) for name, value in weights(shared).items())
    sums = shared.apply_all_operators(lambda operator: float(sum(p.sum() for p in operator._models[0].parameters())))
    assert sums[0] == sums[1]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_file_that_is_no_state_is_refused_and_changes_nothing(shared: TorchTrainer, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(b"no state")
    before = weights(shared)
    with refused(HpcDetError, tmp_path / "other.pt"):
        shared.load(tmp_path / "other.pt")
    with refused(FileNotFoundError, "missing.pt"):
        shared.load(tmp_path / "missing.pt")
    assert all(torch.equal(before[name], value) for name, value in weights(shared).items())


def test_rounds_without_training_are_no_endless_loop(shared: TorchTrainer) -> None:
    with refused(UsageError, "train()"):
        for _ in shared.remaining(10**6):
            pass


def test_every_mistake_is_reported_at_once() -> None:
    with refused(ValueError, "num_workers", "0") as caught:
        TorchTrainer(
            training_operator_cls=int,  # type: ignore[arg-type]
            num_workers=0,
            use_fp16="half",  # type: ignore[arg-type]
            model_creator=print,
            num_worker=3,
        )
    said = str(caught.value)
    assert isinstance(caught.value, DeprecationWarning)
    for part in (
        "training_operator_cls is <class 'int'>",
        "use_fp16: got 'half'",
        "from_creators",
        "did you mean 'num_workers'?",
    ):
        assert part in said


def test_nccl_without_gpus_is_refused() -> None:
    with refused(ValueError, "backend", "'nccl'"):
        trainer(backend="nccl")


def test_a_batch_smaller_than_the_gang_is_refused() -> None:
    with refused(ValueError, "config[BATCH_SIZE]", "1", "2"):
        trainer(config={BATCH_SIZE: 1})


def test_there_is_room_for_fewer_or_for_too_few(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(executor=Local(slots=1)) as its:
        assert len(its.apply_all_workers(os.getpid)) == 1
    assert unnamed(caplog.text, "num_workers is 2", 1) == []
    with refused(ValueError, "min_workers", "2", "1"):
        trainer(executor=Local(slots=1), min_workers=2)


@pytest.mark.parametrize("executor", [None, "local", Local(2)])
def test_a_gpu_that_this_machine_does_not_have_is_refused(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with refused(ValueError, "use_gpu", "True", "'auto'", "executor"):
        trainer(executor=executor, use_gpu=True)
