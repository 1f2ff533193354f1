from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.pytorch.loop.harness import load_trial_class
from tests.facts import unnamed

GOOD = """
from hpc_det.pytorch import PyTorchTrial

class Base(PyTorchTrial):
    def train_batch(self, batch, epoch_idx, batch_idx): ...
    def evaluate_batch(self, batch): ...

class Good(Base):
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...

class Other: ...

class Outer:
    Inner = Good

def function(): ...
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder from which modules are imported; remove these modules afterwards."""
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
    assert load_trial_class("a_model_def:Outer.Inner").__name__ == "Good"


def test_a_name_without_a_class_is_of_the_wrong_form() -> None:
    assert unnamed(problem("a_model_def.Good"), "--trial a_model_def.Good: ", "module:Class") == []


def test_a_missing_module_is_named(code: Path) -> None:
    error = "ModuleNotFoundError: No module named 'no_such_module'"
    assert unnamed(problem("no_such_module:Good"), "--trial no_such_module:Good: ", error, code, sys.prefix) == []


def test_a_folder_without_init_is_named_with_the_path_of_the_search(code: Path) -> None:
    (code / "a_folder").mkdir()
    assert (
        unnamed(problem("a_folder:Good"), "--trial a_folder:Good: ", code / "a_folder", "__init__.py", code, sys.prefix)
        == []
    )


def test_a_module_that_cannot_be_imported_names_the_users_own_line(code: Path) -> None:
    (code / "a_helper.py").write_text("x = 1\ny = x / 0\n")
    (code / "a_broken.py").write_text("\n\nimport a_helper\n")
    facts = ["--trial a_broken:Good: ", "ZeroDivisionError: division by zero", f"{code / 'a_helper.py'}, line 2"]
    assert unnamed(problem("a_broken:Good"), *facts) == []


def test_a_missing_import_names_the_users_own_line(code: Path) -> None:
    (code / "a_lacking.py").write_text("import no_such_library\n")
    facts = ["ModuleNotFoundError: No module named 'no_such_library'", f"{code / 'a_lacking.py'}, line 1"]
    assert unnamed(problem("a_lacking:Good"), *facts) == []


def test_a_syntax_error_names_the_users_own_line(code: Path) -> None:
    (code / "a_typo.py").write_text("x = 1\ny = = 2\n")
    assert unnamed(problem("a_typo:Good"), "SyntaxError: invalid syntax", "a_typo.py, line 2") == []


def test_a_missing_class_is_named_with_its_file(code: Path) -> None:
    facts = ["--trial a_model_def:Bad: ", code / "a_model_def.py", "Bad", code, sys.prefix]
    assert unnamed(problem("a_model_def:Bad"), *facts) == []


@pytest.mark.parametrize("name", ["Other", "function"])
def test_what_is_no_trial_is_refused(code: Path, name: str) -> None:
    classes = ["hpc_det.pytorch.PyTorchTrial", "hpc_det.pytorch.deepspeed.DeepSpeedTrial"]
    assert unnamed(problem(f"a_model_def:{name}"), f"--trial a_model_def:{name}: ", *classes) == []


def test_all_missing_methods_are_named(code: Path) -> None:
    methods = ["build_training_data_loader", "build_validation_data_loader"]
    assert unnamed(problem("a_model_def:Base"), "--trial a_model_def:Base: ", *methods) == []
