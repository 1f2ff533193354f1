"""The code of an experiment as it lies before a job's copy is made of it: the context directory, and what is put
beside its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath


@dataclass(frozen=True)
class Context:
    folder: Path
    includes: tuple[Path, ...] = ()
    """Files and folders, absolute; each has its own name beside what is in `folder`."""

    def path(self, name: str) -> Path:
        """Where that lies which a job will find as `name` in its folder."""
        return self.folder_of(name) / name

    def folder_of(self, name: str) -> Path:
        """The folder in which `name` is to be looked up."""
        first = PurePath(name).parts[:1]
        return next((include.parent for include in self.includes if (include.name,) == first), self.folder)

    def python_files(self) -> str:
        """The names of the Python files at the top, for a message."""
        included = (path for path in self.includes if path.suffix == ".py")
        names = sorted(file.name for file in (*self.folder.glob("*.py"), *included))
        return ", ".join(names) or "no Python file"
