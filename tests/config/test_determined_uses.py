from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.config.determined_uses import missing_uses
from hpc_det.config.entrypoint import Context
from tests.facts import unnamed

TRIAL = "python3 -m determined.launch.torch_distributed --trial model_def:T"
SCRIPT = "python3 train.py"


def written(folder: Path, files: dict[str, str]) -> Context:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Context(folder)


def names(lines: list[str]) -> list[tuple[str, str]]:
    """Return the place and the name of each line."""
    parts = [line.split(": ") for line in lines]
    assert all(key == "entrypoint" for key, *_ in parts)
    return [("/".join(Path(place).parts[-2:]).rpartition("/")[2], name) for _, place, name, *_ in parts]


def found(folder: Path, source: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    uses = missing_uses(TRIAL, written(folder, {"model_def.py": source}), is_enabled=True)
    return names(uses.problems), names(uses.notes)


@pytest.mark.parametrize(
    "source",
    [
        "import determined as det\nclass T(det.pytorch.PyTorchTrial): ...",
        "from determined.pytorch import PyTorchTrial, DataLoader, samplers, experimental",
        "from determined.pytorch import *",
        "import determined.pytorch.deepspeed as d\nd.DeepSpeedTrial.anything",
        "import determined\ndetermined.core.init().preempt.keras\ndetermined.__version__\ndetermined.core.__file__",
        "from determined.experimental import client, core_v2\nclient.get_experiment(1).keras",
        "from determined.tensorboard.metric_writers.pytorch import TorchWriter",
        "from determined.lightning.experimental import DetLogger",
        "from determined import util as det_util\ndet_util.merge_dicts({}, {})",
        "import determined as det\ndef f(det):\n    return det.keras",
        "try:\n    import determined as det\nexcept ImportError:\n    det = Fake()\ndet.keras",
        "import keras, pytorch\nkeras.x\nimport determined_extras.y",
        "from .determined import keras",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from determined import keras",
        "import determined as det\ndet.foo = 1\nprint(det.foo)",
        "def f(:",
    ],
)
def test_what_hpc_det_has_is_not_reported(tmp_path: Path, source: str) -> None:
    assert found(tmp_path, source) == ([], [])


def test_what_only_type_checkers_do_not_read_is_noted(tmp_path: Path) -> None:
    source = "import typing\nif not typing.TYPE_CHECKING:\n    from determined import estimator"
    assert found(tmp_path, source) == ([], [("model_def.py:3", "determined.estimator")])


@pytest.mark.parametrize(
    ("source", "place", "name"),
    [
        ("import determined.keras", "model_def.py:1", "determined.keras"),
        ("x = 1\nfrom determined import keras\nkeras.x", "model_def.py:2", "determined.keras"),
        ("import determined.keras.callbacks as c\nc.x", "model_def.py:1", "determined.keras"),
        (
            "import determined as det\n\nclass T(det.keras.TFKerasTrial): ...\ndet.keras",
            "model_def.py:3",
            "determined.keras",
        ),
        ("from determined.pytorch import dsat", "model_def.py:1", "determined.pytorch.dsat"),
        (
            "from determined.pytorch import (\n  LightningAdapter)",
            "model_def.py:1",
            "determined.pytorch.LightningAdapter",
        ),
        ("from determined.common.api import certs", "model_def.py:1", "determined.common"),
        (
            "from determined.experimental.client import create_model",
            "model_def.py:1",
            "determined.experimental.client.create_model",
        ),
        ("def f():\n    from determined import keras\nimport determined.keras", "model_def.py:2", "determined.keras"),
    ],
)
def test_an_import_that_certainly_fails_is_a_problem_with_its_line(
    tmp_path: Path, source: str, place: str, name: str
) -> None:
    assert found(tmp_path, source) == ([(place, name)], [])


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    from determined import keras\nexcept ImportError:\n    keras = None",
        "from contextlib import suppress\nwith suppress(ImportError):\n    from determined import keras",
        "import determined as det\ndef f():\n    return det.keras.x",
        "import determined as det\nif hasattr(det, 'keras'):\n    det.keras",
        "def f():\n    import determined.keras",
    ],
)
def test_a_use_that_may_not_run_is_a_note(tmp_path: Path, source: str) -> None:
    problems, notes = found(tmp_path, source)
    assert problems == []
    assert [name for _, name in notes] == ["determined.keras"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("determined.pytorch.LightningAdapter", "docs/how-to/lightning.md"),
        ("determined.searcher.SearchMethod", "docs/how-to/search-hyperparameters.md"),
        ("determined.common.api", "docs/how-to/python-client.md"),
        ("determined.util.debug_mode", "docs/how-to/port-from-determined.md"),
    ],
)
def test_the_line_names_the_file_and_the_remedy(tmp_path: Path, name: str, remedy: str) -> None:
    package, _, last = name.rpartition(".")
    context = written(tmp_path, {"model_def.py": f"from {package} import {last}"})
    (line,) = missing_uses(TRIAL, context, is_enabled=True).problems
    assert unnamed(line, "entrypoint", f"{tmp_path}/model_def.py:1", remedy) == []
    assert (Path(__file__).parents[2] / remedy).is_file()


FILES = {
    "train.py": "import model, lib.layers\ndef main():\n    import late\nif x:\n    from . import sometimes",
    "model.py": "from determined import keras",
    "lib/__init__.py": "from .inner import y",
    "lib/layers.py": "from determined.pytorch import dsat",
    "lib/inner.py": "import determined.estimator\nfrom ..... import z",
    "late.py": "import determined.cli",
    "sometimes.py": "import determined.gpu, model",
    "other.py": "import determined.deploy",
}


def test_all_files_that_the_script_imports_are_read_and_no_others(tmp_path: Path) -> None:
    context = written(tmp_path, FILES)
    uses = missing_uses(SCRIPT, context, is_enabled=True)
    assert sorted(names(uses.problems)) == [
        ("inner.py:1", "determined.estimator"),
        ("layers.py:1", "determined.pytorch.dsat"),
        ("model.py:1", "determined.keras"),
    ]
    assert sorted(names(uses.notes)) == [("late.py:1", "determined.cli"), ("sometimes.py:1", "determined.gpu")]


def test_for_a_command_that_only_a_shell_understands_the_files_at_the_top_are_noted(tmp_path: Path) -> None:
    uses = missing_uses("bash run.sh", written(tmp_path, FILES), is_enabled=True)
    assert uses.problems == []
    assert {place for place, _ in names(uses.notes)} == {"late.py:1", "model.py:1", "other.py:1", "sometimes.py:1"}


def test_a_users_own_package_of_that_name_is_not_judged(tmp_path: Path) -> None:
    context = written(tmp_path, {**FILES, "determined/__init__.py": ""})
    assert missing_uses(SCRIPT, context, is_enabled=True).problems == []


def test_without_the_variable_the_first_certain_import_is_noted(tmp_path: Path) -> None:
    uses = missing_uses(SCRIPT, written(tmp_path, FILES), is_enabled=False)
    assert uses.problems == []
    (note,) = uses.notes
    assert unnamed(note, "entrypoint", "HPC_DET_COMPAT=determined", "environment.environment_variables") == []
    context = written(tmp_path / "other", {"train.py": "def f():\n    import determined"})
    assert missing_uses(SCRIPT, context, is_enabled=False).notes == []
