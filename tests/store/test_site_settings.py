"""The site's settings: the root of users without HPC_DET_ROOT, and mistakes in site.yaml."""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.store import site_settings as site_settings_module
from hpc_det.store.experiments import configured_root, root_of, state_root
from hpc_det.store.site_settings import site_settings
from tests.cli.users import SHARED_GROUP, STRANGER, as_user
from tests.facts import refused

ME = pwd.getpwuid(os.geteuid())


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Return an environment with two folders of the site, "one" before "two"."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    return {"HPC_DET_SITE_CONF": os.pathsep.join(map(str, folders))}


def write(tmp_path: Path, folder: str, text: str) -> Path:
    file = tmp_path / folder / "site.yaml"
    file.write_text(text)
    return file


def test_of_two_folders_the_first_that_has_a_setting_counts(tmp_path: Path, site: dict[str, str]) -> None:
    one = write(tmp_path, "one", "default_cluster: a")
    two = write(tmp_path, "two", "default_cluster: b\nroot: /s/$USER")
    found = site_settings(site)
    assert found.default_cluster is not None
    assert found.root is not None
    assert (found.default_cluster.value, found.default_cluster.file, found.root.file) == ("a", one, two)
    assert site_settings({}).root is None


@pytest.mark.parametrize(
    ("written", "root"),
    [
        ("/scratch/$USER/hpc_det", f"/scratch/{ME.pw_name}/hpc_det"),
        ("/scratch/${USER}_x", f"/scratch/{ME.pw_name}_x"),
        ("$WORK/hpc_det", "/work/7/hpc_det"),
    ],
)
def test_the_root_has_the_variables_of_the_user(written: str, root: str, tmp_path: Path, site: dict[str, str]) -> None:
    file = write(tmp_path, "one", f"root: {written}")
    found = configured_root({**site, "WORK": "/work/7", "USER": "someone-else"})
    assert (str(found.path), found.origin) == (root, f"{file}: root")


def test_a_variable_of_the_user_comes_before_the_site(tmp_path: Path, site: dict[str, str]) -> None:
    write(tmp_path, "one", "root: /scratch/$USER")
    assert configured_root({**site, "HPC_DET_ROOT": "/mine"}) == (Path("/mine"), "HPC_DET_ROOT")
    assert configured_root({}).origin == "the default"


def test_a_colleague_is_found_below_the_sites_root(tmp_path: Path, site: dict[str, str]) -> None:
    write(tmp_path, "one", "root: /scratch/$USER/hpc_det")
    assert root_of("nobody", site) == Path("/scratch/nobody/hpc_det")
    assert root_of("/their/root", site) == Path("/their/root")
    assert root_of("nobody", {}) == Path(pwd.getpwnam("nobody").pw_dir) / "hpc_det"
    file = write(tmp_path, "one", "root: $WORK/hpc_det")
    with refused(UsageError, file, "$WORK", "nobody", "HPC_DET_ROOT"):
        root_of("nobody", {**site, "WORK": "/work/7"})


def test_a_root_that_others_may_write_to_is_refused_with_its_origin(tmp_path: Path, site: dict[str, str]) -> None:
    (tmp_path / ME.pw_name).mkdir()
    (tmp_path / ME.pw_name).chmod(0o777)
    file = write(tmp_path, "one", f"root: {tmp_path}/$USER")
    with refused(UsageError, file, tmp_path / ME.pw_name, "0777"):
        state_root(site)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("root: /scratch/hpc_det", ["/scratch/hpc_det", "$USER"]),
        ("root: scratch/$USER", ["scratch/$USER", "absolute"]),
        ("root: $NOWHERE/x", ["$NOWHERE", "HPC_DET_ROOT"]),
        ("root: /scratch/$USER/$(id -un)", ["/scratch/$USER/$(id -un)", "$NAME"]),
        ('root: "/scratch/${USER:-me}"', ["/scratch/${USER:-me}", "${NAME}"]),
        ("root: 7", ["root", 7]),
        ("root: ''", ["root", "''"]),
        ('root: "/a/$USER\\n"', ["root"]),
        ("roots: /a\ndefault_cluster: [a]", ["'roots'", "'root'", "default_cluster", "['a']"]),
        ("- a", ["default_cluster", "root"]),
        ("a: [", ["YAML"]),
    ],
)
def test_a_mistake_is_told_with_the_file(text: str, facts: list[object], tmp_path: Path, site: dict[str, str]) -> None:
    file = write(tmp_path, "one", text)
    with refused(UsageError, file, *facts):
        configured_root(site)


@pytest.mark.parametrize("what", ["", "site.yaml", "cluster", "template"])
def test_what_every_user_can_change_is_refused(what: str, tmp_path: Path, site: dict[str, str]) -> None:
    write(tmp_path, "one", "root: /scratch/$USER")
    for group in ("cluster", "template"):
        (tmp_path / "one" / group).mkdir()
    path = tmp_path / "one" / what
    path.chmod(path.stat().st_mode | 0o002)
    with refused(UsageError, path, f"{path.stat().st_mode & 0o777:04o}", ME.pw_name, f"chmod go-w {path}"):
        configured_root(site)


def test_what_the_users_of_ones_primary_group_can_change_is_refused(
    tmp_path: Path, site: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "one", "root: /scratch/$USER").chmod(0o664)
    os.chown(tmp_path / "one" / "site.yaml", -1, ME.pw_gid)
    for is_alone in (True, False):
        monkeypatch.setattr(site_settings_module, "is_users_alone", lambda _group, is_alone=is_alone: is_alone)
        if is_alone:
            assert configured_root(site).path == Path("/scratch") / ME.pw_name
        else:
            with refused(UsageError, tmp_path / "one" / "site.yaml", "0664", grp.getgrgid(ME.pw_gid).gr_name):
                configured_root(site)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another group")
def test_the_group_of_the_sites_administrators_may_write(tmp_path: Path, site: dict[str, str]) -> None:
    file = write(tmp_path, "one", "root: /scratch/$USER")
    file.chmod(0o664)
    os.chown(file, -1, SHARED_GROUP)
    assert configured_root(site).path == Path("/scratch") / ME.pw_name


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("what", ["", "site.yaml", "cluster"])
def test_what_a_user_may_not_read_is_an_error(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "site" / "cluster").mkdir(parents=True)
        (Path(folder) / "site" / "site.yaml").write_text("root: /scratch/$USER")
        (Path(folder) / "site" / what).chmod(0o700)

        def read() -> int:
            with refused(UsageError, f"{folder}/site/{what}".rstrip("/"), "chmod -R a+rX"):
                site_settings({"HPC_DET_SITE_CONF": f"{folder}/site"})
            return 0

        assert as_user(STRANGER, read) == 0, capfd.readouterr().err


def test_an_empty_file_sets_nothing(tmp_path: Path, site: dict[str, str]) -> None:
    write(tmp_path, "one", "# nothing yet\nroot:\n")
    assert configured_root(site).origin == "the default"


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with refused(UsageError, "HPC_DET_SITE_CONF", tmp_path / "gone"):
        configured_root({"HPC_DET_SITE_CONF": str(tmp_path / "gone")})
