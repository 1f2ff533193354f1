"""The bundle of byte code: what is in it, when it is current, and what a killed or failed writer leaves."""

from __future__ import annotations

import importlib
import os
import py_compile
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.node import disk
from hpc_det.node.import_bundle import import_from_bundle, usable_bundle
from hpc_det.submit.bundle import bundle_path, is_current, write_bundle
from tests.installed_packages import Site, forget_modules


@pytest.fixture(name="site")
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield Site.make(tmp_path, monkeypatch)
    forget_modules()


def bundled(site: Site) -> set[str]:
    """Write the bundle, and return the files of the site that are in it."""
    bundle = usable_bundle(site.write_bundle())
    bundle.close()
    places = ((folder, place) for folder, modules in bundle.modules.items() for place in modules.values() if place)
    paths = (Path(folder, place[0]) for folder, place in places)
    return {str(path.relative_to(site.folder)) for path in paths if site.folder in path.parents}


def test_a_bundle_has_the_modules_of_distributions_without_their_tests(site: Site) -> None:
    site.write("bundled_stray.py", "")
    assert bundled(site) == {
        "bundled_single.py",
        "bundled_package/__init__.py",
        "bundled_package/inner.py",
        "bundled_package/__main__.py",
        "bundled_parts/one.py",
    }


def test_files_that_are_no_python_of_this_version_and_links_of_installations_are_left_out(
    site: Site, tmp_path: Path
) -> None:
    site.write("bundled_package/template.py", "{{ name }} = \n")
    site.write("bundled_package/bytes.py", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"))
    linked = tmp_path / "project" / "bundled_later"
    linked.mkdir(parents=True)
    (linked / "module.py").write_text("")
    (site.folder / "bundled_later").symlink_to(linked)
    site.record("more", ["bundled_package/template.py", "bundled_later/module.py", "../../bin/tool.py", "gone.py"])
    assert not any("template" in path or "later" in path or "gone" in path for path in bundled(site))


def test_byte_code_of_a_former_source_file_is_not_used(site: Site) -> None:
    source = site.write("bundled_single.py", "value = 'former'\n")
    py_compile.compile(str(source))
    site.write("bundled_single.py", "value = 'edited'\n")
    os.utime(source, (1, 1))
    import_from_bundle({"HPC_DET_BUNDLE": site.write_bundle()})
    assert importlib.import_module("bundled_single").value == "edited"


def test_only_its_owner_can_read_a_bundle(site: Site) -> None:
    site.write_bundle()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (site.bundle, site.bundle.parent)]
    assert modes == [0o600, 0o700]


def test_a_bundle_is_current_until_a_file_or_a_package_changes(site: Site) -> None:
    assert not is_current(site.bundle)
    site.write_bundle()
    assert is_current(site.bundle)
    site.write("bundled_package/inner.py", "value = 'edited in place'\n")
    assert not is_current(site.bundle)
    site.write_bundle()
    assert is_current(site.bundle)
    site.write("bundled_later.py", "")
    site.record("later", ["bundled_later.py"])
    assert not is_current(site.bundle)
    site.write_bundle()
    (site.folder / "bundled_later.py").unlink()
    assert not is_current(site.bundle)


def test_each_environment_has_a_bundle(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = bundle_path(tmp_path)
    assert bundle_path(tmp_path) == here
    monkeypatch.setattr(sys, "path", [*sys.path, "/other/site-packages"])
    assert bundle_path(tmp_path) != here


def test_a_write_that_fails_leaves_the_former_bundle_and_no_other_file(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write_bundle()
    before = site.bundle.stat().st_ino

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        write_bundle(site.bundle)
    assert os.listdir(site.bundle.parent) == [site.bundle.name]
    assert site.bundle.stat().st_ino == before


def test_a_process_that_uses_the_former_bundle_goes_on_with_it(site: Site) -> None:
    import_from_bundle({"HPC_DET_BUNDLE": site.write_bundle()})
    site.write_bundle()
    package = importlib.import_module("bundled_package")
    assert package.value == "installed"
    assert type(package.__loader__).__name__ == "BundledLoader"
