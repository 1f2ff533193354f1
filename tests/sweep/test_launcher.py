"""Sweeps of small apps, with real jobs on this machine."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.core.utils import JobStatus

from hpc_det.errors import HpcDetError
from hpc_det.sweep.experiment import job_returns
from hpc_det.sweep.files import SweepFiles
from hpc_det.sweep.saved import checkpoint_of
from tests.facts import refused, unnamed
from tests.sweep.conftest import App, source
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

DOUBLES = source("return cfg.x * 2")
WHEN_TOLD = 'while not os.path.exists("go"): time.sleep(0.05)'

# A sweeper that needs return values: it moves to the neighbour with the lower value.
DESCENDS = """
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Descent(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        x, step, number, path = 0, 1, 0, []
        while len(path) < 2:
            returns = self.launcher.launch([[f"x={x - step}"], [f"x={x + step}"]], initial_job_idx=number)
            left, right = (job.return_value for job in returns)
            x, number = (x - step if left < right else x + step), number + 2
            path.append(x)
        print("path", path)

@dataclass
class Conf:
    _target_: str = "hydra_plugins.descent.Descent"

ConfigStore.instance().store(group="hydra/sweeper", name="descent", node=Conf)
"""


def test_values_come_back_and_each_point_has_hydras_files(app: App) -> None:
    app.write("app.py", source('assert "torch" not in sys.modules', "return cfg.x * 2"))
    output = app.succeed("+x=1,2")
    assert not unnamed(output, "Submitted 2 jobs", "experiment 1")
    for number in range(2):
        folder = app.folder / "out" / str(number)
        assert (folder / ".hydra" / "overrides.yaml").read_text() == f"- +x={number + 1}\n"
        assert f"x is {number + 1}" in (folder / "app.log").read_text()
    assert [(p["num"], p["overrides"], p["state"], p["returned"]) for p in app.points()] == [
        (n, [f"+x={n + 1}"], "COMPLETED", 2 * n + 2) for n in range(2)
    ]
    assert [p["folder"] for p in app.points()] == [str(app.folder / "out" / str(n)) for n in range(2)]


def test_a_sweep_is_an_experiment_like_any_other(app: App) -> None:
    app.write("app.py", DOUBLES)
    app.succeed("+x=1,2")
    assert "app" in app.hpc_det("experiment", "list")[1]
    assert json.loads(app.experiment().trial(2).trial.read_text())["hparams"] == {"+x": "2"}
    assert app.experiment().code.resolve() == app.folder


def test_what_was_saved_for_the_jobs_is_the_users_own(app: App) -> None:
    app.write("app.py", DOUBLES)
    app.succeed("+x=1")
    files = [path for path in app.experiment().sweep.rglob("*") if path.is_file()]
    assert files
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}


# --- sweepers


@pytest.mark.long
def test_a_sweeper_that_needs_values_gets_them(app: App) -> None:
    app.write("app.py", source("return (cfg.x - 3) ** 2", config="config"))
    app.write("conf/config.yaml", "x: 0\n")
    app.write("hydra_plugins/descent.py", DESCENDS)
    assert "path [1, 2]" in app.succeed("hydra/sweeper=descent")
    assert [point["experiment"] for point in app.points()] == [1, 1, 2, 2]
    assert [point["returned"] for point in app.points()] == [16, 4, 9, 1]


@pytest.mark.skipif(not find_spec("hydra_plugins.hydra_optuna_sweeper"), reason="hydra-optuna-sweeper is not installed")
def test_the_optuna_sweeper_gets_its_values(app: App) -> None:
    app.write("app.py", source("return (cfg.x - 3) ** 2", config="config"))
    sweeper = "{direction: minimize, n_trials: 4, n_jobs: 2, params: {x: 'choice(1, 3)'}}"
    defaults = "[_self_, {override hydra/sweeper: optuna}]"
    app.write("conf/config.yaml", f"defaults: {defaults}\nx: 0\nhydra: {{sweeper: {sweeper}}}\n")
    output = app.succeed()
    assert "Best value: " in output
    assert [point["experiment"] for point in app.points()] == [1, 1, 2, 2]


def test_a_sweeper_that_needs_values_is_refused_where_none_will_come(app: App) -> None:
    app.write("app.py", DOUBLES)
    app.write("hydra_plugins/descent.py", DESCENDS)
    output = app.fail("hydra/sweeper=descent", "hydra.launcher.wait=false", "+x=1")
    assert not unnamed(output, "hydra.launcher.wait", "sweeper", "hydra.launcher.wait=true")
    assert not app.experiment().path.exists()


# --- waiting


def test_without_waiting_it_returns_at_once_and_the_points_go_on(app: App) -> None:
    app.write("app.py", source(WHEN_TOLD, "return cfg.x"))
    assert not unnamed(app.succeed("+x=1,2", "hydra.launcher.wait=false"), "hpc-det sweep status 1")
    assert "COMPLETED" not in {point["state"] for point in app.points()}
    app.write("go", "")
    assert app.hpc_det("sweep", "wait", "out") == (0, "")
    assert [point["returned"] for point in app.points()] == [1, 2]


def test_ctrl_c_ends_the_waiting_and_not_the_sweep(app: App) -> None:
    app.write("app.py", source(WHEN_TOLD, "return cfg.x"))
    waiting = app.start("+x=1")
    wait_for(app.experiment().trial().rank_log(1, 0).exists, DEADLINE_S)
    assert waiting.stdout
    assert any("Submitted" in line for line in waiting.stdout)  # the rank may have written to the log first
    waiting.send_signal(signal.SIGINT)
    output, _ = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == 130
    assert not unnamed(output, "hpc-det sweep wait 1")
    assert "Traceback" not in output
    app.write("go", "")
    assert app.hpc_det("sweep", "wait", "1") == (0, "")
    assert [point["returned"] for point in app.points()] == [1]


# --- what reaches the app


def test_an_edit_of_a_file_while_points_are_queued_changes_nothing(app: App) -> None:
    app.write("app.py", source(WHEN_TOLD, "return cfg.group.y", config="config"))
    app.write("conf/config.yaml", "defaults: [{group: a}]\nx: 0\n")
    app.write("conf/group/a.yaml", "y: 1\n")
    waiting = app.start("x=1,2", "hydra.launcher.array_parallelism=1")
    wait_for(app.experiment().trial().rank_log(1, 0).exists, DEADLINE_S)
    app.write("conf/config.yaml", "defaults: [{group: a}]\nx: 0\nhydra: {job: {name: edited}}\n")
    app.write("conf/group/a.yaml", "y: 2\n")
    app.write("go", "")
    output, _ = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == 0, output
    assert [point["returned"] for point in app.points()] == [1, 1]
    assert (app.folder / "out" / "1" / "app.log").exists()


HOSTILE = ["$(touch pwned)", "'; touch pwned #", 'say "hi"', "a\nb", "ümläut ✓", "`touch pwned`", "%j", "", " x ", "\\"]


def test_hostile_values_reach_the_app_as_they_are(app: App) -> None:
    app.write("app.py", source("return list(cfg.x)"))
    app.succeed(f"+x=[{','.join(map(quoted, HOSTILE))}]")
    assert [point["returned"] for point in app.points()] == [HOSTILE]
    assert not list(app.folder.rglob("pwned"))


def quoted(value: str) -> str:
    """Return `value` quoted in Hydra's grammar, in which a backslash is special only before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{trailing * chr(92)}'"


def test_an_app_of_structured_configs_gets_its_own_classes(app: App) -> None:
    app.write(
        "app.py",
        """
from dataclasses import dataclass, field
import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

@dataclass
class Part:
    y: int = 1

@dataclass
class Conf:
    x: int = 0
    part: Part = field(default_factory=Part)

ConfigStore.instance().store(name="conf", node=Conf)

@hydra.main(version_base="1.3", config_path=None, config_name="conf")
def app(cfg):
    conf = OmegaConf.to_object(cfg)
    assert isinstance(conf, Conf) and isinstance(conf.part, Part)
    return conf.part

if __name__ == "__main__":
    app()
""",
    )
    app.succeed("x=1,2", "part.y=5")
    assert [point["text"] for point in app.points()] == ["Part(y=5)"] * 2
    assert "Value 'text' of type 'str' could not be converted to Integer" in app.fail("part.y=text")


def test_an_app_that_is_a_module_of_a_package_runs(app: App) -> None:
    app.write("package/__init__.py", "")
    app.write("package/__main__.py", source("from . import other", "return other.NAME + str(cfg.x)", config="config"))
    app.write("package/conf/config.yaml", "x: 0\n")
    app.write("package/other.py", "NAME = __name__")
    app.write("app.py", "import runpy\nrunpy.run_module('package', run_name='__main__', alter_sys=True)\n")
    app.succeed("x=1")
    assert [point["returned"] for point in app.points()] == ["package.other1"]


def test_each_rank_of_a_gang_finds_torchruns_variables_and_only_rank_0_writes_into_the_output_folder(app: App) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    app.write(
        "app.py",
        source(
            f"found = {{name: os.environ[name] for name in {names}}}",
            "with open('rank-' + found['RANK'], 'w') as file: json.dump(found, file)",
            "return os.environ['FLAVOUR']",
        ),
    )
    app.succeed("+x=1", "hydra.launcher.slots=2", "+hydra.launcher.environment_variables.FLAVOUR=a b")
    first, second = (json.loads((app.folder / f"rank-{rank}").read_text()) for rank in range(2))
    assert first == second | {"RANK": "0", "LOCAL_RANK": "0"}
    assert second["RANK"] == second["LOCAL_RANK"] == "1"
    assert second["WORLD_SIZE"] == "2"
    assert [point["returned"] for point in app.points()] == ["a b"]
    assert (app.folder / "out" / "0" / "app.log").read_text().count("x is 1") == 1
    assert "x is 1" in app.experiment().trial().rank_log(1, 1).read_text()


# --- what goes wrong


def test_a_failure_names_the_rank_and_the_log_and_leaves_the_other_points_alone(app: App) -> None:
    app.write("app.py", source("assert cfg.x != 2, 'two is too many'", "return cfg.x"))
    output = app.fail("+x=1,2,3")
    log = app.experiment().trial(2).rank_log(1, 0)
    assert not unnamed(output, "trial 2 of experiment 1", "rank 0", "AssertionError: two is too many", log)
    assert "Traceback" not in output
    assert "two is too many" in log.read_text()
    assert [point["state"] for point in app.points()] == ["COMPLETED", "ERROR", "COMPLETED"]
    code, told = app.hpc_det("sweep", "wait", "out")
    assert code == 1
    assert "two is too many" in told


def test_a_return_value_that_cannot_travel_is_a_failure_that_says_so(app: App) -> None:
    app.write("app.py", source("return (i for i in range(3))"))
    assert not unnamed(app.fail("+x=1"), "return value", "generator")


def test_pickles_that_this_user_has_not_sealed_are_not_read(app: App, tmp_path: Path) -> None:
    """A user who can write into the folder must not get code executed, neither on a node nor by the reader of the
    results.
    """
    app.write("app.py", DOUBLES)
    app.succeed("+x=1,2")
    files = SweepFiles(app.experiment())
    unpickled = tmp_path / "unpickled"
    sealed = [files.app, files.import_path, files.config(1), files.returned(1), files.returned(2)]
    for path in sealed:
        whole = path.read_bytes()
        for content in (pickle.dumps(Touches(str(unpickled))), whole[:32] + pickle.dumps(Touches(str(unpickled))), b""):
            path.write_bytes(content)
            with refused(HpcDetError, path):
                files.read(path)
        path.write_bytes(whole)
        files.read(path)
    files.returned(1).write_bytes(files.returned(2).read_bytes())
    first, second = job_returns(app.experiment(), [["+x=1"], ["+x=2"]])
    assert first.status is JobStatus.FAILED, "the result of one point is not that of another"
    assert second.return_value == 4
    files.returned(2).write_bytes(pickle.dumps(Touches(str(unpickled))))
    assert [each.status for each in job_returns(app.experiment(), [["+x=1"], ["+x=2"]])] == [JobStatus.FAILED] * 2
    assert not unpickled.exists()


@dataclass
class Touches:
    """Creates a file when it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return _touch, (self.path,)


def _touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra.launcher.slots=3"], "resources.slots_per_trial"),
        (["hydra.launcher.slots=0", "hydra.launcher.max_restarts=-1"], "max_restarts"),
        (["hydra.launcher.cluster=slurm"], "hydra/launcher=hpc_slurm"),
        (["hydra.launcher.cluster=nowhere"], "'nowhere'"),
        (["x.y.z=1"], "'x.y.z'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_queued(app: App, overrides: list[str], said: str) -> None:
    app.write("app.py", DOUBLES)
    output = app.fail("+x=1", *overrides)
    assert not unnamed(output, said)
    assert "Traceback" not in output
    assert not app.experiment().path.exists()


def test_a_folder_of_no_sweep_is_refused(app: App, tmp_path: Path) -> None:
    code, output = app.hpc_det("sweep", "status", str(tmp_path))
    assert code == 2
    assert not unnamed(output, tmp_path, "hpc_det.json")


def test_points_that_failed_get_another_chance_and_the_others_stay(app: App) -> None:
    app.write("app.py", source("import limits", "assert cfg.x < limits.most", "return cfg.x"))
    app.write("limits.py", "most = 2")
    app.fail("+x=1,2")
    app.write("limits.py", "most = 3  # of another size: Python's cache goes by that and the second")
    assert app.hpc_det("experiment", "continue", "1")[0] == 0
    assert app.hpc_det("sweep", "wait", "out") == (0, "")
    assert [point["returned"] for point in app.points()] == [1, 2]
    assert not app.experiment().trial(1).rank_log(2, 0).exists()


def test_a_sweep_is_not_forked(app: App) -> None:
    app.write("app.py", DOUBLES)
    app.succeed("+x=1")
    code, output = app.hpc_det("experiment", "fork", "1")
    assert code == 2
    assert not unnamed(output, "experiment 1", "sweep")


# --- checkpoint()


def checkpoint() -> None: ...


def task(cfg: object) -> None: ...


def test_the_function_checkpoint_of_the_same_module_is_the_apps_own() -> None:
    assert checkpoint_of(task) is checkpoint


def test_a_function_of_another_module_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "checkpoint", os.path.join)
    assert checkpoint_of(task) is None
