"""Training loops of users, on real agents and real ranks of this machine."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.errors import UsageError
from hpc_det.sgd.driver.fitting import Result, fit
from hpc_det.sgd.rank import train_loop
from hpc_det.sgd.rank.train_loop import Checkpoint, get_context, prepare_data_loader, prepare_model, report
from tests.facts import refused
from tests.sgd.local_nodes import LocalNodes
from tests.wait import DEADLINE_S, wait_for


def run(function: Any, folder: Path, **arguments: Any) -> Result:
    return fit(function, **{"executor": LocalNodes(1, 2), "num_workers": 2, "run": folder / "run", **arguments})


def count_to(config: dict[str, Any]) -> None:
    """Report 1, 2, ... with a file of each rank, and kill rank 1 once before the step `fatal`."""
    context = get_context()
    rank, mark, done = context.get_world_rank(), Path(config["mark"]), 0
    if checkpoint := context.get_checkpoint():
        with checkpoint.as_directory() as folder:
            done = json.loads(Path(folder, "sub", f"rank-{rank}.json").read_text())
    for step in range(done + 1, config["steps"] + 1):
        if rank == 1 and step == config.get("fatal") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sub").mkdir()
            Path(folder, "sub", f"rank-{rank}.json").write_text(json.dumps(step))
            report({"step": step, "pid": os.getpid(), "loss": abs(step - 2)}, Checkpoint.from_directory(folder))


def test_a_killed_rank_costs_what_came_after_the_last_checkpoint(tmp_path: Path) -> None:
    config = {"steps": 4, "fatal": 3, "mark": str(tmp_path / "mark")}
    result = run(count_to, tmp_path, train_loop_config=config, num_to_keep=1, metric="loss")
    assert [metrics["step"] for metrics in result.metrics_history] == [1, 2, 3, 4]
    pids = [metrics["pid"] for metrics in result.metrics_history]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert (tmp_path / "mark").exists()
    assert result.checkpoint
    assert sorted(path.name for path in Path(result.checkpoint.path, "sub").iterdir()) == ["rank-0.json", "rank-1.json"]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2, 4]
    again = run(count_to, tmp_path, train_loop_config=config)  # all steps are done already
    assert again.metrics == result.metrics


@pytest.mark.long
def test_a_loop_that_hangs_begins_anew_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.gang.STACKS_S", DEADLINE_S)

    def hangs(config: dict[str, Any]) -> None:
        if get_context().get_checkpoint() and get_context().get_world_rank() == 1 and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            signal.pause()
        count_to(config)

    config = {"steps": 3, "fatal": 2, "mark": str(tmp_path / "mark")}
    result = run(hangs, tmp_path, train_loop_config=config, hang_timeout_s=4)
    assert [metrics["step"] for metrics in result.metrics_history] == [1, 2, 3]
    logs = (tmp_path / "run" / "logs").glob("attempt-*/rank-1.log")
    assert "in hangs" in "".join(log.read_text() for log in logs)


def train_line(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    model = prepare_model(nn.Linear(1, 1))
    loader = prepare_data_loader(DataLoader(TensorDataset(x, 2 * x + 5), batch_size=8, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(config["epochs"]):
        seen = 0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen += len(inputs)
        weight, bias = (parameter.item() for parameter in model.parameters())
        report({"loss": loss, "weight": weight, "bias": bias, "seen": seen})


def test_two_ranks_share_the_data_and_find_the_line(tmp_path: Path) -> None:
    result = run(train_line, tmp_path, train_loop_config={"epochs": 15}, executor="local")
    assert result.metrics
    assert result.metrics["seen"] == 32
    assert result.metrics["weight"] == pytest.approx(2, abs=0.2)
    assert result.metrics["bias"] == pytest.approx(5, abs=0.2)
    assert result.checkpoint is None


def test_a_users_exception_is_raised_at_once_with_the_ranks_traceback(tmp_path: Path) -> None:
    def fails() -> None:
        if get_context().get_world_rank() == 1:
            raise KeyError("a mistake of mine")
        report({})

    with refused(KeyError, "a mistake of mine") as caught:
        run(fails, tmp_path)
    assert "raise KeyError" in str(caught.value.__cause__)


def test_ranks_that_report_unequally_often_are_told(tmp_path: Path) -> None:
    def unequal() -> None:
        if get_context().get_world_rank() == 0:
            report({})

    with refused(UsageError, "rank 0", "(report 1)", "rank 1", "(report 0)"):
        run(unequal, tmp_path)


def test_outside_a_loop_there_is_no_context() -> None:
    with refused(RuntimeError, "get_context"):
        train_loop.get_context()


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        fit(3, num_workers=(2, 1), max_failures=-1, num_to_keep=0, run=tmp_path / "run")  # type: ignore[arg-type]
    assert len(refused.value.problems) == 4
    assert not (tmp_path / "run").exists()


def tell_sizes(config: dict[str, Any]) -> None:
    """Report the size of the gang until it was 2, 1 and 2 again; a file requests each change."""
    context = get_context()
    sizes: list[int] = []
    if checkpoint := context.get_checkpoint():
        sizes = json.loads(Path(checkpoint.path, "sizes.json").read_text())
    while len(sizes) < 3:
        sizes = sizes if sizes[-1:] == [context.get_world_size()] else [*sizes, context.get_world_size()]
        given = None
        with tempfile.TemporaryDirectory() as folder:
            if context.get_world_rank() == 0:
                Path(folder, "sizes.json").write_text(json.dumps(sizes))
                given = Checkpoint.from_directory(folder)
            report({"sizes": sizes}, given)
        Path(config["folder"], f"had-{len(sizes)}").touch()
        time.sleep(0.01)  # the time of a batch


def test_a_gang_shrinks_when_a_node_is_lost_and_grows_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.fitting.RESIZE_S", 0.0)
    nodes = LocalNodes(2)

    def take_and_give_back() -> None:
        wait_for((tmp_path / "had-1").exists, DEADLINE_S)
        nodes.take(1)
        wait_for((tmp_path / "had-2").exists, DEADLINE_S)
        nodes.give_back()

    world = threading.Thread(target=take_and_give_back)
    world.start()
    result = run(tell_sizes, tmp_path, train_loop_config={"folder": str(tmp_path)}, num_workers=(1, 2), executor=nodes)
    world.join()
    assert result.metrics == {"sizes": [2, 1, 2]}
