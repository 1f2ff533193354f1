"""The environment variables DET_* that scripts written for Determined read (upstream: determined/_info.py).

DET_MASTER, DET_SESSION_TOKEN and DET_CLUSTER_ID are not set: there is no master.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.config.secrets import masked
from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import Attempt

_LONGEST = 100_000
"""Bytes of a value. Linux accepts 128 KiB for a variable with its name (MAX_ARG_STRLEN), and fails to start the rank
with more.
"""


def determined_variables(attempt: Attempt, interface: str | None) -> dict[str, str]:
    """Return the variables DET_* for the ranks of this node, none without a trial; secrets of the configuration are
    masked.

    `interface`: the network interface between the nodes. A value that is too long for the environment is left out, with
    a note.
    """
    spec = read_json(attempt.trial.trial)
    if spec is None:
        return {}
    newest = newest_checkpoint(attempt.trial.checkpoints)
    latest = latest_checkpoint(newest, spec)
    task = f"{spec['experiment_id']}.{spec['trial_id']}"
    found: dict[str, str] = {
        "DET_EXPERIMENT_ID": str(spec["experiment_id"]),
        "DET_TRIAL_ID": str(spec["trial_id"]),
        "DET_TRIAL_RUN_ID": str(attempt.number),
        "DET_TRIAL_SEED": str(spec["trial_seed"]),
        "DET_HPARAMS": json.dumps(spec["hparams"]),
        "DET_EXPERIMENT_CONFIG": json.dumps(masked(spec["config"])),
        "DET_STEPS_COMPLETED": str(newest.steps if newest else 0),
        "DET_TASK_ID": task,
        "DET_TASK_TYPE": "TRIAL",
        "DET_ALLOCATION_ID": f"{task}.{attempt.number}",
        "DET_AGENT_ID": socket.gethostname(),
        "DET_SLOT_IDS": json.dumps([*range(attempt.ranks_per_node)]),
        "DET_UNIQUE_PORT_OFFSET": "0",
        "DET_CHIEF_IP": attempt.master_addr,
        **({"DET_LATEST_CHECKPOINT": latest} if latest else {}),
        **({"DET_INTER_NODE_NETWORK_INTERFACE": interface} if interface else {}),
    }
    too_long = [name for name, value in found.items() if len(value.encode()) > _LONGEST]
    if too_long:
        print(
            f"hpc-det: note: {', '.join(too_long)}: not set, since the value has more than {_LONGEST} bytes; use "
            f"det.get_cluster_info()",
            file=sys.stderr,
            flush=True,
        )
    return {name: value for name, value in found.items() if name not in too_long}


def newest_checkpoint(checkpoints: Path) -> Committed | None:
    """Return the newest checkpoint of which its owner has deleted nothing, or None."""
    return next((each for each in committed(checkpoints) if not each.removed), None)


def latest_checkpoint(newest: Committed | None, spec: Mapping[str, Any]) -> str | None:
    """Return the uuid of the newest checkpoint or of the one that the trial starts from, or None.

    `spec`: content of trial.json.
    """
    if newest:
        return newest.uuid
    weights = spec.get("warm_start")
    return Path(weights).name if weights else None
