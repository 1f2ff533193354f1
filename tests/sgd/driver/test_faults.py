"""The reaction of TorchTrainer to the end of ranks, agents, nodes and drivers: real processes, which are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hpc_det.checkpoint.snapshots import newest
from hpc_det.errors import UsageError
from hpc_det.node.process import children, descendants, has_no_memory
from hpc_det.sgd import TorchTrainer, TrainingOperator
from hpc_det.sgd.driver.elastic import ElasticGang
from hpc_det.sgd.driver.failures import NotEnoughRanks, RetriesUsedUp, StateLost
from hpc_det.sgd.driver.gang import RankGang
from hpc_det.sgd.driver.trainer import TrainerIsShutDown
from tests.facts import refused, unnamed
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear, weights
from tests.wait import DEADLINE_S, wait_for


def size_of(its: TorchTrainer) -> int:
    return len(its.apply_all_workers(os.getpid))


def test_a_gang_shrinks_when_a_node_is_lost_and_grows_when_it_is_back() -> None:
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes, config={"*batch_size": 8}) as its:
        assert its.train()["batch_count"] == 8
        nodes.take(1)
        shrunk = its.train()
        assert (shrunk["epoch"], shrunk["batch_count"], size_of(its)) == (2, 8, 1)
        nodes.give_back()
        its.train()  # the driver receives the connection of the new agent
        wait_for(lambda: its.train()["num_samples"] == 64 and size_of(its) == 2, DEADLINE_S)


def test_the_node_of_rank_0_may_be_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.gang.LAST_REPORT_S", 3600.0)  # no agent is left there to report
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes) as its:
        before = its.train()
        nodes.take(0)
        nodes.give_back()
        after = its.train()
        assert after["epoch"] == 2
        assert after["train_loss"] < before["train_loss"]


def test_the_other_node_that_holds_the_newest_snapshot_makes_it_durable() -> None:
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes, run="mine") as its:
        its._open_gang._is_durable = False
        its.train()
        its._open_gang._is_durable = True
        nodes.take(0)
        while its._open_gang._nodes.slots > 1:
            its._open_gang._nodes.hear(1)
    durable = newest(its._run.folder)
    assert durable
    assert durable.epochs_done == 1


def test_a_state_that_nobody_holds_any_more_is_an_error_at_once() -> None:
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes, startup_timeout_s=3600) as its:
        its.train()
        nodes.take(0)
        nodes.take(1)
        for _ in range(2):  # no node is waited for, and a second call does not start from scratch
            with refused(StateLost, "train() call 1", "run=NAME"):
                its.train()
        assert isinstance(StateLost("it"), RuntimeError)


def test_what_was_loaded_is_a_state_too_and_setup_alone_is_none() -> None:
    nodes = LocalNodes(1)
    with TorchTrainer(training_operator_cls=Linear, executor=nodes) as its:
        loaded = its.state_dict()
        nodes.take(0)
        nodes.give_back()
        its.load_state_dict(loaded)
        nodes.take(0)
        nodes.give_back()
        with refused(StateLost, "call 0"):
            its.train()


def test_with_a_run_the_newest_state_on_the_disk_is_gone_on_from(caplog: pytest.LogCaptureFixture) -> None:
    nodes = LocalNodes(1)
    with TorchTrainer(training_operator_cls=Linear, executor=nodes, run="mine") as its:
        its.train()
        its._open_gang._settle()
        its._open_gang._is_durable = False
        its.train()
        its._open_gang._is_durable = True
        nodes.take(0)
        nodes.give_back()
        assert its.train()["epoch"] == 2
        assert list(its.remaining(2)) == []
    assert unnamed(caplog.text, "train() call 2", "call 1") == []


def test_a_call_that_begins_before_a_state_that_was_lost_counts_as_a_round() -> None:
    nodes, asked = LocalNodes(1), list[int]()
    with TorchTrainer(training_operator_cls=Linear, executor=nodes, run="mine") as its:
        for epoch in its.remaining(3):
            asked.append(epoch)
            if len(asked) == 2:
                its._open_gang._settle()
                its._open_gang._is_durable = False
            if len(asked) == 3:
                its._open_gang._is_durable = True
                nodes.take(0)
                nodes.give_back()
            its.train()
        assert asked == [0, 1, 2, 2]
        assert its.epochs_done == 3


def test_what_was_loaded_is_on_the_disk_when_load_returns() -> None:
    with TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1), run="mine") as its:
        loaded = its.state_dict()
        its.train()
        its.load_state_dict(loaded)
        durable = newest(its._run.folder)
        assert durable
        assert durable.number == its._open_gang._number


def test_fewer_than_min_workers_wait_and_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, min_workers=2, executor=nodes) as its:
        nodes.take(1)
        monkeypatch.setattr("hpc_det.sgd.driver.nodes.DEFAULT_START_S", 1.0)
        with refused(NotEnoughRanks, "2 ranks", 1, "startup_timeout_s", "1 of 2 agents") as caught:
            its.train()
        assert isinstance(caught.value, TimeoutError)


def test_retries_are_counted_and_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.gang.LAST_REPORT_S", DEADLINE_S)

    class Fatal(Linear):
        def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

    with TorchTrainer(training_operator_cls=Fatal, executor=LocalNodes(1)) as its:
        with refused(RuntimeError, "SIGKILL", "2", "max_retries is 1") as caught:
            its.train(max_retries=1)
        assert isinstance(caught.value, RetriesUsedUp)


def test_ranks_that_a_killed_fork_server_was_to_fork_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    await_ranks = RankGang._await_ranks
    before = children(os.getpid())
    killed: list[int] = []

    def kill_once(gang: RankGang) -> None:
        if not killed:
            (agent,) = set(children(os.getpid())) - set(before)
            killed.extend(children(agent))
            os.kill(killed[0], signal.SIGKILL)
        await_ranks(gang)

    monkeypatch.setattr(RankGang, "_await_ranks", kill_once)
    monkeypatch.setattr("hpc_det.sgd.driver.gang.JOIN_S", 3600.0)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor="local") as its:
        assert its.train()["epoch"] == 1
    assert len(killed) == 1


def test_ranks_that_cannot_be_forked_are_told_of_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("hpc_det.sgd.driver.failures.FIRST_PAUSE_S", 0.0)
    with refused(RetriesUsedUp, "exit code 1", "ImportError: libcudart.so.99", f"node-{socket.gethostname()}.log"):
        TorchTrainer(training_operator_cls=Linear, executor="local")


def test_a_death_that_is_heard_before_the_call_is_made_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.gang.RANK_SILENT_S", 30.0)
    place = ElasticGang._place

    def kill_first(elastic: ElasticGang) -> Any:
        (rank,) = elastic._gang.ranks
        if elastic._nodes.generation == 1:
            os.kill(rank.pid or 0, signal.SIGKILL)
            while rank.code is None or not getattr(rank.line, "is_dropped", True):  # reported, and disconnected
                elastic._nodes.hear(1)
        return place(elastic)

    with TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1)) as its:
        monkeypatch.setattr(ElasticGang, "_place", kill_first)
        assert its.train()["epoch"] == 1
    assert unnamed(caplog.text, "rank 0", "SIGKILL") == []


def test_a_stopped_agent_is_missed_by_its_heartbeat() -> None:
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes) as its:
        its.train()
        stopped = [nodes.agents[1].pid, *descendants(nodes.agents[1].pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        agents: Any = its._open_gang._nodes
        agents.attentive_since -= 1000
        for line in [node.line for node in agents._nodes if node.line.identity["pid"] == stopped[0]]:
            line.heard_at = time.monotonic() - 9  # of the timeout of 10 s; the other agent keeps sending heartbeats
        assert its.train()["epoch"] == 2
        assert size_of(its) == 1
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGKILL)
        nodes.agents[1].wait()


def test_nobody_was_silent_while_the_driver_did_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.gang.POLL_S", 0.05)
    with TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1)) as its:
        gang = its._open_gang._gang
        gang.nodes._clock._looked_at -= 1000
        for line in [node.line for node in gang.nodes._nodes] + [rank.line for rank in gang.ranks]:
            line.heard_at -= 1000  # type: ignore[union-attr, misc]
        its.apply_all_workers(lambda: time.sleep(0.3))  # the nodes are monitored meanwhile
        assert gang.nodes.generation == 1


def test_a_gang_that_hangs_is_ended_and_tried_again(tmp_path: Path) -> None:
    class Hangs(Linear):
        def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            if self.world_rank == 1 and batch_info["global_step"] == 5 and not (tmp_path / "once").exists():
                (tmp_path / "once").touch()
                signal.pause()
            return super().train_batch(batch, batch_info)

    with TorchTrainer(training_operator_cls=Hangs, num_workers=2, executor=LocalNodes(1, 2), hang_timeout_s=4) as its:
        assert its.train()["epoch"] == 1
        assert (tmp_path / "once").exists()


class OneBroken(LocalNodes):
    """A capacity on whose first node every rank is killed as soon as it starts, until the node's agent is replaced."""

    def __init__(self, mark: Path) -> None:
        super().__init__(2)
        self.mark = mark

    def start(self, run: Path, wanted: int) -> None:
        super().start(run, wanted)
        self.mark.write_text(str(self.agents[0].pid))

    def hook(self) -> Callable[[], None]:
        mark = self.mark

        def die_there() -> None:
            fork_server = Path(f"/proc/{os.getppid()}/stat").read_text()
            if fork_server.rpartition(")")[2].split()[1] == mark.read_text():
                os.kill(os.getpid(), signal.SIGKILL)

        return die_there


def test_a_node_where_no_gang_can_be_formed_is_left_out_until_it_comes_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = OneBroken(tmp_path / "agent")
    with TorchTrainer(
        training_operator_cls=Linear, num_workers=2, executor=nodes, initialization_hook=nodes.hook()
    ) as its:
        assert its.train()["epoch"] == 1
        assert size_of(its) == 1
        assert unnamed(caplog.text, f"{socket.gethostname()}: ", "its agent") == []
        nodes.take(0)
        nodes.give_back()
        wait_for(lambda: its.train() and size_of(its) == 2, DEADLINE_S)


def cut_all_but(port: int) -> None:
    """Shut down every TCP connection of this process except those to this port."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername()[1] != port:
                connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.long
def test_ranks_that_cannot_talk_to_each_other_are_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Cut(Linear):
        def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            if self.world_rank == 1 and batch_info["global_step"] == 3 and (tmp_path / "port").exists():
                cut_all_but(int((tmp_path / "port").read_text()))
                (tmp_path / "port").unlink()
            return super().train_batch(batch, batch_info)

    with TorchTrainer(training_operator_cls=Cut, num_workers=2, executor=LocalNodes(1, 2)) as its:
        (tmp_path / "port").write_text(str(its._open_gang._nodes.address[1]))
        with refused(RetriesUsedUp, "RuntimeError", "gloo"):
            its.train(max_retries=0)
        (tmp_path / "port").write_text(str(its._open_gang._nodes.address[1]))
        assert its.train()["epoch"] == 1
        assert not (tmp_path / "port").exists()
    assert unnamed(caplog.text, "RuntimeError", "gloo") == []


def hang_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        signal.pause()


def stacks(run: Path) -> str:
    return "".join(log.read_text() for log in (run / "logs").glob("attempt-*/rank-1.log"))


@pytest.fixture
def _waits_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the stacks of the ranks as long as the test may run."""
    monkeypatch.setattr("hpc_det.sgd.driver.gang.STACKS_S", DEADLINE_S)


@pytest.mark.long
@pytest.mark.usefixtures("_waits_for_stacks")
def test_a_setup_that_hangs_is_tried_again(tmp_path: Path) -> None:
    class Hangs(Linear):
        def setup(self, config: dict[str, Any]) -> None:
            if self.world_rank == 1:
                hang_once(tmp_path / "once")
            super().setup(config)

    with TorchTrainer(
        training_operator_cls=Hangs, num_workers=2, executor=LocalNodes(1, 2), hang_timeout_s=4, run=tmp_path / "run"
    ) as its:
        assert its.train()["epoch"] == 1
        assert "in hang_once" in stacks(tmp_path / "run")


@pytest.mark.long
@pytest.mark.usefixtures("_waits_for_stacks")
def test_a_function_that_hangs_on_one_rank_is_called_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def at_rank_1(operator: TrainingOperator) -> int:
        if operator.world_rank == 1:
            hang_once(tmp_path / "once")
        return operator.global_step

    with TorchTrainer(
        training_operator_cls=Linear, num_workers=2, executor=LocalNodes(1, 2), hang_timeout_s=4, run=tmp_path / "run"
    ) as its:
        its.train(num_steps=3)
        assert its.apply_all_operators(at_rank_1) == [3, 3]
        assert "in hang_once" in stacks(tmp_path / "run")
    assert unnamed(caplog.text, "rank 1: function, hang_once (test_faults.py") == []


DRIVER = """
import os, sys, time
from hpc_det.sgd import TorchTrainer, TrainingOperator
from tests.sgd.trained import Linear

run = next(iter(sys.argv[2:]), None)
trainer = TorchTrainer(training_operator_cls=Linear, num_workers=2, executor="local", run=run)
for epoch in trainer.remaining(4):
    print(epoch, trainer.train()["train_loss"], flush=True)
    if epoch == int(sys.argv[1]):
        sys.stdin.read(1)
"""


def test_a_killed_driver_goes_on_after_its_last_call_bit_for_bit() -> None:
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=LocalNodes(1, 2)) as undisturbed:
        expected = [undisturbed.train()["train_loss"] for _ in range(4)]
        expected_weights = weights(undisturbed)
    driver = [sys.executable, "-c", DRIVER, "1", "mine"]
    with subprocess.Popen(driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout
        found = [float(killed.stdout.readline().split()[1]) for _ in range(2)]
        its = descendants(killed.pid)
        killed.kill()
    wait_for(lambda: all(map(has_no_memory, its)), DEADLINE_S)  # and the snapshot in its agent's memory is on the disk
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor="local", run="mine") as second:
        found[1:] = [second.train()["train_loss"] for _ in second.remaining(4)]  # round 1 was not finished
        found_weights = weights(second)
    assert found == expected
    assert all(torch.equal(found_weights[name], value) for name, value in expected_weights.items())


def test_a_run_has_one_driver_at_a_time() -> None:
    with TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1), run="mine") as its:
        with refused(UsageError, "sgd/mine: ", f"127.0.0.1:{its._open_gang._nodes.address[1]}"):
            TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1), run="mine")
        assert its.train()["epoch"] == 1
    with TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1), run="mine") as its:
        assert its.epochs_done == 1


AT_ONCE = """
import sys
from hpc_det.errors import UsageError
from hpc_det.sgd import TorchTrainer
from tests.sgd.trained import Linear

print("ready", flush=True)
sys.stdin.readline()
try:
    trainer = TorchTrainer(training_operator_cls=Linear, executor="local", run="mine")
    print("epoch", trainer.train()["epoch"], flush=True)
    sys.stdin.readline()
except UsageError as error:
    print(error, flush=True)
"""


@pytest.mark.long
def test_of_two_drivers_that_start_at_once_one_has_the_run() -> None:
    drivers = [
        subprocess.Popen([sys.executable, "-c", AT_ONCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with drivers[0], drivers[1]:
        assert [driver.stdout.readline() for driver in drivers if driver.stdout] == ["ready\n"] * 2
        for driver in drivers:
            assert driver.stdin
            driver.stdin.write("go\n")
            driver.stdin.flush()
        said = sorted(driver.stdout.readline() for driver in drivers if driver.stdout)
    assert unnamed(said[0], "sgd/mine: ", "127.0.0.1:") == []
    assert said[1] == "epoch 1.0\n"


def test_ctrl_c_leaves_no_process_and_no_file(state_folder: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with driver:
        assert driver.stdout
        driver.stdout.readline()
        its = descendants(driver.pid)
        assert len(its) >= 4  # the agent, the fork server and two ranks
        os.killpg(driver.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in driver.communicate(timeout=DEADLINE_S)[1]
    wait_for(lambda: all(map(has_no_memory, its)), DEADLINE_S)
    assert not list((state_folder / "sgd").iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long), (signal.SIGKILL, -9)]
)
def test_a_driver_that_is_ended_leaves_no_process_and_no_file(number: int, code: int, state_folder: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout
        driver.stdout.readline()
        its = descendants(driver.pid)
        assert list((state_folder / "sgd").iterdir())
        driver.send_signal(number)
        assert driver.wait(timeout=DEADLINE_S) == code
    wait_for(lambda: all(map(has_no_memory, its)), DEADLINE_S)
    assert not list((state_folder / "sgd").iterdir())


def test_agents_that_leave_at_a_shutdown_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = LocalNodes(2)
    its = TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes)
    monkeypatch.setattr("hpc_det.sgd.driver.nodes.POLL_S", 0.0)
    before = nodes.renewals
    its.shutdown()
    assert nodes.renewals == before


def test_a_call_is_undone_however_often_ctrl_c_is_pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    with TorchTrainer(training_operator_cls=Linear, executor=LocalNodes(1)) as its:
        with monkeypatch.context() as patched:
            patched.setattr("hpc_det.sgd.driver.elastic.ElasticGang._take", Mock(side_effect=KeyboardInterrupt))
            patched.setattr("hpc_det.sgd.driver.gang.RankGang.end", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                its.train()
        assert its.train()["epoch"] == 1


def test_nothing_is_left_after_a_shutdown(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descendants(os.getpid())
    its = TorchTrainer(training_operator_cls=Linear, num_workers=2, executor="local")
    processes = set(descendants(os.getpid())) - set(before)
    its.train()
    with monkeypatch.context() as patched:
        patched.setattr("hpc_det.sgd.driver.nodes.Nodes.close", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            its.shutdown()
    its.shutdown()
    assert all(map(has_no_memory, processes))
    assert not list((state_folder / "sgd").iterdir())
    with refused(TrainerIsShutDown):
        its.train()
    assert torch.is_grad_enabled()
