"""A mistake of a user, and the facts that hpc-det names about it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError
from tests.cli.conftest import CONFIG, TRIAL, Command, Result
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed
from tests.stub import Stub

CREATE = "experiment create tiny.yaml code"
ANOTHER = "max_attempts_without_progress"
"""A key for a second mistake."""


@dataclass(frozen=True)
class User:
    """The folder in which a user works, with `tiny.yaml`, its `code`, and the state in `states`."""

    here: Path
    root: Path
    hpc_det: Command
    patch: pytest.MonkeyPatch
    stub: Stub

    def writes(self, name: str, text: str) -> Path:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def submits(self, scheduler: FakeScheduler | None = None) -> Life:
        """Experiment 1 is in the queue of a Slurm."""
        fake = scheduler or FakeScheduler()
        self.patch.setattr("hpc_det.schedulers.scheduler.scheduler", lambda name: fake)
        return Life.submitted(self.root)

    def trains(self) -> Life:
        """The only trial of experiment 1 is being trained."""
        life = self.submits()
        life.begins()
        return life

    def has_trained(self) -> Life:
        """Experiment 1 has completed."""
        life = self.trains()
        life.finishes()
        return life

    def files(self) -> dict[str, bytes | None]:
        """All files and folders, but those of programs, with their content."""
        stores = (self.root, self.root / "experiments")  # empty, they are no harm
        return {
            str(path.relative_to(self.here)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.here.rglob("*"))
            if path.name != ".index.json" and "stubs" not in path.parts and (path.is_file() or path not in stores)
        }


Facts = Sequence[object]


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Each fact is a word, number or phrase of the message; `HERE` in one stands for the user's folder."""

    name: str
    what: Facts
    """What is wrong: a key, value or name."""
    where: Facts
    """Its place: a file, line, key, folder or program."""
    values: Facts = ()
    """The value that was given, and those that are possible."""
    remedy: Facts = ()
    """A command, option, key or close match."""
    code: int = 2
    secrets: Facts = ()
    """They are not in the message."""

    def is_explained(self, said: str, here: Path) -> None:
        kinds = {"what": self.what, "where": self.where, "values": self.values, "remedy": self.remedy}
        facts = {kind: [str(fact).replace("HERE", str(here)) for fact in named] for kind, named in kinds.items()}
        missing = {kind: found for kind, named in facts.items() if (found := unnamed(said, *named))}
        assert not missing, f"{missing} not in the message:\n{said}"
        assert [secret for secret in self.secrets if str(secret) in said] == []


@dataclass(frozen=True, kw_only=True)
class Mistake(Explained):
    """A mistake on the command line, or in a file that hpc-det reads."""

    command: str | Callable[[User], object] = CREATE
    """A command line of hpc-det, or a function that raises the error."""
    config: str = CONFIG.lstrip()
    add: str = ""
    """Lines at the end of the config."""
    files: Mapping[str, str] = field(default_factory=dict)
    given: Callable[[User], object] | None = None
    """What has happened before."""

    def is_made_by(self, user: User) -> Result:
        """The user makes it, in a folder that afterwards is as before."""
        user.writes("tiny.yaml", self.config + self.add)
        user.writes("code/model_def.py", TRIAL)
        for name, text in self.files.items():
            user.writes(name, text)
        if self.given:
            self.given(user)
        before = user.files()
        result = self._said(user)
        assert user.files() == before, "nothing is left half-done"
        return result

    def _said(self, user: User) -> Result:
        if isinstance(self.command, str):
            return user.hpc_det(*shlex.split(self.command))
        with pytest.raises(HpcDetError) as raised:
            self.command(user)
        return Result(raised.value.exit_code, "", "".join(f"hpc-det: {line}\n" for line in raised.value.problems))
