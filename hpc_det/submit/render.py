"""A plan becomes a script. Strict both ways: a variable that the template misses or leaves out is an error."""

from __future__ import annotations

from pathlib import Path

from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.resources import data_path
from hpc_det.schedulers.scheduler import scheduler


def render(plan: JobPlan, array: JobArray, script: Path) -> str:
    """The job script of `array`, which will lie at `script`, byte for byte what is submitted."""
    chosen = scheduler(plan.scheduler)
    return render_template(chosen.template, chosen.script_variables(plan, array, script))


def render_template(name: str, variables: dict[str, object]) -> str:
    """Raises ValueError naming the variables that only one side knows."""
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
