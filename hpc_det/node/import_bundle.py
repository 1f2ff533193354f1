"""Imports from a bundle: one file with the byte code of all packages that are installed in the Python environment.

On a shared file system, `import torch` makes 12,000 metadata calls; from a bundle, it makes a tenth of them. The finder
is used in front of Python's own. It answers from the bundle's index, without looking at the files of a package; names
that it does not know are left to Python's finder. Modules have their usual `__file__`, source text and resources.

    byte code (.pyc files, one after another)
    index     marshal: {"names": {folder: [name]}, "records": {path: [size, mtime]}, "modules": {folder: {name: place}},
                        "sources": digest}
    footer    hpc-det-bundle FORMAT PYTHON MAGIC OPTIMIZE INDEX_BYTES FILE_BYTES

`folder` is an entry of sys.path or a folder below it, and `place` is [file, offset, bytes] of a module in it: bytes
is 0 for an extension module. None: files that Python's finder has to look for.

The bundle contains code that is executed, so a file that another user could have written is refused.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import marshal
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, TypeAlias

VARIABLE = "HPC_DET_BUNDLE"
"""The variable with the path of the bundle, set by the agent; unset or empty: none."""
FOOTER_BYTES = 256

Place: TypeAlias = tuple[str, int, int]
FileState: TypeAlias = tuple[int, int] | None
"""Size and time of the last change [ns] of a file; None if it does not exist."""
Modules: TypeAlias = dict[str, Place | None]


class UnusableBundle(Exception):
    """The bundle does not exist, is unsafe, or does not match the installed packages."""


def import_from_bundle(env: Mapping[str, str]) -> None:
    """Import installed packages from the bundle that HPC_DET_BUNDLE names; if it cannot be used, print a note."""
    path = env.get(VARIABLE)
    if not path or any(isinstance(finder, BundleFinder) for finder in sys.meta_path):
        return
    try:
        finder = BundleFinder(usable_bundle(path))
    except UnusableBundle as why:
        remedy = "`hpc-det environment bundle` makes a new one"
        print(f"hpc-det: note: packages are not imported from the bundle {path}: {why}; {remedy}", file=sys.stderr)
        return
    # Finders of other packages, such as that of an editable installation, keep their place before or after it.
    place = next((n for n, other in enumerate(sys.meta_path) if other is PathFinder), len(sys.meta_path))
    sys.meta_path.insert(place, finder)


class Bundle:
    """An open bundle."""

    def __init__(self, descriptor: int, index: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self.names: dict[str, Sequence[str]] = index["names"]
        """For each entry of sys.path that is in the bundle, the names in that folder."""
        self.records: dict[str, FileState] = index["records"]
        """The RECORD file of each installed distribution, which an installer rewrites."""
        self.modules: dict[str, Modules] = index["modules"]
        self.sources: bytes = index["sources"]
        """Digest of sizes and times of all source files."""

    def read(self, offset: int, size: int) -> bytes:
        """Return a part of the file. Raises OSError, also if the file has become shorter."""
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise OSError("the bundle ends early")
        return data

    def close(self) -> None:
        os.close(self._descriptor)


def usable_bundle(path: str) -> Bundle:
    """Open a bundle and compare it with the installed packages. Raises UnusableBundle."""
    bundle = open_bundle(path)
    try:
        _insist_on_installed(bundle)
    except BaseException:
        bundle.close()
        raise
    return bundle


def open_bundle(path: str) -> Bundle:
    """Open a bundle of this Python version. Raises UnusableBundle."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # does not wait for a FIFO's writer
        status = os.fstat(descriptor)
        insist_on_owner(status, os.stat(os.path.dirname(path)))
        footer = os.pread(descriptor, FOOTER_BYTES, max(status.st_size - FOOTER_BYTES, 0)).split()
        if footer[:-2] != python_key().split():
            raise UnusableBundle("it belongs to another version of Python or hpc_det, or is damaged")
        index_bytes, file_bytes = map(int, footer[-2:])
        if file_bytes != status.st_size:
            raise UnusableBundle(f"it has {status.st_size} bytes, expected {file_bytes}")
        # Only after the check of the owner: damaged or forged data can crash the interpreter (marshal).
        index = marshal.loads(os.pread(descriptor, index_bytes, file_bytes - FOOTER_BYTES - index_bytes))
        return Bundle(descriptor, index)
    except (OSError, UnusableBundle, ValueError, TypeError, EOFError, KeyError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, UnusableBundle):
            raise
        raise UnusableBundle(error.strerror if isinstance(error, OSError) else "it is damaged") from None


def python_key() -> bytes:
    """Return the begin of the footer: the format of the bundle and of its byte code."""
    magic = importlib.util.MAGIC_NUMBER.hex()
    return f"hpc-det-bundle 1 {sys.implementation.name}-{sys.hexversion:x} {magic} {sys.flags.optimize}".encode()


def state_of(path: str) -> FileState:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def insist_on_owner(file: os.stat_result, folder: os.stat_result) -> None:
    """Raise UnusableBundle if another user, except root, can have written the file or replaced it in its folder."""
    if not stat.S_ISREG(file.st_mode):
        raise UnusableBundle("it is not a file")
    for name, status in (("it", file), ("its folder", folder)):
        if status.st_uid not in (os.geteuid(), 0):
            raise UnusableBundle(f"{name} belongs to user {status.st_uid}, who may change what your jobs run")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise UnusableBundle(f"{name} has mode {mode:04o}, so others may change what your jobs run")


def _insist_on_installed(bundle: Bundle) -> None:
    """Raise UnusableBundle if a package was changed or removed; leave added ones to Python's finder.

    Installers rewrite a distribution's RECORD with each change; one stat(2) per distribution costs much less than one
    per module. A source file that is edited in place is seen at the next submission (hpc_det.submit.bundle).
    """
    if not bundle.names.keys() & set(sys.path):
        raise UnusableBundle("this Python imports from other folders")
    for path, found in bundle.records.items():
        if state_of(path) != found:
            raise UnusableBundle(f"{os.path.basename(os.path.dirname(path))} was changed or removed")
    for folder, names in bundle.names.items():
        present = names_in(folder)
        if gone := set(names) - present:
            raise UnusableBundle(f"{folder}/{min(gone)} was removed")
        for name in present.difference(names):
            bundle.modules[folder][name.partition(".")[0]] = None


def names_in(folder: str) -> set[str]:
    """Return the names in a folder of packages. Raises UnusableBundle."""
    try:
        # Without names that come and go: those of pip and NFS begin with a special character.
        return {name for name in os.listdir(folder) if name[0].isalnum() or name[0] == "_"} - {"__pycache__"}
    except OSError as error:
        raise UnusableBundle(f"{folder}: {error.strerror}") from None


class BundleFinder:
    """Finds modules in the folders of a bundle, in the order of sys.path or of the package's `__path__`."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._hooks = [*sys.path_hooks]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module; None: Python's finder is to look for it."""
        # A reload reads the file again. Path hooks of a library, such as a type checker, change how files are read.
        if target is not None or sys.path_hooks != self._hooks:
            return None
        last = name.rpartition(".")[2]
        for folder in sys.path if path is None else path:
            modules = self._bundle.modules.get(folder)
            if modules is not None and last not in modules:
                continue
            place = modules[last] if modules else None
            if place:
                return self._spec(name, folder, *place)
            # Not in the bundle, such as the user's code, which comes before installed packages.
            if spec := PathFinder.find_spec(name, [folder]):
                return spec if spec.loader else None  # a namespace package may have parts in several folders
        return None

    def _spec(self, name: str, folder: str, file: str, offset: int, size: int) -> ModuleSpec | None:
        path = f"{folder}/{file}"
        loader = BundledLoader(name, path, self._bundle, offset, size) if size else ExtensionFileLoader(name, path)
        parts = [os.path.dirname(path)] if "/" in file else None  # a package is NAME/__init__.py
        return importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=parts)


class BundledLoader(SourceFileLoader):
    """Loads a module as SourceFileLoader does, except that its .pyc file is a part of the bundle."""

    def __init__(self, name: str, path: str, bundle: Bundle, offset: int, size: int) -> None:
        super().__init__(name, path)
        self._bundle = bundle
        self._range = offset, size
        self._pyc: bytes | None = None

    def get_code(self, fullname: str) -> Any:
        try:
            self._pyc = self._bundle.read(*self._range)
        except OSError:  # it was replaced by a newer one, which on NFS ends access to the former file
            self._pyc = None
        if self._pyc and not self._pyc.startswith(importlib.util.MAGIC_NUMBER):  # the program has closed the descriptor
            self._pyc = None
        try:
            return super().get_code(fullname)
        finally:
            self._pyc = None

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return time and size of the source file, as the .pyc file has recorded them (PEP 552)."""
        if self._pyc is None:
            return super().path_stats(path)
        numbers = (int.from_bytes(self._pyc[begin : begin + 4], "little") for begin in (8, 12))
        return dict(zip(("mtime", "size"), numbers, strict=True))

    def get_data(self, path: str) -> bytes:
        """Return the content of a file: of the module's .pyc file, while get_code asks for it, from the bundle."""
        if self._pyc is not None and path != self.path:
            return self._pyc
        return super().get_data(path)
