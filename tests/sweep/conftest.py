from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.wait import DEADLINE_S

CHECKOUT = Path(__file__).parents[2]


def source(*statements: str, config: str | None = None) -> str:
    """Return the source of an app that executes `statements` with `cfg`; `config` names its file in the folder conf."""
    where = f'config_path="conf", config_name="{config}"' if config else "config_path=None"
    body = "\n    ".join(statements)
    return f"""
import json, logging, os, sys, time
import hydra

@hydra.main(version_base="1.3", {where})
def app(cfg):
    logging.getLogger(__name__).info("x is %s", cfg.x)
    {body}

if __name__ == "__main__":
    app()
"""


@dataclass(frozen=True)
class App:
    """A Hydra app in its folder, started by the same command as a user's app, with jobs on this machine."""

    folder: Path
    root: Path

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "app.py", "-m", "hydra/launcher=hpc_local", "hydra.sweep.dir=out", *overrides]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | {"HYDRA_FULL_ERROR": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def succeed(self, *overrides: str) -> str:
        """Run the app, which must exit with 0, and return its output."""
        code, output = self._run(*overrides)
        assert code == 0, output
        return output

    def fail(self, *overrides: str) -> str:
        """Run the app, which must exit with 1, and return its output."""
        code, output = self._run(*overrides)
        assert code == 1, output
        return output

    def points(self) -> list[dict[str, Any]]:
        """Return the points as `hpc-det sweep status --json` prints them."""
        code, output = self.hpc_det("sweep", "status", "out", "--json")
        assert code == 0, output
        found: list[dict[str, Any]] = json.loads(output)
        return found

    def _run(self, *overrides: str) -> tuple[int, str]:
        process = self.start(*overrides)
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output

    def hpc_det(self, *arguments: str) -> tuple[int, str]:
        code = "import sys; from hpc_det.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        return done.returncode, done.stdout

    def experiment(self, number: int = 1) -> ExperimentFolder:
        return ExperimentStore(self.root).folder(number)


@pytest.fixture
def app(tmp_path: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    folder = tmp_path / "app"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])))
    return App(folder, state_folder)
