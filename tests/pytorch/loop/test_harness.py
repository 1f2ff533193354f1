from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.pytorch.loop.harness import load_trial_class

GOOD = """
from hpc_det.pytorch import PyTorchTrial

class Base(PyTorchTrial):
    def train_batch(self, batch, epoch_idx, batch_idx): ...
    def evaluate_batch(self, batch): ...

class Good(Base):
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...

class Other: ...

def function(): ...
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    (tmp_path / "a_model_def.py").write_text(GOOD)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def problem(name: str) -> str:
    with pytest.raises(UsageError) as error:
        load_trial_class(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_good_class_is_loaded(code: Path) -> None:
    assert load_trial_class("a_model_def:Good").__name__ == "Good"


def test_a_name_without_a_class_is_of_the_wrong_form() -> None:
    assert problem("a_model_def.Good") == (
        "--trial a_model_def.Good: not of the form module:Class, for example model_def:MyTrial"
    )


def test_a_missing_module_is_named() -> None:
    assert problem("no_such_module:Good") == (
        "--trial no_such_module:Good: cannot import no_such_module: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_module_that_cannot_be_imported_names_the_users_own_line(code: Path) -> None:
    (code / "a_helper.py").write_text("x = 1\ny = x / 0\n")
    (code / "a_broken.py").write_text("\n\nimport a_helper\n")
    assert problem("a_broken:Good") == (
        f"--trial a_broken:Good: cannot import a_broken: ZeroDivisionError: division by zero "
        f"({code / 'a_helper.py'}, line 2)"
    )


def test_a_missing_import_names_the_users_own_line(code: Path) -> None:
    (code / "a_lacking.py").write_text("import no_such_library\n")
    assert problem("a_lacking:Good").endswith(
        f"ModuleNotFoundError: No module named 'no_such_library' ({code / 'a_lacking.py'}, line 1)"
    )


def test_a_syntax_error_names_the_users_own_line(code: Path) -> None:
    (code / "a_typo.py").write_text("x = 1\ny = = 2\n")
    assert problem("a_typo:Good").endswith("SyntaxError: invalid syntax (a_typo.py, line 2)")


def test_a_missing_class_is_named_with_its_file(code: Path) -> None:
    assert problem("a_model_def:Bad") == f"--trial a_model_def:Bad: {code / 'a_model_def.py'} has no Bad"


@pytest.mark.parametrize("name", ["Other", "function"])
def test_what_is_no_trial_is_refused(code: Path, name: str) -> None:
    assert problem(f"a_model_def:{name}") == (
        f"--trial a_model_def:{name}: {name} is no subclass of hpc_det.pytorch.PyTorchTrial, nor of "
        f"hpc_det.pytorch.deepspeed.DeepSpeedTrial"
    )


def test_all_missing_methods_are_named(code: Path) -> None:
    assert problem("a_model_def:Base") == (
        "--trial a_model_def:Base: Base does not implement build_training_data_loader, build_validation_data_loader"
    )
