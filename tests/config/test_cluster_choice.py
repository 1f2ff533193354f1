"""The cluster profile of a command that names none, and the message where one must be named."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.cluster_choice import chosen_cluster
from hpc_det.config.request import from_file, from_hydra
from hpc_det.errors import UsageError
from hpc_det.plan.multirun import multirun_from_hydra
from tests.cli.users import STRANGER, as_user
from tests.facts import refused, unnamed

UserFile = Callable[[str, Any], Path]
Make = Callable[..., None]
PROFILE = {"name": "x", "scheduler": "slurm", "slots_per_node": 2, "slot_type": "gpu"}
CONFIG = "name: tiny\nentrypoint: python3 -m train\nsearcher: {metric: loss, max_length: 10}\n"


@pytest.fixture
def commands(tmp_path: Path, env: dict[str, str]) -> Make:
    """Return a function that makes PATH contain these commands only."""
    env["PATH"] = str(tmp_path / "bin")

    def make(*names: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return make


@pytest.fixture
def site(tmp_path: Path, env: dict[str, str]) -> Callable[[str], Path]:
    """Return a function that writes the site's site.yaml."""
    folder = tmp_path / "site"
    folder.mkdir()
    env["HPC_DET_SITE_CONF"] = str(folder)

    def write(text: str) -> Path:
        (folder / "site.yaml").write_text(text)
        return folder / "site.yaml"

    return write


def test_each_source_comes_before_the_next(
    env: dict[str, str], user_file: UserFile, site: Callable[[str], Path], commands: Make
) -> None:
    for name in ("option", "variable", "site"):
        user_file(f"cluster/{name}.yaml", PROFILE)
    commands("sinfo")
    file = site("default_cluster: site")
    env["HPC_DET_CLUSTER"] = "variable"
    assert (chosen_cluster("option", env).name, chosen_cluster("option", env).reason) == ("option", "")
    by_variable = chosen_cluster(None, env)
    assert by_variable.name == "variable"
    assert unnamed(by_variable.reason, "HPC_DET_CLUSTER") == []
    del env["HPC_DET_CLUSTER"]
    by_site = chosen_cluster(None, env)
    assert by_site.name == "site"
    assert unnamed(by_site.reason, file) == []


def test_the_only_profile_is_used_with_and_without_its_scheduler_here(
    env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    file = user_file("cluster/aurora.yaml", PROFILE)
    for here in ([], ["pbsnodes"], ["sinfo"]):
        commands(*here)
        found = chosen_cluster(None, env)
        assert (found.name, found.file) == ("aurora", file)
        assert unnamed(found.reason, file) == []


def test_a_profile_of_the_site_is_one_that_is_found(env: dict[str, str], site: Callable[[str], Path]) -> None:
    folder = site("").parent / "cluster"
    folder.mkdir()
    (folder / "aurora.yaml").write_text("name: aurora\nscheduler: pbs\n")
    assert chosen_cluster(None, env).name == "aurora"


def test_the_examples_that_come_along_are_not_found(env: dict[str, str], commands: Make) -> None:
    commands()
    assert (chosen_cluster(None, env).name, chosen_cluster(None, env).reason) == ("local", "")


@pytest.mark.parametrize(("command", "scheduler"), [("sinfo", "Slurm"), ("pbsnodes", "PBS")])
def test_on_a_machine_with_a_scheduler_a_profile_must_be_made_first(
    command: str, scheduler: str, env: dict[str, str], commands: Make
) -> None:
    commands(command)
    with refused(UsageError, scheduler, "PATH", "hpc-det cluster detect --name NAME --write", "--cluster local"):
        chosen_cluster(None, env)
    assert chosen_cluster("local", env).name == "local"


def test_of_several_profiles_one_must_be_named_where_there_is_a_scheduler(
    env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    files = [user_file(f"cluster/{name}.yaml", PROFILE) for name in ("aurora", "dawn")]
    commands("sinfo")
    with refused(UsageError, "aurora", "dawn", *files, "--cluster", "HPC_DET_CLUSTER", "default_cluster", "site.yaml"):
        chosen_cluster(None, env)


def test_without_a_scheduler_it_is_this_machine_whatever_several_profiles_say(
    env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    for name in ("aurora", "dawn"):
        user_file(f"cluster/{name}.yaml", PROFILE)
    commands()
    found = chosen_cluster(None, env)
    assert found.name == "local"
    assert unnamed(found.reason, 2, "PATH") == []


def test_a_profile_for_this_machine_alone_is_not_used_on_a_login_node_unasked(
    env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    user_file("cluster/desk.yaml", {**PROFILE, "scheduler": "local"})
    commands()
    assert chosen_cluster(None, env).name == "desk"
    commands("sinfo")
    with refused(UsageError, "Slurm", "desk", "--cluster"):
        chosen_cluster(None, env)


@pytest.mark.parametrize("variables", [{"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"}, {"PBS_NODEFILE": "/nodes"}])
def test_on_a_node_of_a_job_it_is_this_machine(variables: dict[str, str], env: dict[str, str], commands: Make) -> None:
    commands("sinfo", "pbsnodes")
    found = chosen_cluster(None, {**env, **variables})
    assert found.name == "local"
    assert found.reason


def test_a_shell_of_salloc_on_the_login_node_is_still_on_the_login_node(env: dict[str, str], commands: Make) -> None:
    commands("sinfo")
    with refused(UsageError, "Slurm"):
        chosen_cluster(None, {**env, "SLURM_JOB_ID": "7"})


def test_a_launcher_takes_only_profiles_of_its_scheduler(
    env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    user_file("cluster/aurora.yaml", PROFILE)
    user_file("cluster/dawn.yaml", {**PROFILE, "scheduler": "pbs"})
    commands("sinfo")
    assert [chosen_cluster(None, env, kind).name for kind in ("slurm", "pbs")] == ["aurora", "dawn"]
    user_file("cluster/dawn.yaml", PROFILE)
    with refused(UsageError, "PBS", "hpc-det cluster detect"):
        chosen_cluster(None, env, "pbs")
    with refused(UsageError, "aurora", "dawn", "hydra.launcher.cluster=NAME"):
        chosen_cluster(None, env, "slurm")


def test_the_launcher_for_this_machine_needs_no_choice(
    env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    user_file("cluster/aurora.yaml", PROFILE)
    env["HPC_DET_CLUSTER"] = "aurora"
    commands("sinfo")
    assert chosen_cluster(None, env, "local").name == "local"


def test_a_launcher_passes_over_the_sites_default_for_another_scheduler(
    env: dict[str, str], user_file: UserFile, site: Callable[[str], Path], commands: Make
) -> None:
    site("default_cluster: aurora")
    user_file("cluster/aurora.yaml", PROFILE)
    user_file("cluster/dawn.yaml", {**PROFILE, "scheduler": "pbs"})
    commands("sinfo", "pbsnodes")
    assert [chosen_cluster(None, env, kind).name for kind in (None, "slurm", "pbs")] == ["aurora", "aurora", "dawn"]


def test_an_unknown_name_is_told_with_its_source(env: dict[str, str], site: Callable[[str], Path]) -> None:
    file = site("default_cluster: nowhere")
    with refused(UsageError, f"{file}: default_cluster", "nowhere", "local"):
        chosen_cluster(None, env)
    with refused(UsageError, "HPC_DET_CLUSTER", "elsewhere"):
        chosen_cluster(None, {**env, "HPC_DET_CLUSTER": "elsewhere"})


def test_a_broken_profile_is_the_only_one_and_its_mistake_is_told(
    env: dict[str, str], user_file: UserFile, tmp_path: Path, commands: Make
) -> None:
    file = user_file("cluster/aurora.yaml", "name: [")
    commands("sinfo")
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)
    with refused(UsageError, file):
        from_file(config, None, [], None, None, env)


def test_a_profile_of_the_site_that_every_user_can_change_is_refused_where_it_is_used(
    env: dict[str, str], user_file: UserFile, site: Callable[[str], Path], commands: Make
) -> None:
    folder = site("").parent / "cluster"
    folder.mkdir()
    file = folder / "aurora.yaml"
    file.write_text("name: aurora\nscheduler: pbs\nslots_per_node: 1\nslot_type: cpu\n")
    file.chmod(0o666)
    commands()
    for refusing in (
        lambda: chosen_cluster("aurora", env),
        lambda: chosen_cluster(None, env),
        lambda: from_hydra(["experiment=digits", "cluster=aurora"], env),
    ):
        with refused(UsageError, file, "0666", "chmod"):
            refusing()
    assert chosen_cluster("local", env).name == "local"


@pytest.mark.parametrize("what", ["conf", "conf/cluster", "conf/cluster/aurora.yaml"])
def test_a_profile_of_the_user_that_others_can_reach_and_change_is_refused(
    what: str, env: dict[str, str], user_file: UserFile, commands: Make
) -> None:
    user_file("cluster/aurora.yaml", PROFILE)
    commands()
    root = Path(env["HPC_DET_ROOT"])
    path = root / what
    path.chmod(path.stat().st_mode | 0o002)
    root.chmod(0o700)
    assert chosen_cluster(None, env).name == "aurora"
    root.chmod(0o710)
    with refused(UsageError, path, f"{path.stat().st_mode & 0o777:04o}", f"chmod -R go-w {root / 'conf'}"):
        chosen_cluster(None, env)


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_profile_of_the_site_that_a_user_may_not_read_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        # the checkout may be in a folder that the other user cannot enter
        monkeypatch.setattr("hpc_det.config.conf_files.data_path", lambda name: Path(folder) / name)
        Path(folder).chmod(0o755)
        file = Path(folder) / "cluster" / "aurora.yaml"
        file.parent.mkdir()
        file.write_text("name: aurora\nscheduler: pbs\n")
        file.chmod(0o600)
        env = {"HPC_DET_SITE_CONF": folder, "HPC_DET_ROOT": f"{folder}/root", "PATH": ""}

        def choose() -> int:
            for named in ("aurora", None):
                with refused(UsageError, file, "chmod -R a+rX"):
                    chosen_cluster(named, env)
            return 0

        assert as_user(STRANGER, choose) == 0, capfd.readouterr().err


# --- the same with Hydra


def test_a_hydra_command_line_has_the_same_choice(env: dict[str, str], user_file: UserFile, commands: Make) -> None:
    commands("sinfo")
    with refused(UsageError, "Slurm", "hpc-det cluster detect"):
        from_hydra(["experiment=digits"], env)
    assert from_hydra(["experiment=digits", "cluster=local"], env).chosen is None
    assert from_hydra(["experiment=digits"], env, "local").cluster["name"] == "local"
    file = user_file("cluster/aurora.yaml", PROFILE)
    request = from_hydra(["experiment=digits", "cluster.slots_per_node=8"], env)
    assert (request.cluster["scheduler"], request.cluster["slots_per_node"]) == ("slurm", 8)
    assert request.chosen is not None
    assert request.chosen.file == file
    points = multirun_from_hydra(["experiment=digits", "hyperparameters.learning_rate=0.1,0.2"], env).points
    assert [point.request.chosen for point in points] == [request.chosen] * 2


def test_an_experiment_that_names_its_cluster_has_it(env: dict[str, str], user_file: UserFile, commands: Make) -> None:
    commands("sinfo")
    user_file("cluster/aurora.yaml", PROFILE)
    user_file("cluster/dawn.yaml", {**PROFILE, "slots_per_node": 5})
    text = f"# @package _global_\ndefaults:\n  - override /cluster: dawn\n{CONFIG}"
    user_file("experiment/mine.yaml", text)
    request = from_hydra(["experiment=mine"], env)
    assert (request.cluster["slots_per_node"], request.chosen) == (5, None)


def test_the_resolver_does_not_stay_behind(env: dict[str, str]) -> None:
    from omegaconf import OmegaConf

    from_hydra(["experiment=digits"], env)
    assert not OmegaConf.has_resolver("hpc_det.default_cluster")


def test_a_folder_of_the_site_that_does_not_exist_is_an_error(env: dict[str, str], tmp_path: Path) -> None:
    env["HPC_DET_SITE_CONF"] = os.pathsep.join([str(tmp_path), str(tmp_path / "gone")])
    with refused(UsageError, "HPC_DET_SITE_CONF", tmp_path / "gone"):
        chosen_cluster("local", env)
