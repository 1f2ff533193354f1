"""The entrypoint of a node in a container: apptainer and podman as argument lists, pyxis as flags of srun.

The ranks of a node share one container. In it they find, besides what the image has: the experiment's folder, the
agent's private folder with the socket, the node's scratch folder, hpc_det itself below HPC_DET (an image need not have
it, but Python 3.10 or newer and torch), and what the experiment mounts. No value of the environment stands on a command
line: a file of mode 0600 in the private folder holds them, and the first process in the container reads it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpc_det.plan.job_plan import Container, Device, JobPlan, Mount

HPC_DET = "/opt/hpc-det"
"""The folder on the container's PYTHONPATH; only the package lies in it, none of the host's other packages."""
PACKAGE = str(Path(__file__).resolve().parents[1])
ENVIRONMENT_FILE = "environment"
"""In the agent's private folder."""

# The job's variables that ranks need wherever they run. All others speak of the host: its PATH, libraries, modules.
_OF_THE_JOB = re.compile(
    r"(?:SLURM|PBS|PMI|PMIX|CUDA|NVIDIA|ROCR|HIP|NCCL|GLOO|TORCH|OMP|MKL|UCX|FI|HPC_DET)_\w+|(?:HTTPS?|NO)_PROXY|USER",
    re.IGNORECASE,
)

# Runtimes hand on no ignored signals (see hpc_det.node.process.shielded), so the container's first process ignores
# them anew; and it takes the environment after the image has set its own.
_FIRST_PROCESS = """trap '' TERM INT HUP USR1 USR2; . "$0" || exit; exec "$@\""""


def of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    """What of the job's environment goes into a container."""
    return {name: value for name, value in env.items() if _OF_THE_JOB.fullmatch(name)}


def environment_file(environment: Mapping[str, str]) -> str:
    """A file for sh that sets `environment`, with every value quoted."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def inside(search_path: str) -> str:
    """A PYTHONPATH of the host in the container: where it names a folder of hpc_det, that lies below HPC_DET there."""
    folders = [*search_path.split(os.pathsep), HPC_DET]
    return os.pathsep.join(folder.replace(PACKAGE, f"{HPC_DET}/{Path(PACKAGE).name}") for folder in folders)


def contained(plan: JobPlan, container: Container, folders: Iterable[str]) -> list[str]:
    """The entrypoint's command line in `container`. `folders`, the agent's private one first, keep their paths."""
    private, *others = folders
    own = [Mount(source=path, target=path, read_only=False, propagation="rprivate") for path in (private, *others)]
    mounts = [*_mounts(plan), *own, *container.mounts]
    flags = _COMMANDS[container.runtime](plan, container, mounts)
    return [*flags, "/bin/sh", "-c", _FIRST_PROCESS, f"{private}/{ENVIRONMENT_FILE}", *plan.entrypoint]


def srun_flags(plan: JobPlan, container: Container) -> list[str]:
    """Pyxis' flags of srun (its README): the agent and all below it run in the container."""
    devices = [_device_mount(device) for device in container.devices]
    mounts = [_with(mount, "+") for mount in (*_mounts(plan), *_scratch(plan), *devices, *container.mounts)]
    return [
        f"--container-image={_enroot_image(container.image)}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={plan.code}",
        *container.args,
    ]


def make_mount_points(plan: JobPlan, container: Container) -> None:
    """In the folder of the code, which is mounted: a runtime makes mount points in the image only."""
    for mount in container.mounts:
        if mount.target.startswith(f"{plan.code}/"):
            point = Path(mount.target)
            (point if os.path.isdir(mount.source) else point.parent).mkdir(parents=True, exist_ok=True)
            if not point.is_dir():
                point.touch()


def _mounts(plan: JobPlan) -> list[Mount]:
    """The experiment's folder, with trials, checkpoints and code, and hpc_det."""
    return [
        Mount(source=plan.folder, target=plan.folder, read_only=False, propagation="rprivate"),
        Mount(source=PACKAGE, target=f"{HPC_DET}/{Path(PACKAGE).name}", read_only=True, propagation="rprivate"),
    ]


def _scratch(plan: JobPlan) -> list[Mount]:
    """Only the job knows the variables in its path, and srun's flags are written before: what stands above them."""
    if not plan.scratch:
        return []
    path, variable, _ = plan.scratch.partition("$")
    fixed = path.rpartition("/")[0] if variable else path
    return [Mount(source=fixed, target=fixed, read_only=False, propagation="rprivate")]


def _apptainer(plan: JobPlan, container: Container, mounts: list[Mount]) -> list[str]:
    """apptainer-exec(1). /dev/shm and the PID namespace are the host's by default."""
    binds = [*mounts, *map(_device_mount, container.devices)]
    return [
        "apptainer",
        "exec",
        "--cleanenv",
        *(["--nv"] if plan.slot_type == "gpu" else []),
        f"--pwd={plan.code}",
        *[f"--bind={mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in binds],
        *container.args,
        _addressed(container.image),
    ]


def _podman(plan: JobPlan, container: Container, mounts: list[Mount]) -> list[str]:
    """podman-run(1), without root: the user stays who they are, and gangs meet on the host's network.

    The host's PIDs, so that no rank is PID 1, which ignores signals without a handler (pid_namespaces(7)).
    """
    memory = "--ipc=host" if container.shm_size is None else f"--shm-size={container.shm_size}b"
    gpus = ["--device=nvidia.com/gpu=all"] if plan.slot_type == "gpu" else []  # by CDI; the job's cgroup limits them
    return [
        "podman",
        "run",
        "--rm",
        "--network=host",
        "--pid=host",
        "--uts=host",
        "--userns=keep-id",
        "--security-opt=label=disable",
        memory,
        *gpus,
        f"--workdir={plan.code}",
        *[f"--volume={_with(mount, ',')}" for mount in mounts],
        *[f"--device={device.source}:{device.target}:{device.mode}" for device in container.devices],
        "--entrypoint=",  # the image's own one would get our command for its arguments
        *container.args,
        container.image,
    ]


_COMMANDS = {"apptainer": _apptainer, "podman": _podman}


def _with(mount: Mount, separator: str) -> str:
    options = separator.join((["ro"] if mount.read_only else []) + [mount.propagation])
    return f"{mount.source}:{mount.target}:{options}"


def _device_mount(device: Device) -> Mount:
    """For runtimes that take a device as a mount."""
    return Mount(source=device.source, target=device.target, read_only="w" not in device.mode, propagation="rprivate")


def _addressed(image: str) -> str:
    """apptainer takes a name without an address for a file."""
    return image if "://" in image or image.startswith("/") else f"docker://{image}"


def _enroot_image(image: str) -> str:
    """Enroot separates the registry by `#`. By Docker's rule a first part with a dot or a colon is a registry."""
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    is_registry = bool(slash) and bool(registry) and ("." in registry or ":" in registry) and "#" not in name
    return f"{registry}#{rest}" if is_registry else name
