"""The loggers with fake integrations: slow, raising and hanging ones, and forked processes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hpc_det.core import loggers
from hpc_det.core.loggers import LoggedTrial, Loggers, scalars
from hpc_det.node.json_files import read_lines
from hpc_det.store.folders import TrialFolder

SPEC = {"experiment_id": 12, "trial_id": 3, "hparams": {"lr": 0.1}, "config": {"name": "digits", "labels": ["a"]}}
WAIT_S = 30.0


class Fake:
    """A logger that records its calls. `gate`: it waits for this event in each call; `raises`: raised by `report`."""

    def __init__(self, settings: Mapping[str, Any], trial: LoggedTrial) -> None:
        self.settings, self.trial = settings, trial
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[threading.Thread] = set()
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.raises: BaseException | None = None
        self.is_offline = False

    def _called(self, *call: Any) -> None:
        self.entered.set()
        self.threads.add(threading.current_thread())
        if self.gate:
            assert self.gate.wait(WAIT_S)
        self.calls.append(call)

    def begin(self, steps: int) -> None:
        self._called("begin", steps)

    def report(self, group: str, steps: int, metrics: Mapping[str, float]) -> None:
        self._called("report", group, steps, dict(metrics))
        if self.raises:
            raise self.raises

    def checkpoint(self, steps: int, path: str) -> None:
        self._called("checkpoint", steps, path)

    def end(self, kind: str) -> None:
        self._called("end", kind)


Start = Callable[..., tuple[Loggers, list[Fake]]]


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    folder = TrialFolder(tmp_path / "trials" / "3")
    folder.path.mkdir(parents=True)
    return folder


@pytest.fixture
def start(trial: TrialFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that makes loggers with fake integrations; all gates are opened at the end."""
    made: list[Fake] = []

    def logger(settings: Mapping[str, Any], logged: LoggedTrial) -> Fake:
        made.append(Fake(settings, logged))
        return made[-1]

    def begin(*kinds: str, attempt: int = 1) -> tuple[Loggers, list[Fake]]:
        for kind in kinds:
            module = ModuleType(f"hpc_det.integrations.{kind}")
            vars(module)["logger"] = logger
            monkeypatch.setitem(sys.modules, module.__name__, module)
        before = len(made)
        entries = [{kind: {"mode": "online"}, "other": None} for kind in kinds]
        return Loggers.of(entries, trial, SPEC, attempt), made[before:]

    yield begin
    for fake in made:
        if fake.gate:
            fake.gate.set()


def test_calls_arrive_in_their_order_in_a_thread_of_the_logger(start: Start) -> None:
    found, (fake,) = start("one")
    found.begin(0)
    found.report("training", 10, {"loss": torch.tensor(0.5), "by_class": {"a": 1}, "name": "text"})
    found.checkpoint(10, Path("/c"))
    found.end("finished")
    assert fake.calls == [
        ("begin", 0),
        ("report", "training", 10, {"loss": 0.5, "by_class/a": 1.0}),
        ("checkpoint", 10, "/c"),
        ("end", "finished"),
    ]
    assert len(fake.threads) == 1
    assert threading.current_thread() not in fake.threads


def test_a_logger_receives_the_facts_of_the_trial(start: Start, trial: TrialFolder) -> None:
    _, (fake,) = start("one", attempt=4)
    logged = fake.trial
    assert (logged.experiment, logged.trial, logged.attempt) == (12, 3, 4)
    assert (logged.name, logged.labels, logged.hyperparameters) == ("digits", ["a"], {"lr": 0.1})
    assert (logged.folder, logged.folder.is_dir()) == (trial.loggers / "one", True)
    assert fake.settings == {"mode": "online"}


def test_a_later_attempt_knows_what_was_sent(start: Start, trial: TrialFolder) -> None:
    found, _ = start("one")
    found.begin(0)
    for steps in (100, 200, 300):
        found.report("training", steps, {"loss": 1})
    found.report("validation", 200, {"accuracy": 1})
    found.end("failed")
    _, (fake,) = start("one", attempt=2)
    assert fake.trial.reported == {"training": 300, "validation": 200}
    assert fake.trial.calls == 5
    assert read_lines(trial.logger_calls("one"))[0] == {"attempt": 1, "call": "begin", "steps": 0}


def test_a_call_that_did_not_return_does_not_count_as_sent(start: Start) -> None:
    found, (fake,) = start("one")
    fake.raises = ValueError("lost")
    found.begin(0)
    found.report("training", 100, {"loss": 1})
    found.end("finished")
    assert start("one", attempt=2)[1][0].trial.reported == {}


def test_training_does_not_wait_for_a_server_that_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "END_WAIT_S", 0.05)
    found, (fake,) = start("one")
    fake.gate = threading.Event()
    found.begin(0)
    assert fake.entered.wait(WAIT_S)
    found.report("training", 1, {"loss": 1})
    found.checkpoint(1, Path("/c"))
    found.end("stopped")
    assert fake.calls == []  # all of these calls have returned before the first one of the library


def test_a_logger_that_hangs_does_not_delay_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "END_WAIT_S", 0.05)
    found, (hangs, works) = start("one", "two")
    hangs.gate = threading.Event()
    found.begin(0)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "hpc-det-two"]
    found.report("training", 1, {"loss": 1})
    found.end("finished")
    thread.join(WAIT_S)
    assert [call[0] for call in works.calls] == ["begin", "report", "end"]
    assert hangs.calls == []


def test_the_end_waits_longer_for_a_logger_that_writes_to_local_files(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "END_WAIT_S", 0.0)
    found, (fake,) = start("one")
    fake.gate = threading.Event()
    fake.is_offline = True
    found.begin(0)
    assert fake.entered.wait(WAIT_S)
    found.report("training", 1, {"loss": 1})
    threading.Timer(0.05, fake.gate.set).start()
    found.end("finished")
    assert [call[0] for call in fake.calls] == ["begin", "report", "end"]


def test_a_deadline_counts_for_a_logger_that_writes_to_local_files(start: Start) -> None:
    found, (fake,) = start("one")
    fake.gate = threading.Event()
    fake.is_offline = True
    found.begin(0)
    began = time.monotonic()
    found.end("stopped", deadline=time.time() + 0.05)
    assert time.monotonic() - began < loggers.END_WAIT_S
    assert fake.calls == []


def test_a_passed_deadline_leaves_no_time(start: Start) -> None:
    found, (fake,) = start("one")
    fake.gate = threading.Event()
    found.begin(0)
    began = time.monotonic()
    found.end("stopped", deadline=time.time() - 1)
    assert time.monotonic() - began < loggers.END_WAIT_S


@pytest.mark.parametrize("error", [RuntimeError("refused\nby the server"), SystemExit(3)])
def test_an_exception_is_printed_once_and_disables_the_logger(
    start: Start, capfd: pytest.CaptureFixture[str], error: BaseException
) -> None:
    found, (fails, works) = start("one", "two")
    fails.raises = error
    found.begin(0)
    for steps in range(3):
        found.report("training", steps, {"loss": 1})
    found.end("finished")
    assert [call[0] for call in fails.calls] == ["begin", "report"]
    assert [call[0] for call in works.calls] == ["begin", "report", "report", "report", "end"]
    out = capfd.readouterr().out
    assert out.count("one") == 1
    assert type(error).__name__ in out
    assert str(error).splitlines()[0] in out


def test_a_message_contains_no_secret(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    found, (fake,) = start("one")
    fake.raises = RuntimeError("key 0123456789abcdef, server https://ada:hunter2@example.org/x")
    found.begin(0)
    found.report("training", 1, {"loss": 1})
    found.end("finished")
    out = capfd.readouterr().out
    assert "example.org/x" in out
    assert not [secret for secret in ("0123456789abcdef", "hunter2") if secret in out]


def test_a_full_queue_drops_reports_and_still_ends(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "QUEUE_CALLS", 3)
    found, (fake,) = start("one")
    fake.gate = threading.Event()
    found.begin(0)
    assert fake.entered.wait(WAIT_S)
    for steps in range(100):
        found.report("training", steps, {"loss": 1})
    threading.Timer(0, fake.gate.set).start()
    found.end("finished")
    assert fake.calls[0] == ("begin", 0)
    assert fake.calls[-1] == ("end", "finished")
    assert len(fake.calls) <= 5
    assert "one" in capfd.readouterr().out


def test_a_missing_package_is_named_with_the_remedy(
    trial: TrialFolder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "hpc_det.integrations.wandb", raising=False)
    found = Loggers.of([{"wandb": {}, "mlflow": None}], trial, SPEC, 1)
    assert "hpc_det[wandb]" in capfd.readouterr().out
    found.begin(0)
    found.report("training", 1, {"loss": 1})
    found.end("finished")


@pytest.mark.parametrize("entries", [None, []])
def test_without_loggers_there_is_no_thread(trial: TrialFolder, entries: Any) -> None:
    before = threading.active_count()
    found = Loggers.of(entries, trial, SPEC, 1)
    found.begin(0)
    found.report("training", 1, {"loss": 1})
    assert threading.active_count() == before
    assert not trial.loggers.exists()


def test_loggers_that_never_began_end_at_once(start: Start) -> None:
    found, (fake,) = start("one")
    found.end("failed")
    assert fake.calls == []


@pytest.mark.integration
@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # Python 3.12: the logger has a thread, as in a training
def test_a_forked_worker_of_a_data_loader_has_no_loggers(start: Start) -> None:
    found, (fake,) = start("one")
    found.begin(0)
    pid = os.fork()
    if not pid:
        os._exit(7 if not found._senders else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    found.report("training", 1, {"loss": 1})
    found.end("finished")
    assert [call[0] for call in fake.calls] == ["begin", "report", "end"]


def test_names_of_nested_metrics_are_joined() -> None:
    assert scalars({"a": {"b": {"c": 1}}, "d": None, "e": float("inf")}) == {"a/b/c": 1.0, "e": float("inf")}
