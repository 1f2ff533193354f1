from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.config.context import Context
from hpc_det.config.metric_names import metric_notes

BEGIN = "class T(PyTorchTrial):\n    def evaluate_batch(self, batch):\n"


def noted(tmp_path: Path, code: str, metric: str = "accuracy") -> list[str]:
    (tmp_path / "model_def.py").write_text(code)
    return metric_notes("python3 -m hpc_det.launch.direct --trial model_def:T", Context(tmp_path), metric)


def test_a_metric_that_is_not_returned_is_noted_with_the_nearest(tmp_path: Path) -> None:
    code = f"{BEGIN}        if batch:\n            return {{'loss': 1}}\n        return {{'loss': 1, 'acuracy': 2}}\n"
    (note,) = noted(tmp_path, code)
    assert "did you mean 'acuracy'?" in note
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
