"""Writes the bundle of byte code from which ranks import the installed packages (hpc_det.node.import_bundle).

Each Python environment has one bundle, in the folder of experiments. The bundle contains Python's own modules, and the
files that distributions list in their RECORD. Editable installations and the user's code are not in it, because they
change; folders of tests are not in it, because ranks do not import them.
"""

from __future__ import annotations

import csv
import hashlib
import marshal
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.util import MAGIC_NUMBER, cache_from_source
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from hpc_det.errors import say
from hpc_det.node import disk
from hpc_det.node.files import replacement_of
from hpc_det.node.import_bundle import (
    FOOTER_BYTES,
    Bundle,
    FileState,
    Modules,
    UnusableBundle,
    names_in,
    python_key,
    state_of,
    usable_bundle,
)

_SUFFIXES = [*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES]
"""In the order in which Python looks for them (importlib.machinery.FileFinder)."""
_Source: TypeAlias = tuple[str, str, str]
"""A folder, the name of a module in it, and the module's file, relative to the folder."""
_TESTS = ("test", "tests")
_READERS = 32
"""Threads that read files, most of whose time is the wait for a file server."""
_AT_ONCE = 512
"""Files that are in memory at the same time."""


@dataclass(frozen=True)
class Written:
    """What a bundle contains."""

    packages: int
    """Number of installed distributions."""
    modules: int
    size_bytes: int


@dataclass(frozen=True)
class _Installed:
    """What is installed; the first three as in `Bundle`, without the places of source files."""

    names: dict[str, list[str]] = field(default_factory=dict)
    records: dict[str, FileState] = field(default_factory=dict)
    modules: dict[str, Modules] = field(default_factory=dict)
    sources: list[_Source] = field(default_factory=list)


def site_folders() -> list[str]:
    """Return the entries of sys.path into which packages are installed."""
    return [folder for folder in sys.path if os.path.basename(folder) in ("site-packages", "dist-packages")]


def bundle_path(root: Path) -> Path:
    """Return the path of this environment's bundle, which may not exist. `root`: the folder of experiments."""
    environment = "\0".join([python_key().decode(), sys.prefix, *site_folders()])
    return root / ".bundles" / f"{hashlib.sha256(environment.encode()).hexdigest()[:16]}.bundle"


def is_current(path: Path) -> bool:
    """Return whether the bundle can be used, and contains the installed packages and source files as they are now."""
    try:
        bundle = usable_bundle(str(path))
        bundle.close()
        return all(names_in(folder) == {*names} for folder, names in bundle.names.items()) and (
            bundle.sources == _digest(_sizes_and_times(bundle))
        )
    except UnusableBundle:
        return False


def make_current(path: Path) -> None:
    """Write the bundle if it is not current. If that fails, print a note: ranks will use the packages' own files."""
    if is_current(path):
        return
    say(f"writing {path}, from which ranks import installed packages; later submissions use it again")
    try:
        write_bundle(path)
    except OSError as error:
        say(f"note: {path}: {error.strerror}; ranks will import from the packages' own files")


def write_bundle(path: Path) -> Written:
    """Write the bundle of this environment, and replace a former one. Raises OSError.

    Processes that use the former one keep it open, or load from the packages' own files.
    """
    with replacement_of(path) as (_, descriptor):
        return _write(_installed(), descriptor)


def _write(installed: _Installed, descriptor: int) -> Written:
    offset, seen = 0, dict[str, FileState]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about code of others
        for (folder, name, file), (found, pyc) in _byte_codes(installed.sources):
            installed.modules[folder][name] = (file, offset, len(pyc)) if pyc else None
            if pyc:
                seen[f"{folder}/{file}"] = found
                disk.write_all(descriptor, pyc)
                offset += len(pyc)
    parts = (installed.names, installed.records, installed.modules, _digest(seen))
    index = marshal.dumps(dict(zip(("names", "records", "modules", "sources"), parts, strict=True)))
    size = offset + len(index) + FOOTER_BYTES
    footer = b"%s %d %d" % (python_key(), len(index), size)
    disk.write_all(descriptor, index + footer.ljust(FOOTER_BYTES))
    modules = sum(place is not None for places in installed.modules.values() for place in places.values())
    return Written(len(installed.records) - 1, modules, size)


def _digest(files: Mapping[str, FileState]) -> bytes:
    return hashlib.sha256(repr(sorted(files.items())).encode()).digest()


def _sizes_and_times(bundle: Bundle) -> dict[str, FileState]:
    """Return size and time of each source file in the bundle."""
    places = ((folder, place) for folder, modules in bundle.modules.items() for place in modules.values() if place)
    paths = [f"{folder}/{file}" for folder, (file, _, size) in places if size]
    parts = [paths[begin : begin + _AT_ONCE] for begin in range(0, len(paths), _AT_ONCE)]
    with ThreadPoolExecutor(_READERS) as readers:
        states = readers.map(lambda part: [*map(state_of, part)], parts)
        return dict(zip(paths, chain.from_iterable(states), strict=True))


# --- the installed packages


def _installed() -> _Installed:
    installed = _Installed()
    for site in site_folders():
        try:
            installed.names[site] = sorted(names_in(site))
        except UnusableBundle:  # an entry of sys.path that does not exist
            continue
        folders: dict[str, set[str]] = {"": set()}
        for name in installed.names[site]:
            record = f"{site}/{name}/RECORD"
            if name.endswith(".dist-info") and (found := state_of(record)):
                installed.records[record] = found
                for folder, file in map(os.path.split, _listed_files(record)):
                    if file.endswith(tuple(_SUFFIXES)) and not _is_left_out(site, folder):
                        folders.setdefault(folder, set()).add(file)
        _add_modules(site, folders, installed)
    _add_standard_library(installed)
    return installed


def _add_standard_library(installed: _Installed) -> None:
    """Add Python's own modules; its version and os.py stand for a RECORD."""
    library = os.path.dirname(os.__file__)
    installed.records[os.__file__] = state_of(os.__file__)
    for top in (library, f"{library}/lib-dynload"):
        with suppress(UnusableBundle):  # there is none in the second folder if all are built into Python
            installed.names[top] = sorted(names_in(top))
            folders = {"": {*installed.names[top]}}
            for path, below, files in os.walk(top):
                below[:] = [name for name in below if name.isidentifier() and name not in _TESTS]
                folders[os.path.relpath(path, top).removeprefix(".")] = {*files}
            _add_modules(top, folders, installed)


def _listed_files(record: str) -> Iterator[str]:
    """Yield the paths in a RECORD file, relative to the folder of packages (PEP 376)."""
    with open(record, newline="", encoding="utf-8", errors="surrogateescape") as file:
        yield from [row[0] for row in csv.reader(file) if row]


def _is_left_out(site: str, folder: str) -> bool:
    """Return whether a folder has tests, is outside of `site`, or is a link of a development installation."""
    parts = folder.split("/")
    return ".." in parts or not set(_TESTS).isdisjoint(parts) or (folder != "" and os.path.islink(f"{site}/{parts[0]}"))


def _add_modules(site: str, folders: Mapping[str, set[str]], installed: _Installed) -> None:
    """Add the modules in these folders of `site`. `folders`: with the files that belong to distributions."""
    present = {folder: names_in(f"{site}/{folder}".rstrip("/")) for folder in folders}
    for folder, names in present.items():
        path = f"{site}/{folder}".rstrip("/")
        modules = installed.modules[path] = dict.fromkeys(name.partition(".")[0] for name in names)
        for name in modules:
            below = f"{folder}/{name}".lstrip("/")
            if name in names and below not in folders:  # a folder that belongs to no distribution
                continue
            inits = [f"__init__{suffix}" for suffix in _SUFFIXES]
            package = next((init for init in inits if init in present.get(below, ())), None)
            file = package or next((f"{name}{suffix}" for suffix in _SUFFIXES if f"{name}{suffix}" in names), None)
            if file is None or file not in folders[below if package else folder]:
                continue
            place = f"{name}/{package}" if package else file
            if place.endswith(tuple(EXTENSION_SUFFIXES)):
                modules[name] = (place, 0, 0)
            elif place.endswith(tuple(SOURCE_SUFFIXES)):
                installed.sources.append((path, name, place))


def _byte_codes(sources: Sequence[_Source]) -> Iterator[tuple[_Source, tuple[FileState, bytes]]]:
    with ThreadPoolExecutor(_READERS) as readers:
        for begin in range(0, len(sources), _AT_ONCE):
            part = sources[begin : begin + _AT_ONCE]
            yield from zip(part, readers.map(_byte_code, part), strict=True)


def _byte_code(source: _Source) -> tuple[FileState, bytes]:
    """Return the state of a source file and the content of its .pyc file (PEP 552); b"" if there is no byte code."""
    folder, _, file = source
    path = f"{folder}/{file}"
    state = state_of(path)
    if state is None:
        return None, b""
    size, time_ns = state
    numbers = b"".join((n & 0xFFFFFFFF).to_bytes(4, "little") for n in (0, time_ns // 10**9, size))
    with suppress(OSError):
        cached = Path(cache_from_source(path)).read_bytes()
        if cached.startswith(MAGIC_NUMBER + numbers):
            return state, cached
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError):  # templates, and files for other versions of Python
        return state, b""
    return state, MAGIC_NUMBER + numbers + marshal.dumps(code)
