from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.config.entrypoint import Context

CONTEXT = Context(Path("/code"), (Path("/lib/model_def.py"), Path("/other/layers")))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("train.py", "/code/train.py"),
        ("model_def.py", "/lib/model_def.py"),
        ("./model_def.py", "/lib/model_def.py"),
        ("layers/deep/conv.py", "/other/layers/deep/conv.py"),
        ("layers.py", "/code/layers.py"),
        ("sub/model_def.py", "/code/sub/model_def.py"),
        ("/abs/model_def.py", "/abs/model_def.py"),
        ("", "/code"),
    ],
)
def test_a_name_of_the_job_is_looked_up_where_it_comes_from(name: str, path: str) -> None:
    assert CONTEXT.path(name) == Path(path)


def test_included_python_files_stand_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data.csv").touch()
    assert Context(tmp_path).python_files() == ["train.py"]
    assert Context(tmp_path, CONTEXT.includes).python_files() == ["model_def.py", "train.py"]
    assert Context(tmp_path / "none").python_files() == []
