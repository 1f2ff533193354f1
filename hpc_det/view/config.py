"""The effective configuration of an experiment as it is shown."""

from __future__ import annotations

from hpc_det.config.merge import Tree, leaves
from hpc_det.config.secrets import masked
from hpc_det.node.json_files import read_map
from hpc_det.store.experiment_config import read_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.checkpoints import effective_config


def shown_config(experiment: ExperimentFolder) -> tuple[Tree, dict[str, str]]:
    """Secrets masked, with the name, description and labels of now; and who wrote each leaf, by its path.

    Raises HpcDetError where the file is damaged.
    """
    submitted = masked(effective_config(experiment))
    about = read_about(experiment, submitted).as_json()
    now = {key: about.get(key, value) for key, value in submitted.items()}
    origins, former = read_map(experiment.origin) or {}, dict(leaves(submitted))
    return now, {
        path: origins.get(path, "default") if former.get(path) == value else "config" for path, value in leaves(now)
    }
