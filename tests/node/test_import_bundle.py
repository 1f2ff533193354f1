"""Imports from a bundle: the same modules as from the packages' own files, or a note and the packages' own files."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader, FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from hpc_det.node.import_bundle import (
    FOOTER_BYTES,
    VARIABLE,
    BundledLoader,
    BundleFinder,
    UnusableBundle,
    import_from_bundle,
    open_bundle,
    usable_bundle,
)
from tests.installed_packages import Site, forget_modules


@pytest.fixture(name="site")
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield Site.make(tmp_path, monkeypatch)
    forget_modules()


@pytest.fixture(name="bundle")
def _bundle(site: Site) -> str:
    return site.write_bundle()


def is_bundled(module: ModuleType) -> bool:
    return isinstance(module.__spec__ and module.__spec__.loader, BundledLoader)


def imported(name: str) -> ModuleType:
    forget_modules()
    return importlib.import_module(name)


# --- what a module has


def test_modules_from_a_bundle_have_the_attributes_of_modules_from_files(bundle: str) -> None:
    names = ("bundled_single", "bundled_package", "bundled_package.inner")
    attributes = ("__name__", "__file__", "__cached__", "__path__", "__package__", "__doc__")
    from_files = [[getattr(imported(name), each, None) for each in attributes] for name in names]
    import_from_bundle({VARIABLE: bundle})
    modules = [imported(name) for name in names]
    assert [[getattr(module, each, None) for each in attributes] for module in modules] == from_files
    assert all(map(is_bundled, modules))


def test_source_text_and_data_of_a_bundled_package_can_be_read(site: Site, bundle: str) -> None:
    import_from_bundle({VARIABLE: bundle})
    single, package = imported("bundled_single"), importlib.import_module("bundled_package")
    assert inspect.getsource(single.frame) == "def frame():\n    return sys._getframe()\n"
    assert inspect.getframeinfo(single.frame()).filename == str(site.folder / "bundled_single.py")
    assert importlib.resources.files(package).joinpath("data.txt").read_text() == "data"
    assert pkgutil.get_data("bundled_package", "data.txt") == b"data"
    assert [info.name for info in pkgutil.iter_modules(package.__path__)] == ["__main__", "inner", "tests"]


def test_a_bundled_package_runs_as_a_program(bundle: str) -> None:
    import_from_bundle({VARIABLE: bundle})
    assert runpy.run_module("bundled_package", run_name="__main__")["result"] == "ran"


def test_the_bundle_finds_the_standard_library_where_python_finds_it(bundle: str) -> None:
    opened = usable_bundle(bundle)
    finder, library = BundleFinder(opened), os.path.dirname(os.__file__)
    kinds = set()
    for folder, modules in opened.modules.items():
        is_top = folder in sys.path
        package = "" if is_top else folder.removeprefix(f"{library}/").replace("/", ".") + "."
        for name in (name for name, place in modules.items() if place and folder.startswith(library)):
            path = None if is_top else [folder]
            found, expected = finder.find_spec(package + name, path), PathFinder.find_spec(package + name, path)
            assert _facts(found) == _facts(expected), package + name
            kinds.add(type(found and found.loader))
    opened.close()
    assert {BundledLoader, ExtensionFileLoader} <= kinds


def _facts(spec: ModuleSpec | None) -> object:
    return spec and (spec.name, spec.origin, spec.cached, spec.submodule_search_locations, spec.has_location)


# --- which modules are left to Python's finder


def test_the_users_code_comes_before_an_installed_package_of_the_same_name(
    site: Site, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "bundled_single.py").write_text("mine = True")
    monkeypatch.setattr(sys, "path", [str(code), *sys.path])
    import_from_bundle({VARIABLE: bundle})
    assert imported("bundled_single").mine
    assert is_bundled(importlib.import_module("bundled_package"))


def test_names_that_the_bundle_lacks_are_found_by_python(site: Site) -> None:
    site.write("bundled_stray.py", "")  # of no distribution
    bundle = site.write_bundle()
    import_from_bundle({VARIABLE: bundle})
    site.write("bundled_package/added.py", "")
    assert not is_bundled(imported("bundled_stray"))
    assert not is_bundled(importlib.import_module("bundled_package.added"))
    assert not is_bundled(importlib.import_module("bundled_package.tests"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("bundled_package.missing")


def test_a_package_that_was_installed_later_is_found(site: Site, bundle: str) -> None:
    site.write("bundled_later.py", "")
    site.record("later", ["bundled_later.py"])
    import_from_bundle({VARIABLE: bundle})
    assert not is_bundled(imported("bundled_later"))
    assert is_bundled(importlib.import_module("bundled_package"))


def test_a_namespace_package_has_its_parts_in_all_folders(
    bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "bundled_parts"
    other.mkdir(parents=True)
    (other / "two.py").write_text("name = 'two'")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.parent)])
    import_from_bundle({VARIABLE: bundle})
    one, two = imported("bundled_parts.one"), importlib.import_module("bundled_parts.two")
    assert (one.name, is_bundled(one)) == ("one", True)
    assert (two.name, is_bundled(two)) == ("two", False)


def test_a_reload_reads_the_edited_file(site: Site, bundle: str) -> None:
    import_from_bundle({VARIABLE: bundle})
    module = imported("bundled_package.inner")
    site.write("bundled_package/inner.py", "value = 'edited now'\n")
    assert importlib.reload(module).value == "edited now"


def test_a_hook_that_changes_how_files_are_read_applies_to_installed_packages(
    site: Site, bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Translated(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return compile("translated = True", self.path, "exec")

    import_from_bundle({VARIABLE: bundle})
    monkeypatch.setattr(sys, "path_hooks", [FileFinder.path_hook((Translated, [".py"])), *sys.path_hooks])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert imported("bundled_single").translated


def test_a_bundle_that_ends_early_is_replaced_by_the_packages_own_files(bundle: str) -> None:
    import_from_bundle({VARIABLE: bundle})
    os.truncate(bundle, 0)  # as if its server did not know the file any more
    assert imported("bundled_package").value == "installed"


def test_a_descriptor_that_the_program_has_given_to_another_file_is_not_read(site: Site, bundle: str) -> None:
    import_from_bundle({VARIABLE: bundle})
    descriptors = [int(number) for number in os.listdir("/proc/self/fd")]
    opened = next(fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}") and _is(fd, bundle))
    other = os.open("/dev/zero", os.O_RDONLY)
    os.dup2(other, opened)
    os.close(other)
    assert imported("bundled_package").value == "installed"


def _is(descriptor: int, path: str) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


# --- which bundles are refused


def refusal(bundle: str) -> str:
    with pytest.raises(UnusableBundle) as refused:
        usable_bundle(bundle)
    return str(refused.value)


def _reinstall(site: Site) -> None:
    site.record("bundled", ["bundled_single.py"])


def _uninstall(site: Site) -> None:
    (site.folder / "bundled-1.0.dist-info" / "RECORD").unlink()


def _delete(site: Site) -> None:
    (site.folder / "bundled_single.py").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_reinstall, "bundled-1.0.dist-info was changed or removed"),
        (_uninstall, "bundled-1.0.dist-info was changed or removed"),
        (_delete, "bundled_single.py was removed"),
    ],
)
def test_a_bundle_of_changed_packages_is_not_used_and_a_note_says_why(
    site: Site, bundle: str, capsys: pytest.CaptureFixture[str], change: Callable[[Site], None], reason: str
) -> None:
    change(site)
    import_from_bundle({VARIABLE: bundle})
    assert not any(isinstance(finder, BundleFinder) for finder in sys.meta_path)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert reason in printed
    assert "hpc-det environment bundle" in printed


def test_a_bundle_that_others_may_write_is_refused(bundle: str) -> None:
    os.chmod(bundle, 0o620)
    assert "it has mode 0620" in refusal(bundle)
    os.chmod(bundle, 0o600)
    folder = Path(bundle).parent
    folder.chmod(0o702)
    assert "its folder has mode 0702" in refusal(bundle)


def test_a_bundle_of_another_user_is_refused(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.stat(bundle).st_uid
    other = owner + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    if owner == 0:  # root's files are accepted, so this one becomes that of a third user
        os.chown(bundle, other + 1, -1)
        owner = other + 1
    assert f"it belongs to user {owner}" in refusal(bundle)


def test_a_link_to_a_bundle_is_refused(bundle: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(bundle)
    assert refusal(str(link))


def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert refusal(str(tmp_path / "fifo")) == "it is not a file"


def test_a_bundle_of_another_version_of_python_is_refused(bundle: str) -> None:
    size = os.stat(bundle).st_size
    with open(bundle, "r+b") as file:
        file.seek(size - FOOTER_BYTES)
        footer = file.read()
        file.seek(size - FOOTER_BYTES)
        file.write(footer.replace(f"-{sys.hexversion:x}".encode(), b"-3000000"))
    assert "another version of Python" in refusal(bundle)


@pytest.mark.parametrize("content", [b"", b"x" * 1000])
def test_a_file_that_is_no_bundle_is_refused(bundle: str, content: bytes) -> None:
    Path(bundle).write_bytes(content)
    assert "damaged" in refusal(bundle)


def test_a_bundle_with_bytes_missing_is_refused(bundle: str) -> None:
    content = Path(bundle).read_bytes()
    Path(bundle).write_bytes(content[1:])
    assert f"expected {len(content)}" in refusal(bundle)


def test_a_bundle_of_another_environment_is_not_used(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert "imports from other folders" in refusal(bundle)


def test_a_missing_bundle_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_from_bundle({VARIABLE: str(tmp_path / "none")})
    assert "No such file" in capsys.readouterr().err


def test_without_the_variable_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    before = [*sys.meta_path]
    import_from_bundle({})
    import_from_bundle({VARIABLE: ""})
    assert sys.meta_path == before
    assert capsys.readouterr().err == ""


def test_a_refused_bundle_is_closed(bundle: str) -> None:
    os.chmod(bundle, 0o622)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UnusableBundle):
        open_bundle(bundle)
    assert len(os.listdir("/proc/self/fd")) == len(before)
