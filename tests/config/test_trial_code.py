from __future__ import annotations

import sys
import zipfile
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from hpc_det.config.entrypoint import LAUNCHERS, Context
from hpc_det.config.trial_code import check_entrypoint, entrypoint_notes, metric_notes, silent_script
from hpc_det.store.attempt import HOOK
from tests.facts import each_names, golden, unnamed

LOADERS = "def build_training_data_loader(self): ...\n    def build_validation_data_loader(self): ...\n"
WHOLE = f"def train_batch(self): ...\n    def evaluate_batch(self): ...\n    {LOADERS}"
HEAD = "from hpc_det.pytorch import PyTorchTrial\nimport hpc_det.pytorch as pt\n"
ENTRYPOINT = "python3 -m hpc_det.launch.torch_distributed --trial model_def:T"


def check(tmp_path: Path, source: str, entrypoint: object = ENTRYPOINT) -> list[str]:
    (tmp_path / "model_def.py").write_text(source)
    return [problem.replace(f"{tmp_path}/", "") for problem in check_entrypoint(entrypoint, Context(tmp_path))]


@pytest.mark.parametrize(
    "source",
    [
        f"{HEAD}class T(PyTorchTrial):\n    {WHOLE}",
        f"{HEAD}class T(pt.PyTorchTrial):\n    {WHOLE}",
        f"from hpc_det.pytorch.deepspeed import DeepSpeedTrial\nclass T(DeepSpeedTrial):\n    {WHOLE}",
        f"{HEAD}class Base(PyTorchTrial):\n    {LOADERS}\nclass T(Base):\n"
        "    def train_batch(self): ...\n    def evaluate_full_dataset(self): ...\n",
        f"{HEAD}class T(PyTorchTrial):\n    {LOADERS}    train_batch = evaluate_batch = print\n",
        f"{HEAD}import torch\ntorch.backends.x = 1\nclass T(PyTorchTrial):\n    {WHOLE}",
        f"{HEAD}if True:\n    class T(PyTorchTrial):\n        def train_batch(self): ...\n    T.evaluate_batch = 1",
        f"{HEAD}pattern = '\\d'\nclass T(PyTorchTrial):\n    {WHOLE}",
    ],
)
def test_a_whole_trial_passes(tmp_path: Path, source: str) -> None:
    assert check(tmp_path, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from other import T",
        "from other import *",
        "T = make_trial()",
        "from other import Base\nclass T(Base): ...",
        f"{HEAD}from other import Mixin\nclass T(Mixin, PyTorchTrial): ...",
        f"{HEAD}@complete\nclass T(PyTorchTrial): ...",
        f"{HEAD}class T(PyTorchTrial, metaclass=M): ...",
        f"{HEAD}class T(PyTorchTrial): ...\nsetattr(T, 'train_batch', f)",
        "T = make_trial",
        "globals()['T'] = 1",
        "class T: ...\nfrom other import *",
        "class T: ...\nvars()['T'] = 1",
        "class T: ...\ndef make():\n    global T\n    T = 1",
        "class T: ...\nmatch 1:\n    case T: ...",
        "@complete\nclass T: ...",
        "def __getattr__(name): ...",
        "def make():\n    global T\n    T = 1\nmake()",
        "def make():\n    globals()['T'] = 1\nmake()",
        "import sys\nsys.modules[__name__].T = 1",
        "import inspect\ninspect.currentframe().f_globals['T'] = 1",
    ],
)
def test_what_only_running_the_code_shows_is_no_problem(tmp_path: Path, source: str) -> None:
    assert check(tmp_path, source) == []


WRONG_TRIALS: list[tuple[str, list[object]]] = [
    (
        "from hpc_det.pytorch.deepspeed import DeepSpeedTrial\n"
        f"class T(DeepSpeedTrial):\n    {LOADERS}    def evaluate_batch(self): ...\n",
        ["entrypoint", "T", "model_def.py", "train_batch"],
    ),
    (
        f"{HEAD}class T(PyTorchTrial):\n    def train_batch(self): ...\n    def evaluate_batch(self): ...\n",
        ["entrypoint", "model_def.py", "build_training_data_loader", "build_validation_data_loader"],
    ),
    (
        f"{HEAD}class T(PyTorchTrial):\n    def train_batch(self): ...\n    {LOADERS}",
        ["entrypoint", "model_def.py", "evaluate_batch", "evaluate_full_dataset"],
    ),
    (
        f"{HEAD}class T(PyTorchTrial):\n    {WHOLE}    def evaluate_full_dataset(self): ...\n",
        ["entrypoint", "model_def.py", "evaluate_batch", "evaluate_full_dataset"],
    ),
    (f"{HEAD}class Tee(PyTorchTrial): ...", ["entrypoint", "model_def.py", "'T'", "Tee"]),
    ("def f(:\n", ["entrypoint", "model_def.py:1"]),
    ("x = 1\n\0", ["entrypoint", "model_def.py:1"]),
]


@pytest.mark.parametrize(
    ("source", "facts"),
    WRONG_TRIALS,
)
def test_a_trial_that_cannot_train_is_told(tmp_path: Path, source: str, facts: list[object]) -> None:
    each_names(check(tmp_path, source), facts)


def test_the_words_for_a_trial_that_cannot_train(tmp_path: Path) -> None:
    assert [line for source, _ in WRONG_TRIALS for line in check(tmp_path, source)] == golden(__file__, "trials.txt")


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m x --trial=model_def:Other",
        "python3 x.py --trial model_def:Other; true|cat",
        "model_def:Other",
        ["python3", "-m", "x", "--trial", "model_def:Other"],
    ],
)
def test_every_form_of_naming_a_trial_is_found(tmp_path: Path, entrypoint: object) -> None:
    each_names(check(tmp_path, "class T: ...", entrypoint), ["entrypoint", "model_def.py", "'Other'", "T"])


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m train",
        "cd src && python3 -m x --trial none:T",
        "PYTHONPATH=src python3 -m x --trial none:T",
        "python3 -m x --trial $TRIAL",
        "python3 -m x --trial yaml.loader:Loader",
        None,
        5,
    ],
)
def test_an_entrypoint_that_names_no_module_of_the_folder_is_left_alone(tmp_path: Path, entrypoint: object) -> None:
    assert check_entrypoint(entrypoint, Context(tmp_path)) == []


@pytest.mark.parametrize(
    ("entrypoint", "facts"),
    [
        ("python3 -m determined.launch.nobody --trial model_def:T", ["determined.launch.nobody", "hpc_det"]),
        ("python3 -m hpc_det.launch.torchrun -m x", ["hpc_det.launch.torchrun", "hpc_det"]),
    ],
)
def test_a_launcher_that_there_is_not_is_told_before_the_job_waits(
    tmp_path: Path, entrypoint: str, facts: list[object]
) -> None:
    (told,) = check(tmp_path, "class T: ...", entrypoint)
    assert not unnamed(told, "entrypoint", *facts)
    assert not unnamed(told, *LAUNCHERS)
    assert "torch_distributed" in told


@pytest.mark.parametrize("package", ["determined", "hpc_det"])
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "wrap_rank 0 python3"])
def test_a_launcher_that_there_is_is_no_problem(tmp_path: Path, package: str, launcher: str) -> None:
    (tmp_path / "train.py").touch()
    assert check_entrypoint(f"python3 -m {package}.launch.{launcher} train.py", Context(tmp_path)) == []


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 x.py --trial=model_def:T",
        "/usr/bin/python3.11 -u x.py",
        ["python3", "x.py"],
        "SEED=1 exec python x.py",
        "python3 -m hpc_det.launch.direct x.py --lr 0.1",
        "python3 -m hpc_det.launch.torch_distributed --log-dir y -- x.py",
        "python3 -m determined.launch.horovod --fp16-compression -- --autohorovod python3 x.py",
        "python3 -m hpc_det.launch.mpi -- python3 -m hpc_det.launch.torch_distributed x.py",
    ],
)
def test_a_script_that_is_not_there_is_told_before_the_job_waits(tmp_path: Path, entrypoint: object) -> None:
    each_names(
        check(tmp_path, f"{HEAD}class T(PyTorchTrial):\n    {WHOLE}", entrypoint),
        ["entrypoint", "'x.py'", "context_dir", tmp_path, "model_def.py"],
    )
    (tmp_path / "x.py").touch()
    assert check_entrypoint(entrypoint, Context(tmp_path)) == []


@pytest.mark.parametrize(
    "entrypoint",
    [
        "cd src && python3 x.py",
        "python3 $SCRIPT.py",
        "make x.py; python3 x.py",
        "python3 -c x.py",
        "train x.py",
        "python3",
    ],
)
def test_where_only_a_shell_knows_which_script_is_meant_nothing_is_said(tmp_path: Path, entrypoint: str) -> None:
    assert check_entrypoint(entrypoint, Context(tmp_path)) == []


def test_a_trial_without_its_flag_is_told(tmp_path: Path) -> None:
    each_names(
        check(tmp_path, "", "python3 -m hpc_det.launch.direct model_def:T"), ["entrypoint", "model_def:T", "--trial"]
    )


def test_a_module_that_this_host_cannot_find_is_noted_with_what_there_is(tmp_path: Path) -> None:
    """It may exist only inside the container, or after the profile's `setup`."""
    entrypoint = "python3 -m x --trial modle_def:T"
    assert check(tmp_path, "", entrypoint) == []
    (note,) = entrypoint_notes(entrypoint, Context(tmp_path))
    assert unnamed(note, "entrypoint", "'modle_def'", "context_dir", tmp_path, "did you mean model_def?") == []


def test_a_module_in_a_subfolder_is_noted_with_its_name(tmp_path: Path) -> None:
    context = written(tmp_path, {"src/model_def.py": "class T: ..."})
    assert check_entrypoint("model_def:T", context) == []
    (note,) = entrypoint_notes("model_def:T", context)
    assert unnamed(note, "'model_def'", "src.model_def") == []
    assert entrypoint_notes("model_def:T", context, ["src"]) == [], "PYTHONPATH of the job"


class Editable:
    """A finder such as those of editable installs, which has no folder on sys.path."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._package.name:
            return None
        file = self._package / "__init__.py"
        return spec_from_file_location(name, file, submodule_search_locations=[str(self._package)])


@pytest.mark.parametrize("way", ["editable", ".pth", "zipped egg"])
def test_a_module_that_python_finds_is_not_noted_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / "context").mkdir()
    written(tmp_path, {"lib/trials_of_ada/__init__.py": "1/0", "lib/trials_of_ada/vision.py": "1/0"})
    if way == "editable":
        monkeypatch.setattr("sys.meta_path", [*sys.meta_path, Editable(tmp_path / "lib/trials_of_ada")])
    elif way == ".pth":
        monkeypatch.syspath_prepend(tmp_path / "lib")
    else:
        with zipfile.ZipFile(tmp_path / "ada.egg", "w") as egg:
            egg.writestr("trials_of_ada/__init__.py", "1/0")
            egg.writestr("trials_of_ada/vision.py", "1/0")
        monkeypatch.syspath_prepend(tmp_path / "ada.egg")
    context = Context(tmp_path / "context")
    for entrypoint in ("trials_of_ada:T", "trials_of_ada.vision:T"):
        assert (check_entrypoint(entrypoint, context), entrypoint_notes(entrypoint, context)) == ([], [])
    assert check_entrypoint("trials_of_ada.audio:T", context) == []
    (note,) = entrypoint_notes("trials_of_ada.audio:T", context)
    assert unnamed(note, "'trials_of_ada.audio'") == []


@pytest.mark.parametrize(
    "files",
    [
        {"pkg/model_def.cpython-311-x86_64-linux-gnu.so": "", "pkg/model_def.py": "x = 1", "pkg/__init__.py": ""},
        {"pkg/model_def.py": "x = 1", "pkg/__init__.py": "__path__ = ['/elsewhere']"},
        {"pkg/model_def.py": "x = 1", "pkg/__init__.py": "import sys\nsys.modules['pkg.model_def'] = 1"},
    ],
)
def test_a_file_that_python_may_not_import_is_not_judged(tmp_path: Path, files: dict[str, str]) -> None:
    context = written(tmp_path, files)
    assert (check_entrypoint("pkg.model_def:T", context), entrypoint_notes("pkg.model_def:T", context)) == ([], [])


def test_an_installed_package_comes_before_a_folder_without_init(tmp_path: Path) -> None:
    """Python imports a namespace package only if there is no regular one on the whole path."""
    context = written(tmp_path, {"yaml/loader.py": "x = 1", "nobody/loader.py": "x = 1"})
    assert check_entrypoint("yaml.loader:Loader", context) == []
    assert len(check_entrypoint("nobody.loader:Loader", context)) == 1


def test_a_trial_may_be_an_attribute_of_a_class(tmp_path: Path) -> None:
    assert check(tmp_path, "class Outer:\n    class T: ...", "model_def:Outer.T") == []
    assert len(check(tmp_path, "class Other: ...", "model_def:Outer.T")) == 1


@pytest.mark.parametrize(
    "entrypoint", ["python3 train.py --trial 3", "python3 train.py --trial=best", ["t", "--trial"]]
)
def test_a_script_may_have_an_option_trial_of_its_own(tmp_path: Path, entrypoint: object) -> None:
    (tmp_path / "train.py").touch()
    assert check_entrypoint(entrypoint, Context(tmp_path)) == []
    assert entrypoint_notes(entrypoint, Context(tmp_path)) == []


def test_a_script_that_only_the_job_has_is_noted(tmp_path: Path) -> None:
    context = Context(tmp_path)
    assert check_entrypoint("python3 /opt/app/train.py", context) == [], "inside a container"
    (note,) = entrypoint_notes("python3 /opt/app/train.py", context)
    assert unnamed(note, "entrypoint", "/opt/app/train.py") == []
    (tmp_path / HOOK).touch()
    assert check_entrypoint("python3 train.py", context) == []
    assert len(entrypoint_notes("python3 train.py", context)) == 1


def test_a_dot_in_the_place_of_the_colon_is_told(tmp_path: Path) -> None:
    each_names(check(tmp_path, "class T: ...", "model_def.T"), ["entrypoint", "model_def.T", "model_def:T"])
    assert check(tmp_path, "class T: ...", "model_def.py") == [], "a file, which may be one to execute"
    assert check(tmp_path, "class T: ...", "train.sh") == []


def test_a_module_may_be_a_package_or_lie_in_one(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("from other import T")
    (tmp_path / "pkg/inner.py").write_text("from other import U")
    assert check_entrypoint("pkg:T", Context(tmp_path)) == []
    assert check_entrypoint("pkg.inner:U", Context(tmp_path)) == []
    assert len(check_entrypoint("pkg.inner:T", Context(tmp_path))) == 1


@pytest.mark.parametrize(
    ("entrypoint", "facts"),
    [
        ("python3 -m hpc_det.launch.mpi --trial model_def", ["entrypoint", "--trial", "'model_def'"]),
        ("python3 -m determined.launch.direct --trial", ["entrypoint", "--trial", "''"]),
        ("python3 'x.py", ["entrypoint"]),
    ],
)
def test_an_entrypoint_that_cannot_be_read_is_told(tmp_path: Path, entrypoint: str, facts: list[object]) -> None:
    each_names([line.partition(", such as")[0] for line in check_entrypoint(entrypoint, Context(tmp_path))], facts)


def test_the_users_code_is_never_run(tmp_path: Path) -> None:
    assert check(tmp_path, f"raise SystemExit(3)\n{HEAD}class T(PyTorchTrial):\n    {WHOLE}") == []


# --- scripts that report no metric


@pytest.mark.parametrize(
    ("entrypoint", "files"),
    [
        ("python3 train.py --lr 0.1", {"train.py": "import torch"}),
        (["python3", "-u", "train.py"], {"train.py": "import model", "model.py": "import torch"}),
        ("python3 -m hpc_det.launch.torch_distributed train.py", {"train.py": "print('hpc_det')"}),
        ("python3 -m hpc_det.launch.torch_distributed -- python3 src/train.py", {"src/train.py": "from .x import y"}),
    ],
)
def test_a_script_without_the_package_reports_nothing(
    tmp_path: Path, entrypoint: object, files: dict[str, str]
) -> None:
    assert silent_script(entrypoint, written(tmp_path, files)) in ("train.py", "src/train.py")


@pytest.mark.parametrize(
    ("entrypoint", "files"),
    [
        ("python3 train.py", {"train.py": "def main():\n    from hpc_det import pytorch"}),
        ("python3 train.py", {"train.py": "import determined as det"}),
        ("python3 train.py", {"train.py": "import a", "a.py": "import b, a", "b/__init__.py": "import hpc_det.sgd"}),
        ("python3 src/train.py", {"src/train.py": "from loops import run", "src/loops.py": "from hpc_det import sgd"}),
        ("python3 src/train.py", {"src/train.py": "from . import loops", "src/loops.py": "import hpc_det"}),
        ("python3 train.py", {"train.py": "import importlib"}),
        ("python3 train.py", {"train.py": "exec(open('other').read())"}),
        ("python3 train.py", {"train.py": "if"}),
        ("bash train.sh", {"train.sh": ""}),
        ("cd src && python3 train.py", {"src/train.py": ""}),
        ("python3 -m hpc_det.launch.torch_distributed --trial model_def:T", {"model_def.py": ""}),
        ("model_def:T", {"model_def.py": ""}),
        ("python3 train.py", {}),
    ],
)
def test_what_may_report_is_no_silent_script(tmp_path: Path, entrypoint: object, files: dict[str, str]) -> None:
    assert silent_script(entrypoint, written(tmp_path, files)) is None


def written(folder: Path, files: dict[str, str]) -> Context:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Context(folder)


BEGIN = "class T(PyTorchTrial):\n    def evaluate_batch(self, batch):\n"


def noted(tmp_path: Path, code: str, metric: str = "accuracy") -> list[str]:
    (tmp_path / "model_def.py").write_text(code)
    return metric_notes("python3 -m hpc_det.launch.direct --trial model_def:T", Context(tmp_path), metric)


def test_a_metric_that_is_not_returned_is_noted_with_the_nearest(tmp_path: Path) -> None:
    code = f"{BEGIN}        if batch:\n            return {{'loss': 1}}\n        return {{'loss': 1, 'acuracy': 2}}\n"
    (note,) = noted(tmp_path, code)
    assert not unnamed(note, "'acuracy'")
    assert noted(tmp_path, code, "loss") == []


@pytest.mark.parametrize(
    "code",
    [
        f"{BEGIN}        return metrics\n",
        f"{BEGIN}        return {{'loss': 1, **more}}\n",
        f"{BEGIN}        return {{name: 1}}\n",
        f"{BEGIN}        return {{'loss': 1}}\nsetattr(T, 'evaluate_batch', other)\n",
        f"{BEGIN}        return {{'loss': 1}}\n    def other(self):\n        self.wrap_reducer(1, 'accuracy')\n",
        "@changed\nclass T(PyTorchTrial):\n    def evaluate_batch(self, batch):\n        return {'loss': 1}\n",
        "class T(PyTorchTrial):\n    @changed\n    def evaluate_batch(self, batch):\n        return {'loss': 1}\n",
        "class T(Base):\n    pass\n",
        "class Other: pass\n",
        "class T(:\n",
    ],
)
def test_what_only_running_the_code_shows_is_not_noted(tmp_path: Path, code: str) -> None:
    assert noted(tmp_path, code) == []
