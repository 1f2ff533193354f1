"""Scripts that define a trial class and never train it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.config.entrypoint import Context
from hpc_det.config.idle_script import idle_script_note
from tests.facts import unnamed

TRIAL = """
import logging
import torch
from hpc_det.pytorch import PyTorchTrial

logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
SIZES = list(range(3))


def helper():
    return MyTrial(None)


class MyTrial(PyTorchTrial):
    def __init__(self, context):
        self.model = helper()
"""


def note(folder: Path, code: str, entrypoint: object = "python3 model_def.py", **files: str) -> str | None:
    for name, text in {"model_def": code, **files}.items():
        (folder / f"{name}.py").write_text(text)
    return idle_script_note(entrypoint, Context(folder))


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 model_def.py",
        ["python3", "-u", "model_def.py", "--lr", "1"],
        "python3 -m hpc_det.launch.torch_distributed model_def.py",
        "python3 -m determined.launch.torch_distributed -- python3 model_def.py",
    ],
)
def test_a_script_that_only_defines_a_trial_is_named_with_the_entrypoint_to_write(
    tmp_path: Path, entrypoint: object
) -> None:
    assert not unnamed(note(tmp_path, TRIAL, entrypoint) or "", "entrypoint: model_def.py", "model_def:MyTrial")


@pytest.mark.parametrize(
    "more",
    [
        "helper()",
        "if __name__ == '__main__':\n    helper()",
        "from hpc_det import pytorch\nwith pytorch.init() as context:\n    pass",
        "from train import main\nmain()",
        "import hpc_det\nhpc_det.pytorch.Trainer(1).fit()",
        "exec('helper()')",
        "import runpy\nrunpy.run_path('train.py')",
        "from elsewhere import *\nmain()",
        "trainer = SIZES\ntrainer.fit()",
        "import torch.multiprocessing as mp\nmp.spawn(helper, nprocs=2)",
        "import threading\nthreading.Thread(target=helper).start()",
        "import functools, click\nclick.run(functools.partial(helper, 1))",
        "import click\nclick.run(lambda _: helper())",
        "import click\nclick.run([MyTrial.main])",
        "from train import main\nimport click\nclick.run(main)",
        "from absl import app\napp.run()",
    ],
)
def test_a_script_that_may_train_is_not_noted(tmp_path: Path, more: str) -> None:
    assert note(tmp_path, f"{TRIAL}\n{more}\n", train="def main(): ...") is None


@pytest.mark.parametrize(
    ("code", "entrypoint"),
    [
        (TRIAL, "python3 -m hpc_det.launch.direct --trial model_def:MyTrial"),
        (TRIAL, "model_def:MyTrial"),
        (TRIAL, "bash train.sh"),
        (TRIAL, "python3 missing.py"),
        ("class Model: ...", "python3 model_def.py"),
        ("if", "python3 model_def.py"),
        (TRIAL, None),
    ],
)
def test_other_entrypoints_are_not_noted(tmp_path: Path, code: str, entrypoint: object) -> None:
    assert note(tmp_path, code, entrypoint) is None
