"""A folder of installed packages, for tests of the bundle: hpc_det.node.import_bundle, hpc_det.submit.bundle."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_det.submit.bundle import write_bundle

FILES = {
    "bundled_single.py": "import sys\n\n\ndef frame():\n    return sys._getframe()\n",
    "bundled_package/__init__.py": '"""A package."""\nfrom bundled_package.inner import value\n',
    "bundled_package/inner.py": "value = 'installed'\n",
    "bundled_package/__main__.py": "result = 'ran'\n",
    "bundled_package/data.txt": "data",
    "bundled_package/tests/__init__.py": "",
    "bundled_parts/one.py": "name = 'one'\n",
}
NAMES = ("bundled_single", "bundled_package", "bundled_parts", "bundled_later", "bundled_stray")


@dataclass(frozen=True)
class Site:
    """A folder of packages on sys.path, and the path of its bundle."""

    folder: Path
    bundle: Path

    @classmethod
    def make(cls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
        """Install the packages, and put their folder on sys.path in place of the others."""
        site = cls.install(tmp_path)
        others = [folder for folder in sys.path if not folder.endswith("site-packages")]
        monkeypatch.setattr(sys, "path", [*others, str(site.folder)])
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
        return site

    @classmethod
    def install(cls, tmp_path: Path) -> Site:
        """Install the packages in a folder that is not on sys.path."""
        site = cls(tmp_path / "site-packages", tmp_path / "root" / ".bundles" / "here.bundle")
        for name, text in FILES.items():
            site.write(name, text)
        site.record("bundled", [*FILES])
        return site

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def record(self, distribution: str, files: list[str]) -> None:
        self.write(f"{distribution}-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in files))

    def write_bundle(self) -> str:
        write_bundle(self.bundle)
        return str(self.bundle)


def forget_modules() -> None:
    """Remove the modules of these packages from sys.modules, so that they are imported again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]
