"""The ways to enable the import hooks for `determined` and `ray`, and the processes that each way covers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_det.compat import install
from hpc_det.config.rank_variables import compat_packages, with_compat
from hpc_det.errors import UsageError
from tests.compat.programs import HOOKED, printed, python
from tests.facts import refused, unnamed

pytestmark = pytest.mark.integration

SHOW = "import determined, sys; print(determined.InvalidHP.__module__, *sys.argv[1:])\n"


def test_without_it_there_is_no_determined() -> None:
    done = python("-c", "import determined")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'determined'\n")


def test_the_runner_runs_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    done = python(*HOOKED, str(tmp_path / "train.py"), "--lr", "1")
    assert (done.stdout, done.stderr) == ("hpc_det.errors --lr 1\n", "")


def test_the_runner_runs_a_module_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SHOW)
    done = python(*HOOKED, "-m", "package.train", "-m", "x", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.stdout, done.stderr) == ("hpc_det.errors -m x\n", "")


def test_the_runner_ends_as_the_program_does() -> None:
    assert python(*HOOKED, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("--help",), 0)])
def test_the_runner_says_how_it_is_used(arguments: tuple[str, ...], code: int) -> None:
    done = python(*HOOKED, *arguments)
    assert done.returncode == code
    assert "python3 -m hpc_det.compat [PYTHON_OPTIONS...] (SCRIPT | -m MODULE) ARGS..." in done.stdout


def test_children_of_the_program_have_it_too() -> None:
    child = f"import subprocess; print(subprocess.check_output(['{sys.executable}', '-c', {SHOW!r}], text=True))"
    assert printed(child) == "hpc_det.errors"


def test_installed_in_code_it_reaches_processes_of_multiprocessing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "import hpc_det.compat\n"
        "hpc_det.compat.install()\n"
        "def show():\n"
        "    import determined\n"
        "    print(determined.InvalidHP.__module__)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=show)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    done = python(str(tmp_path / "train.py"))
    assert (done.stdout, done.stderr) == ("hpc_det.errors\n", "")


def test_installed_twice_it_is_there_once() -> None:
    code = "import sys, hpc_det.compat as c; c.install(); import determined; c.install(); import determined\n"
    assert printed(f"{code}print(len([p for p in sys.path if p.endswith('compat/path')]))", before=()) == "1"


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stand-in for the `determined` package and return the path of its `__init__.py`."""
    (tmp_path / "determined").mkdir()
    (tmp_path / "determined" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "determined" / "__init__.py"


def test_hpc_det_wins_over_an_installed_determined_and_says_so(another: Path) -> None:
    done = python(*HOOKED, "-c", SHOW)
    assert done.stdout == "hpc_det.errors\n"
    assert len(done.stderr.splitlines()) == 1
    assert not unnamed(done.stderr, "determined", "hpc_det", another)


def test_what_is_imported_already_cannot_become_another(another: Path) -> None:
    done = python("-c", "import determined, hpc_det.compat; hpc_det.compat.install()")
    assert not unnamed(done.stderr.splitlines()[-1], "UsageError", "hpc_det.compat", another, "install()")


def test_a_package_without_an_init_file_that_is_imported_already_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = python("-c", "import ray, hpc_det.compat; hpc_det.compat.install('ray')")
    assert not unnamed(done.stderr.splitlines()[-1], "UsageError", tmp_path / "ray", "install()")


def test_the_variable_names_the_packages() -> None:
    assert compat_packages({"HPC_DET_COMPAT": "determined"}) == ["determined"]
    assert compat_packages({"HPC_DET_COMPAT": "determined, ray"}) == ["determined", "ray"]
    assert compat_packages({"HPC_DET_COMPAT": ""}) == []
    assert compat_packages({}) == []


@pytest.mark.parametrize("value", ["horovod", "determined,horovod", "determined,"])
def test_a_variable_that_names_something_else_is_refused(value: str) -> None:
    with refused(UsageError, "HPC_DET_COMPAT", repr(value), "'determined'", "'ray'"):
        compat_packages({"HPC_DET_COMPAT": value})


def test_a_package_that_is_not_known_cannot_be_installed() -> None:
    with refused(UsageError, "hpc_det.compat.install", "'horovod'", "'determined'", "'ray'"):
        install("horovod")


def test_what_was_on_the_path_before_stays_there() -> None:
    first, second = with_compat({"PYTHONPATH": "/code", "A": "1"}, ["determined"])["PYTHONPATH"].split(":")
    assert (Path(first) / "determined" / "__init__.py").exists()
    assert second == "/code"
    assert with_compat({}, ["determined"])["PYTHONPATH"] == first
    assert with_compat({"A": "1"}, []) == {"A": "1"}


def test_each_package_has_a_folder_without_the_other() -> None:
    both = with_compat({}, ["determined", "ray"])["PYTHONPATH"].split(":")
    assert [sorted(path.name for path in Path(folder).iterdir()) for folder in both] == [["determined"], ["ray"]]


# --- the package `ray`, which may be installed and in use

SHOW_RAY = "import ray, sys; print(ray.__name__, hasattr(ray, 'is_real'))\n"


@pytest.fixture
def real_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stand-in for Ray and return the path of its `__init__.py`."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("is_real = True\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "ray" / "__init__.py"


def test_the_runner_covers_both_packages() -> None:
    assert printed(f"import determined\n{SHOW_RAY}") == "ray False"


def test_the_runner_in_a_program_of_the_runner_covers_both_packages() -> None:
    code = f"import determined\n{SHOW_RAY}"
    inner = f"import subprocess; print(subprocess.check_output(['{sys.executable}', *{HOOKED!r}, '-c', {code!r}]))"
    assert printed(inner) == r"b'ray False\n'"


def test_a_folder_that_is_named_ray_is_not_taken_for_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.chdir(tmp_path)
    assert printed(SHOW_RAY) == "ray False"
    (tmp_path / "ray" / "model.py").touch()  # its modules cannot be imported
    done = python(*HOOKED, "-c", SHOW_RAY)
    assert done.stdout == "ray False\n"
    assert not unnamed(done.stderr, "`ray`", tmp_path / "ray")


def test_a_real_ray_stays_itself_in_the_runner_which_says_so(real_ray: Path) -> None:
    done = python(*HOOKED, "-c", SHOW_RAY)
    assert done.stdout == "ray True\n"
    assert len(done.stderr.splitlines()) == 1
    assert not unnamed(done.stderr, real_ray, "ray.util.sgd", "HPC_DET_COMPAT=ray")


@pytest.mark.parametrize(("value", "is_real"), [("determined", True), ("ray", False), ("determined,ray", False)])
def test_what_the_variable_names_decides_over_a_real_ray(
    real_ray: Path, monkeypatch: pytest.MonkeyPatch, value: str, is_real: bool
) -> None:
    monkeypatch.setenv("HPC_DET_COMPAT", value)
    done = python(*HOOKED, "-c", SHOW_RAY)
    assert done.stdout == f"ray {is_real}\n"
    assert [str(real_ray) in line for line in done.stderr.splitlines()] == ([] if is_real else [True])


def test_determined_alone_leaves_a_real_ray_in_place(real_ray: Path) -> None:
    code = f"import hpc_det.compat as compat; compat.install(); import determined\n{SHOW_RAY}"
    assert printed(code, before=()) == "ray True"


def test_determined_alone_has_no_ray() -> None:
    done = python("-c", "import hpc_det.compat as compat; compat.install('determined'); import ray")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'ray'\n")


def test_ray_alone_has_no_determined() -> None:
    done = python("-c", "import hpc_det.compat as compat; compat.install('ray'); import ray, determined")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'determined'\n")
