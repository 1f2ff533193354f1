from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_det.pytorch import PyTorchTrial
from hpc_det.pytorch.state.class_name import has_main_guard, recorded_class


def defined_in(module: str) -> type[PyTorchTrial]:
    return type("Defined", (PyTorchTrial,), {"__module__": module})


@pytest.mark.parametrize(
    ("file", "run_by_m", "name"),
    [
        ("code/train.py", None, "train"),
        ("code/scripts/train.py", None, "scripts.train"),
        ("elsewhere/train.py", None, "train"),
        ("code/package/__main__.py", "package.__main__", "package.__main__"),
        ("code/train-all.py", None, "__main__"),
        (None, None, "__main__"),
    ],
)
def test_a_class_of_a_script_is_recorded_under_the_name_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, run_by_m: str | None, name: str
) -> None:
    main = SimpleNamespace(__spec__=run_by_m and SimpleNamespace(name=run_by_m))
    if file:
        main.__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, "__main__", cast(Any, main))
    found = recorded_class(defined_in("__main__"), tmp_path / "code")
    assert found == {"trial_cls_spec": f"{name}:Defined", "trial_in_main": True}


def test_a_class_of_a_module_is_recorded_under_its_own_name() -> None:
    assert recorded_class(defined_in("package.models"), None) == {"trial_cls_spec": "package.models:Defined"}


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        ('if __name__ == "__main__":\n    train()\n', True),
        ("if '__main__' == __name__:\n    train()\n", True),
        ("train()\n", False),
        ('if __name__ != "__main__":\n    train()\n', False),
        ('if name == "__main__":\n    train()\n', False),
    ],
)
def test_a_guard_of_the_main_program_is_found(source: str, guarded: bool) -> None:
    assert has_main_guard(source) is guarded
