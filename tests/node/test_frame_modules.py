"""inspect.getmodule within `modules_from_frames`: the same answers, without a search through all loaded modules."""

from __future__ import annotations

import ast
import collections
import dataclasses
import inspect
import os
import sys
import types
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_det.node.frame_modules import modules_from_frames

SHOWS = "import sys\nframe = sys._getframe()\n"


@pytest.fixture(name="resolved")
def _resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the paths that inspect resolves."""
    paths: list[str] = []
    real = os.path.realpath

    def realpath(path: str) -> str:
        paths.append(path)
        return real(path)

    monkeypatch.setattr(os.path, "realpath", realpath)
    monkeypatch.setattr(inspect, "modulesbyfile", {})
    monkeypatch.setattr(inspect, "_filesbymodname", {})
    return paths


def imported(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    (folder / f"{name}.py").write_text(SHOWS)
    monkeypatch.syspath_prepend(str(folder))
    module = __import__(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_the_module_of_a_frame_is_found_without_resolving_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolved: list[str]
) -> None:
    module = imported(tmp_path, "shows_its_frame", monkeypatch)
    with modules_from_frames():
        assert inspect.getmodule(module.frame) is module
        assert inspect.getframeinfo(module.frame).filename == module.__file__
        assert not resolved
    assert inspect.getmodule(module.frame) is module
    assert resolved, "outside of the context, inspect searches; else this test would show nothing"


def test_a_traceback_has_the_module_of_its_frame(resolved: list[str]) -> None:
    with pytest.raises(ValueError, match="mine") as error:
        raise ValueError("mine")
    with modules_from_frames():
        assert inspect.getmodule(error.tb) is sys.modules[__name__]
    assert not resolved


def frame_of(code: str, file: str, **names: object) -> types.FrameType:
    program = compile(f"import sys; frame = sys._getframe(); {code}", file, "exec")
    exec(program, names)
    frame = names["frame"]
    assert isinstance(frame, types.FrameType)
    return frame


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (ast.__file__, {"__name__": "collections"}),  # the name of another module
        (ast.__file__, {"__name__": "no_such_module"}),
        (ast.__file__, {}),
        (collections.__file__, {"__name__": 3}),
        ("<string>", {"__name__": "collections"}),
    ],
)
def test_frames_whose_globals_do_not_identify_a_module_get_the_answer_of_inspect(
    file: str, names: dict[str, object]
) -> None:
    frame = frame_of("", file, **names)
    expected = inspect.getmodule(frame)
    with modules_from_frames():
        assert inspect.getmodule(frame) is expected


def test_code_of_another_file_in_a_modules_globals_belongs_to_that_file() -> None:
    exec(compile("import sys; frame = sys._getframe()", ast.__file__, "exec"), globals())
    frame = globals().pop("frame")
    with modules_from_frames():
        assert inspect.getmodule(frame) is ast


def test_other_objects_get_the_answer_of_inspect() -> None:
    with modules_from_frames():
        assert inspect.getmodule(dataclasses.dataclass) is dataclasses
        assert inspect.getmodule(dataclasses) is dataclasses
        assert inspect.getmodule(dataclasses.dataclass.__code__) is dataclasses
        assert inspect.getmodule(3) is None


def test_inspect_has_its_own_function_again_after_an_error() -> None:
    own, within = inspect.getmodule, []
    with suppress(ZeroDivisionError), modules_from_frames():
        within.append(inspect.getmodule)
        raise ZeroDivisionError
    assert inspect.getmodule is own
    assert within != [own]


def test_a_function_that_a_library_has_put_in_its_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = inspect.getmodule

    def of_a_library(object: object, _filename: str | None = None) -> types.ModuleType | None:
        return own(object, _filename)

    with modules_from_frames():
        monkeypatch.setattr(inspect, "getmodule", of_a_library)
    assert inspect.getmodule is of_a_library
    inspect.getmodule = own
