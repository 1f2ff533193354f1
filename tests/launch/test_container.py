"""Command lines of container runtimes, and agents that start their entrypoint with one."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.process import descendants
from hpc_det.plan.container import (
    HPC_DET,
    PACKAGE,
    contained,
    environment_file,
    inside,
    make_mount_points,
    of_the_job,
    srun_flags,
)
from hpc_det.plan.job_plan import Container, Device, Mount
from hpc_det.store.attempt import first_failure, request_stop
from tests.facts import unnamed
from tests.launch.gang import Gang, is_there
from tests.launch.runtimes import IMAGE, Runtime
from tests.plan.plans import job_plan
from tests.submit.hostile import VALUES
from tests.wait import DEADLINE_S

EXPERIMENT = "/home/ada/hpc_det/experiments/12"
DATA = Mount(source="/data/digits", target="/digits", read_only=True, propagation="rprivate")
INFINIBAND = Device(source="/dev/infiniband", target="/dev/infiniband", mode="mrw")
READ_ONLY = Device(source="/dev/kmsg", target="/dev/log", mode="r")


def container(runtime: str, **changes: Any) -> Container:
    settings: dict[str, Any] = {
        "image": "nvcr.io/nvidia/pytorch:26.01-py3",
        "mounts": (),
        "devices": (),
        "shm_size": None,
        "args": (),
    }
    return Container(runtime=runtime, **(settings | changes))


def command(chosen: Container, *folders: str, **changes: Any) -> list[str]:
    plan = job_plan(container=chosen, **changes)
    return contained(plan, chosen, folders or ("/tmp/hpc-det-x",))


def test_the_whole_command_line_of_apptainer() -> None:
    chosen = container("apptainer", mounts=(DATA,), devices=(INFINIBAND, READ_ONLY), args=("--writable-tmpfs",))
    *flags, shell, dash_c, first_process, environment, python, script = command(chosen, "/tmp/private", "/scratch/x")
    assert flags == [
        "apptainer",
        "exec",
        "--cleanenv",
        "--nv",
        f"--pwd={EXPERIMENT}/code",
        f"--bind={EXPERIMENT}:{EXPERIMENT}",
        f"--bind={PACKAGE}:{HPC_DET}/hpc_det:ro",
        "--bind=/tmp/private:/tmp/private",
        "--bind=/scratch/x:/scratch/x",
        "--bind=/data/digits:/digits:ro",
        "--bind=/dev/infiniband:/dev/infiniband",
        "--bind=/dev/kmsg:/dev/log:ro",
        "--writable-tmpfs",
        "docker://nvcr.io/nvidia/pytorch:26.01-py3",
    ]
    assert (shell, dash_c, environment) == ("/bin/sh", "-c", "/tmp/private/environment")
    assert first_process.endswith('exec "$@"')
    assert (python, script) == ("/opt/venv/bin/python", "train.py")


def test_the_whole_command_line_of_podman() -> None:
    chosen = container("podman", mounts=(DATA,), devices=(INFINIBAND,), args=("--pull=never",), shm_size=2**32)
    flags = command(chosen)[:-6]
    assert flags == [
        "podman",
        "run",
        "--rm",
        "--network=host",
        "--pid=host",
        "--uts=host",
        "--userns=keep-id",
        "--security-opt=label=disable",
        "--shm-size=4294967296b",
        "--device=nvidia.com/gpu=all",
        f"--workdir={EXPERIMENT}/code",
        f"--volume={EXPERIMENT}:{EXPERIMENT}:rprivate",
        f"--volume={PACKAGE}:{HPC_DET}/hpc_det:ro,rprivate",
        "--volume=/tmp/hpc-det-x:/tmp/hpc-det-x:rprivate",
        "--volume=/data/digits:/digits:ro,rprivate",
        "--device=/dev/infiniband:/dev/infiniband:mrw",
        "--entrypoint=",
        "--pull=never",
        "nvcr.io/nvidia/pytorch:26.01-py3",
    ]


def test_podman_shares_the_nodes_memory_where_no_size_is_asked_for() -> None:
    assert "--ipc=host" in command(container("podman"))


@pytest.mark.parametrize("runtime", ["apptainer", "podman"])
def test_no_gpu_is_asked_for_on_slots_without(runtime: str) -> None:
    assert not {"--nv", "--device=nvidia.com/gpu=all"} & set(command(container(runtime), slot_type="cpu"))


def test_pyxis_flags_of_srun() -> None:
    chosen = container("pyxis", mounts=(DATA,), devices=(READ_ONLY,), args=("--container-remap-root",))
    own = f"{EXPERIMENT}:{EXPERIMENT}:rprivate,{PACKAGE}:{HPC_DET}/hpc_det:ro+rprivate"
    assert srun_flags(job_plan(), chosen) == [
        "--container-image=nvcr.io#nvidia/pytorch:26.01-py3",
        f"--container-mounts={own},/dev/kmsg:/dev/log:ro+rprivate,/data/digits:/digits:ro+rprivate",
        f"--container-workdir={EXPERIMENT}/code",
        "--container-remap-root",
    ]


@pytest.mark.parametrize(
    ("runtime", "image", "taken"),
    [
        ("apptainer", "site/torch:2.10", "docker://site/torch:2.10"),
        ("apptainer", "/images/torch.sif", "/images/torch.sif"),
        ("apptainer", "oras://host/torch:2", "oras://host/torch:2"),
        ("podman", "site/torch:2.10", "site/torch:2.10"),
        ("podman", "docker://site/torch:2.10", "docker://site/torch:2.10"),
    ],
)
def test_an_image_in_the_words_of_the_runtime(runtime: str, image: str, taken: str) -> None:
    assert command(container(runtime, image=image))[-7] == taken


@pytest.mark.parametrize(
    ("image", "taken"),
    [
        ("site/torch:2.10", "site/torch:2.10"),
        ("docker://site/torch:2.10", "site/torch:2.10"),
        ("nvcr.io/nvidia/pytorch:26.01-py3", "nvcr.io#nvidia/pytorch:26.01-py3"),
        ("localhost:5000/torch", "localhost:5000#torch"),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
        ("/images/torch.sqsh", "/images/torch.sqsh"),
    ],
)
def test_an_image_in_the_words_of_pyxis(image: str, taken: str) -> None:
    assert srun_flags(job_plan(), container("pyxis", image=image))[0] == f"--container-image={taken}"


def test_of_the_jobs_environment_only_what_ranks_need_goes_inside() -> None:
    wanted = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "WARN", "https_proxy": "p", "USER": "ada"}
    of_the_host = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "/venv", "VIRTUAL_ENV": "/venv"}
    assert of_the_job({**wanted, **of_the_host}) == wanted


def test_a_search_path_of_the_host_names_hpc_det_inside() -> None:
    assert inside(f"{PACKAGE}/compat/path:/code") == f"{HPC_DET}/hpc_det/compat/path:/code:{HPC_DET}"


@pytest.mark.integration
@pytest.mark.parametrize("value", [*VALUES, "two\nlines", ""])
def test_every_value_of_the_environment_is_read_as_it_was(value: str, tmp_path: Path) -> None:
    (tmp_path / "environment").write_text(environment_file({"VALUE": value}))
    script = '. "$0" && printf "%s" "$VALUE"'
    read = subprocess.check_output(["/bin/sh", "-c", script, tmp_path / "environment"], cwd=tmp_path)
    assert read.decode() == value
    assert not (tmp_path / "X").exists()


def test_mount_points_below_the_code_are_made(tmp_path: Path) -> None:
    code, data, file = tmp_path / "code", tmp_path / "data", tmp_path / "file"
    code.mkdir()
    data.mkdir()
    file.touch()
    mounts = tuple(
        Mount(source=str(source), target=target, read_only=True, propagation="rprivate")
        for source, target in [(data, f"{code}/a/data"), (file, f"{code}/b/file"), (data, "/elsewhere")]
    )
    for _ in range(2):  # once by each node's agent
        make_mount_points(job_plan(code=str(code)), container("apptainer", mounts=mounts))
    assert (code / "a" / "data").is_dir()
    assert (code / "b" / "file").is_file()


@pytest.fixture(params=["apptainer", "podman"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    return Runtime.install(request.param, tmp_path / "site")


def settings(runtime: Runtime, **changes: Any) -> dict[str, Any]:
    return {"container": container(runtime.name, image=IMAGE, **changes)}


@pytest.mark.integration
def test_the_entrypoint_sees_what_was_set_for_it_and_nothing_of_the_host(gang: Gang, runtime: Runtime) -> None:
    secret = 'it\'s $(touch X) a "secret"'
    gang.plan(
        "env -0 >seen; pwd >where",
        environment=(f"TOKEN={secret}", "PATH=/usr/local/bin:/usr/bin:/bin"),
        **settings(runtime),
    )
    agent = gang.start_agent(PATH=runtime.path, OF_THE_HOST="1", SLURM_JOB_ID="7")
    assert agent.wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    seen = dict(item.split("=", 1) for item in (gang.code / "seen").read_text().split("\0")[:-1])
    assert seen["TOKEN"] == secret
    assert seen["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    assert (seen["SLURM_JOB_ID"], seen["FROM"]) == ("7", "the-image")
    assert seen["PYTHONNOUSERSITE"] == "1"
    assert seen["PYTHONPATH"] == f"{gang.code}:{HPC_DET}"
    assert "OF_THE_HOST" not in seen
    assert (gang.code / "where").read_text() == f"{gang.code}\n"
    assert not any(secret in word for word in runtime.argv)


@pytest.mark.integration
def test_the_environments_file_is_the_users_own_and_gone_afterwards(gang: Gang, runtime: Runtime) -> None:
    gang.plan('stat -c "%a %n" "$(dirname "$HPC_DET_SOCKET")/environment" >found', **settings(runtime))
    assert gang.start_agent(PATH=runtime.path).wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    mode, _, path = (gang.code / "found").read_text().strip().partition(" ")
    assert int(mode, 8) == stat.S_IRUSR | stat.S_IWUSR
    assert not os.path.exists(path)


@pytest.mark.integration
def test_ranks_in_a_container_hear_the_bell_though_a_signal_reached_all_processes(gang: Gang, runtime: Runtime) -> None:
    ranks = "for rank in 0 1; do setsid -w python3 rank.py $rank --trial & done; wait"
    gang.plan(ranks, **settings(runtime))
    agent = gang.start_agent(PATH=runtime.path)
    up = gang.wait_for_ranks(0, 1)
    for process in set(descendants(agent.pid)) - set(up):
        os.kill(process, signal.SIGUSR2)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    assert gang.saved() == {"0": "signal", "1": "signal"}


@pytest.mark.integration
def test_a_failing_entrypoint_is_the_attempts_failure(gang: Gang, runtime: Runtime) -> None:
    gang.plan("exit 7", **settings(runtime))
    assert gang.start_agent(PATH=runtime.path).wait(timeout=DEADLINE_S) == 1
    failure = first_failure(gang.trial, 1)
    assert failure
    assert "exit code 7" in failure.sentence()


@pytest.mark.integration
def test_what_runs_in_a_container_ends_with_a_kill(gang: Gang, runtime: Runtime) -> None:
    gang.plan("python3 rank.py 0 deaf --trial", **settings(runtime))
    agent = gang.start_agent(PATH=runtime.path)
    (rank,) = gang.wait_for_ranks(0)
    request_stop(gang.trial.stop, attempt=1, reason="kill", source="a test")
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert not is_there(rank)


@pytest.mark.integration
def test_a_site_without_the_runtime_is_the_users_error(gang: Gang) -> None:
    gang.plan("true", container=container("podman"))
    assert gang.start_agent(PATH="/nowhere").wait(timeout=DEADLINE_S) == 1
    failure = first_failure(gang.trial, 1)
    assert failure
    assert unnamed(failure.message, "podman", os.strerror(errno.ENOENT)) == []
    assert failure.user_error


@pytest.mark.integration
def test_scratch_is_the_attempts_own_folder_and_gone_with_it(gang: Gang, tmp_path: Path) -> None:
    (tmp_path / "job-7").mkdir()
    gang.plan('stat -c "%a %n" "$TMPDIR" >found', scratch=f"{tmp_path}/job-$SLURM_JOB_ID")
    assert gang.start_agent(SLURM_JOB_ID="7").wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    mode, _, folder = (gang.code / "found").read_text().strip().partition(" ")
    assert (mode, str(Path(folder).parent)) == ("700", f"{tmp_path}/job-7")
    assert list((tmp_path / "job-7").iterdir()) == []


@pytest.mark.integration
def test_scratch_is_mounted_into_a_container(gang: Gang, runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    gang.plan('touch "$TMPDIR/file"', scratch=f"{tmp_path}/scratch", **settings(runtime))
    assert gang.start_agent(PATH=runtime.path).wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    assert any(f"={tmp_path}/scratch/hpc-det-" in word for word in runtime.argv)


@pytest.mark.integration
def test_a_node_without_its_scratch_folder_is_named(gang: Gang, tmp_path: Path) -> None:
    gang.plan("true", scratch=f"{tmp_path}/$NOBODY_SET_THIS")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert "cluster.scratch" in gang.printed.read_text()
    assert "Traceback" not in gang.printed.read_text()
