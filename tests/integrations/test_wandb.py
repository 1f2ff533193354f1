"""W&B with a fake of its module, one real offline run, and a fake of `wandb sync`."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_json
from tests.integrations.conftest import Logged

pytestmark = pytest.mark.integration  # the import of wandb takes long


class FakeRun:
    url = "https://wandb.example.org/ada/p/runs/1"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.steps: list[int | None] = []
        self.defined: list[tuple[str, str | None]] = []
        self.preempting = False
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.rows.append(row)
        self.steps.append(step)

    def mark_preempting(self) -> None:
        self.preempting = True

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb:
    """Stands in for the module. `refuses`: raised by init in mode online."""

    Settings = dict
    run = None

    def __init__(self) -> None:
        self.torn_down = 0
        self.inits: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.refuses: Exception | None = None

    def teardown(self) -> None:
        self.torn_down += 1

    def init(self, **arguments: Any) -> FakeRun:
        self.inits.append(arguments)
        if self.refuses and arguments["mode"] == "online":
            raise self.refuses
        self.runs.append(FakeRun())
        return self.runs[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    from hpc_det.integrations import wandb

    made = FakeWandb()
    monkeypatch.setattr(wandb, "wandb", made)
    monkeypatch.setattr(wandb, "insist_on_answer", lambda url: None)
    return made


def logger(logged: Logged, attempt: int = 1, mode: str = "online", **settings: Any) -> Any:
    from hpc_det.integrations import wandb

    facts = {key: settings.pop(key) for key in ("reported", "calls") if key in settings}
    return wandb.logger({"mode": mode, **settings}, logged(attempt, **facts))


def test_a_run_has_the_group_the_settings_and_the_hyperparameters(fake: FakeWandb, logged: Logged) -> None:
    logger(logged, project="p", entity="e", tags=["x", "demo"], base_url="https://wandb.example.org").begin(0)
    (init,) = fake.inits
    assert (init["project"], init["entity"], init["mode"]) == ("p", "e", "online")
    assert (init["group"], init["resume"]) == ("digits ä/é", "allow")
    assert init["tags"] == ["demo", "x"]
    assert init["config"] == {"lr": 0.1, "net": {"width": 64}, "hpc_det": {"experiment": 12, "trial": 3}}
    assert init["settings"]["base_url"] == "https://wandb.example.org"


def test_all_attempts_have_the_same_run_id_which_is_saved_before_the_first_init(
    fake: FakeWandb, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    path = logged().folder / "run.json"
    init = fake.init

    def looking(**arguments: Any) -> FakeRun:
        saved.append(read_json(path))
        return init(**arguments)

    monkeypatch.setattr(fake, "init", looking)
    for attempt in (1, 2):
        logger(logged, attempt).begin(0)
    ids = {init["id"] for init in fake.inits}
    assert saved == [{"id": ids.copy().pop()}] * 2
    assert len(ids) == 1
    assert re.fullmatch(r"[A-Za-z0-9_-]{8,64}", ids.pop())


def test_another_trial_has_another_run_id(fake: FakeWandb, logged: Logged) -> None:
    logger(logged).begin(0)
    (logged().folder / "run.json").unlink()
    logger(logged).begin(0)
    assert fake.inits[0]["id"] != fake.inits[1]["id"]


def test_rows_have_the_batches_as_x_axis_and_no_step(fake: FakeWandb, logged: Logged) -> None:
    made = logger(logged)
    made.begin(0)
    made.report("training", 100, {"loss": 0.5})
    made.checkpoint(100, "/c/uuid")
    (run,) = fake.runs
    assert ("*", "batches") in run.defined
    assert run.rows == [{"batches": 100, "training/loss": 0.5}, {"batches": 100, "hpc_det/checkpoint": "/c/uuid"}]
    assert run.steps == [None, None]


def test_a_later_attempt_marks_where_it_resumed_and_repeats_the_lost_stretch(fake: FakeWandb, logged: Logged) -> None:
    made = logger(logged, 2, reported={"training": 300}, calls=4)
    made.begin(200)
    made.report("training", 300, {"loss": 0.4})
    assert fake.runs[0].rows == [
        {"batches": 200, "hpc_det/resumed_at": 200, "hpc_det/attempt": 2},
        {"batches": 300, "training/loss": 0.4},
    ]
    assert fake.runs[0].steps == [None, None]


def test_an_offline_attempt_counts_its_rows_after_those_of_earlier_attempts(fake: FakeWandb, logged: Logged) -> None:
    made = logger(logged, 3, "offline", calls=10)
    made.begin(200)
    made.report("training", 300, {"loss": 0.4})
    first, second = fake.runs[0].steps
    assert first is not None
    assert second == first + 1
    assert first > 10 + 1  # the calls, and the rows at the beginning of attempts 2 and 3


@pytest.mark.parametrize(
    ("kind", "code", "preempting"),
    [("finished", 0, False), ("waiting", 0, False), ("stopped", 1, True), ("failed", 1, False)],
)
def test_a_run_ends_as_the_attempt_does(
    fake: FakeWandb, logged: Logged, kind: str, code: int, preempting: bool
) -> None:
    made = logger(logged)
    made.begin(0)
    made.end(kind)
    assert (fake.runs[0].exit_code, fake.runs[0].preempting) == (code, preempting)


def test_without_a_server_the_attempt_is_logged_offline(fake: FakeWandb, logged: Logged, said: list[str]) -> None:
    fake.refuses = RuntimeError("no route")
    logger(logged).begin(0)
    assert [init["mode"] for init in fake.inits] == ["online", "offline"]
    assert len({init["id"] for init in fake.inits}) == 1
    assert fake.torn_down == 1
    assert any("no route" in line for line in said)


def test_real_offline_attempts_are_folders_below_the_trials_in_their_order(
    logged: Logged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import wandb as library

    from hpc_det.integrations import wandb

    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    folder = logged().folder
    try:
        for attempt, calls in ((1, 0), (2, 3)):
            made = logger(logged, attempt, "offline", calls=calls)
            made.begin(0)
            made.report("training", 100, {"loss": 0.5})
            made.end("stopped")
    finally:
        library.teardown()
    runs = wandb.offline_runs(folder)
    assert [wandb.attempt_of(run) for run in runs] == [1, 2]
    run_id = (read_json(folder / "run.json") or {})["id"]
    assert [run.name.partition("offline-run-")[2].partition("-")[2] for run in runs] == [run_id, run_id]
    assert all((run / f"run-{run_id}.wandb").stat().st_size for run in runs)


FAKE_SYNC = """
import os, pathlib, sys
run = pathlib.Path(sys.argv[-1])
names = ("WANDB_RESUME", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_DIR")
with open(os.environ["SYNCED"], "a") as file:
    print(*sys.argv[1:], *(os.environ.get(name) for name in names), sep="|", file=file)
if run.name.endswith("-refused"):
    sys.exit("refused by the server")
(run / "run-x.wandb.synced").touch()
"""


def offline_run(folder: Path, attempt: int, name: str) -> Path:
    run = folder / f"attempt-{attempt}" / "wandb" / f"offline-run-20260101_00000{attempt}-{name}"
    run.mkdir(parents=True)
    return run


def test_offline_runs_are_uploaded_by_the_installed_package_into_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc_det.integrations import wandb

    package, synced = tmp_path / "packages" / "wandb", tmp_path / "synced"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_SYNC)
    for name, value in {"PYTHONPATH": package.parent, "SYNCED": synced, "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, str(value))
    runs = [offline_run(tmp_path / "trial; $(x)", attempt, name) for attempt, name in ((10, "a"), (9, "b"))]
    found = wandb.offline_runs(tmp_path / "trial; $(x)")
    assert found == runs[::-1]
    assert len([*wandb.upload(found, {"base_url": "https://w"})]) == 2
    lines = [line.split("|") for line in synced.read_text().splitlines()]
    shown = [["sync", "--yes", str(run), "allow", "https://w", "None", str(run.parents[1])] for run in runs[::-1]]
    assert lines == shown
    assert wandb.offline_runs(tmp_path / "trial; $(x)") == []
    bad, later = offline_run(tmp_path / "t", 1, "x-refused"), offline_run(tmp_path / "t", 2, "y")
    with pytest.raises(HpcDetError, match="refused by the server"):
        list(wandb.upload([bad, later], {}))
    assert wandb.offline_runs(tmp_path / "t") == [bad, later]


def test_the_package_of_the_same_name_is_the_installed_one() -> None:
    from hpc_det.integrations import wandb

    assert vars(wandb)["wandb"] is sys.modules["wandb"]


def test_a_real_server_that_does_not_answer_leaves_an_offline_run(
    logged: Logged, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import wandb as library

    from hpc_det.integrations import wandb

    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.socket() as closed:  # bound and not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        made = logger(logged, base_url=f"http://127.0.0.1:{closed.getsockname()[1]}")
        try:
            made.begin(0)
            made.report("training", 100, {"loss": 0.5})
            made.end("finished")
        finally:
            library.teardown()
    assert len(wandb.offline_runs(logged().folder)) == 1
    assert len(said) == 1
