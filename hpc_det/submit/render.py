"""Renders a plan to a job script. A variable that only the template or only the plan has is an error."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpc_det.plan.container import HPC_DET
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.resources import data_path
from hpc_det.schedulers.scheduler import scheduler


def render(plan: JobPlan, array: JobArray, script: Path) -> str:
    """Return the job script of `array`, exactly as it is submitted. `script`: the path that it will have."""
    return render_template(scheduler(plan.scheduler).template, script_variables(plan, array, script))


def script_variables(plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
    """Return the variables of the script's template: those of all templates, and those of the plan's scheduler."""
    return {
        "title": f"experiment {plan.experiment_id}: {plan.name}",
        "modules": [f"module load {shlex.quote(module)} || exit" for module in plan.modules],
        "setup": list(plan.setup),
        "python_folder": shlex.quote(plan.python.rpartition("/")[0]),
        "job": shlex.join([plan.python, "-m", "hpc_det.launch.job", plan.folder, script.stem]),
        "agent": agent_command(plan),
        **scheduler(plan.scheduler).script_variables(plan, array, script),
    }


def agent_command(plan: JobPlan) -> str:
    """Return the command line of the node agent, without the trial, attempt and worker, which its starter appends."""
    in_container = plan.container and not plan.container.starts_entrypoint
    python = ["env", f"PYTHONPATH={HPC_DET}", "python3"] if in_container else [plan.python]
    agent = "hpc_det.launch.agent"
    # Each node's first process makes the local copy and becomes the agent.
    module = ["hpc_det.launch.staged", plan.stage, plan.scratch or "", agent] if plan.stage else [agent]
    return shlex.join([*python, "-m", *module])


def render_template(name: str, variables: dict[str, object]) -> str:
    """Return the rendered template. Raises ValueError with the variables that are unknown or unused."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, meta

    environment = Environment(
        loader=FileSystemLoader(data_path("slurm_templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    assert environment.loader is not None
    source = environment.loader.get_source(environment, name)[0]
    used = meta.find_undeclared_variables(environment.parse(source))
    if used != set(variables):
        raise ValueError(
            f"slurm_templates/{name}: unknown variables {sorted(used - set(variables))}, "
            f"unused variables {sorted(set(variables) - used)}"
        )
    return environment.get_template(name).render(variables)
