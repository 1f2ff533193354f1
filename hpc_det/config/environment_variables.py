"""The environment variables that hpc_det reads or sets, as docs/reference/environment-variables.md lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

OWN_PREFIX = "HPC_DET_"

FOR_USERS = {
    "HPC_DET_ROOT": "Folder of all experiments and of your own configuration, on a file system that login and compute "
    "nodes share. Default: `root` of the site's `site.yaml`, or `~/hpc_det`.",
    "HPC_DET_SITE_CONF": "Folders of the site's configuration (`cluster/`, `template/`, `site.yaml`), separated by "
    "colons. Each must exist. A file of the same name in `$HPC_DET_ROOT/conf` takes precedence, then the site's, then "
    "the package's.",
    "HPC_DET_COMPAT": "`determined`, `ray` or `determined,ray`: imports of these packages load hpc_det's classes; with "
    "`determined`, ranks have Determined's variables `DET_*`, too. Set it in `environment.environment_variables` of an "
    "experiment, or in the shell for `--local` and for `python3 -m hpc_det.compat`.",
    "HPC_DET_CLUSTER": "Name of the cluster profile that is used if neither an option nor an argument names one. "
    "Default: `default_cluster` of the site's `site.yaml`, the only profile found, or `local`.",
    "NCCL_TIMEOUT_S": "Timeout of a collective in seconds, for a `TorchTrainer` with GPUs, as in RaySGD. It overrides "
    "the argument `timeout_s`.",
    "DS_ACCELERATOR": "The accelerator that DeepSpeed uses, `cpu` or `cuda`. hpc_det sets it by the slot type "
    "unless it is set.",
    "WANDB_API_KEY": "Key of Weights & Biases, for `loggers`; not needed after `wandb login`.",
    "MLFLOW_TRACKING_URI": "URI of the MLflow server for `loggers` without `tracking_uri`, and for "
    "`hpc-det experiment sync`.",
}
"""Meaning of each variable that a user or an administrator may set."""

FOR_RANKS = {
    "RANK": "Number of this rank in its gang, from 0.",
    "WORLD_SIZE": "Number of ranks of the gang.",
    "LOCAL_RANK": "Number of this rank on its node, from 0.",
    "LOCAL_WORLD_SIZE": "Number of ranks on each node.",
    "MASTER_ADDR": "Host of rank 0.",
    "MASTER_PORT": "Port at which the ranks meet.",
    "HPC_DET_FOLDER": "Folder of the trial.",
    "HPC_DET_NUMBER": "Number of the attempt, from 1.",
    "HPC_DET_WORKER": "Number of the worker that runs the attempt, from 0.",
    "HPC_DET_NODES": "Number of nodes of the gang.",
    "HPC_DET_NODE_RANK": "Number of this node in the gang, from 0.",
    "HPC_DET_RANKS_PER_NODE": "Number of ranks on each node.",
    "HPC_DET_SLOT_TYPE": "`gpu` or `cpu`.",
    "HPC_DET_ADDRESS": "Address of this node, as the other nodes reach it.",
    "HPC_DET_MASTER_ADDR": "`MASTER_ADDR` as the node agents agreed on it; launchers derive theirs from it.",
    "HPC_DET_MASTER_PORT": "`MASTER_PORT` as the node agents agreed on it.",
    "HPC_DET_SECRET": "Key of the attempt: ranks authenticate their messages with it. It is never sent in clear.",
    "HPC_DET_SOCKET": "Unix socket of the node's agent.",
    "HPC_DET_STORE": "File over which the ranks of a one-node gang meet.",
    "CUDA_VISIBLE_DEVICES": "The GPUs of the gang on this node; empty where slots are CPUs.",
    "OMP_NUM_THREADS": "CPUs of each rank, unless the experiment sets it.",
    "PYTHONPATH": "Begins with the copy of the experiment's code.",
    "TMPDIR": "A folder of this attempt in the profile's `scratch`, deleted afterwards; not set without `scratch`.",
    "GLOO_SOCKET_IFNAME": "The network interface between the nodes, if the profile names one or hpc_det had to detect "
    "it; `NCCL_SOCKET_IFNAME` likewise.",
}
"""Content of each variable that a launcher or a node agent sets for a rank or a script."""

FOR_HOOKS = {
    "HPC_DET_EXPERIMENT": "Number of the experiment.",
    "HPC_DET_STATE": "Its new state, such as `COMPLETED`.",
}
"""Content of each variable that is set for a `command` of `notify`."""

INTERNAL = {
    "HPC_DET_ORDERS": "Set by the job for its node agents: where they receive orders. Entrypoints do not have it.",
    "HPC_DET_TEST": "Set by `--test`: train one batch, validate one, save one checkpoint.",
    "HPC_DET_THROUGHPUT": "Set by `hpc-det experiment tune-throughput` for its short trainings.",
    "HPC_DET_PRELOAD": "Set by the node agent from `launch`: the modules that are imported before ranks are forked; "
    "`-` if each rank is executed.",
    "HPC_DET_BUNDLE": "Set by the node agent from `environment.bundle`: the file from which ranks import installed "
    "packages; empty: none.",
    "HPC_DET_MOUNT": "Set on a node for its agent, if `environment.stage` has mounted an image: the process that "
    "serves it, and its folder.",
    "HPC_DET_RESUME_CHECK": "Set by `hpc-det experiment verify-resume`: the batches at which the run is stopped.",
    "HPC_DET_HOSTS": "PBS, several gangs in a job: places of this gang's hosts in the allocation.",
    "HPC_DET_SLOTS": "PBS, several gangs on a node: places of this gang's GPUs.",
    "HPC_DET_INDEX": "PBS: the array index of an element that was submitted alone.",
}
"""Content of each variable that one part of hpc_det sets for another."""

GROUPS = {
    "Set by you or your site": FOR_USERS,
    "Set for ranks and scripts": FOR_RANKS,
    "Set for hooks": FOR_HOOKS,
    "Internal": INTERNAL,
}
"""The tables of the reference page, keyed by their headings."""
_KNOWN = {name for group in GROUPS.values() for name in group}


def without_effect(names: Iterable[str]) -> Iterator[str]:
    """Yield a note for each variable that looks like a misspelt one of hpc_det."""
    own = {name.removeprefix(OWN_PREFIX): name for name in FOR_USERS if name.startswith(OWN_PREFIX)}
    for name in sorted(names):
        if name.startswith(OWN_PREFIX) and name not in _KNOWN:
            # Compared without the common prefix, which would make any two names similar.
            for meant in get_close_matches(name.removeprefix(OWN_PREFIX), own, n=1):
                yield f"the environment variable {name} has no effect; did you mean {own[meant]!r}?"
