"""A small venv, for tests of its archive and of local copies: hpc_det.submit.stage, hpc_det.launch.staged."""

from __future__ import annotations

import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpc_det
from hpc_det.submit import stage


@dataclass(frozen=True)
class Environment:
    """A venv with a package, a console script, and the hpc_det of the tests as an editable installation."""

    prefix: Path

    @classmethod
    def make(cls, prefix: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
        """Make a venv, which this process takes for its own when it writes an archive."""
        venv.create(prefix, symlinks=True)
        environment = cls(prefix)
        (environment.site / "hpc_det.pth").write_text(str(Path(hpc_det.__file__).parents[1]))
        environment.install("staged_package")
        script = prefix / "bin" / "staged-script"
        script.write_text(f"#!{environment.python}\nimport sys\nprint(sys.prefix)\n")
        script.chmod(0o755)
        monkeypatch.setattr(stage, "shared_prefix", lambda: str(prefix))
        return environment

    @property
    def site(self) -> Path:
        return self.prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python3")

    def install(self, name: str) -> None:
        (self.site / f"{name}.py").write_text("value = 1\n")
        record = self.site / f"{name}-1.0.dist-info" / "RECORD"
        record.parent.mkdir()
        record.write_text(f"{name}.py,,\n")
