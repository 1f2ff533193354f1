"""hpc-det cluster: show cluster profiles, and write one for a site."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import click

from hpc_det.cli.commands import Group
from hpc_det.cli.output import Column, Output, column, output_options
from hpc_det.config.cluster_choice import chosen_cluster, schedulers_here
from hpc_det.config.conf_files import find, group_files
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.errors import UsageError, say
from hpc_det.node.files import write_atomic
from hpc_det.schedulers.scheduler import run_command
from hpc_det.schedulers.site import NO_SCHEDULER, Site, ThisMachine, ask, to_yaml
from hpc_det.store.experiments import state_root


@click.group(cls=Group)
def cluster() -> None:
    """Show cluster profiles, and write one for your site."""


@cluster.command()
@click.option(
    "--scheduler",
    type=click.Choice(["slurm", "pbs"]),
    help="Scheduler to query if the commands of both are on PATH; default: the first that answers.",
)
@click.option("--name", help="Name of the profile; default: the scheduler's name for the cluster.")
@click.option("--write", is_flag=True, help="Save the profile where --cluster NAME finds it, instead of printing it.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the profile to this file.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def detect(scheduler: str | None, name: str | None, write: bool, output: Path | None, force: bool) -> None:
    """Query this machine's scheduler and print a cluster profile made from its answers.

    Without a scheduler the profile describes this machine: its GPUs and CPUs.

    \b
    Example:
      hpc-det cluster detect --name dawn --write
    """
    if write and output:
        raise UsageError("--write: conflicts with --output; give one of them")
    site: Site | ThisMachine
    if scheduler or schedulers_here(shutil.which):
        site = ask(run_command, shutil.which, scheduler)
        called = _checked(name or site.name)
        text = to_yaml(site, called)
    else:
        site = ThisMachine.look(os.environ)
        called = _checked(name or site.name)
        text = site.to_yaml(called)
        say(f"note: {NO_SCHEDULER}: the profile is for this machine alone; for a cluster, run this on its login node")
        if site.problem:
            say(f"note: {site.problem}")
    target = state_root(os.environ) / "conf" / "cluster" / f"{called}.yaml" if write else output
    if target is None:
        click.echo(text, nl=False)
        return
    _write(target, text, force, private=write)
    click.echo(f"Wrote {target}")


@cluster.command("list")
@output_options
def list_(output: Output) -> None:
    """List the profiles that --cluster accepts, and the one that is used without it.

    \b
    Example:
      hpc-det cluster list --json
      [{"name": "dawn", "scheduler": "slurm", "default": true,
        "file": "/home/me/hpc_det/conf/cluster/dawn.yaml", "problem": null}]
    `problem` is why the file cannot be read.
    """
    default, why = _default()
    # the first file of a name is in use and hides the others
    files = {name: found[0][1] for name, found in sorted(group_files("cluster", os.environ).items())}
    records = [_listed(name, file, is_default=name == default) for name, file in files.items()]
    output.table(records, COLUMNS)
    if output.is_for_people:
        for record in records:
            if record["problem"]:
                say(f"note: {record['problem']}")
        say(why)


COLUMNS = (
    column("NAME", "name"),
    column("SCHEDULER", "scheduler", missing="cannot be read"),
    Column("DEFAULT", lambda record: "yes" if record["default"] else ""),
    column("FILE", "file"),
)


def _default() -> tuple[str | None, str]:
    """Return the name of the profile that is used without --cluster, None if one must be named; and the reason."""
    try:
        chosen = chosen_cluster(None, os.environ)
    except UsageError as error:
        return None, f"no default: {str(error).removeprefix('cluster: ')}"
    return chosen.name, f"default: {chosen.name} ({chosen.reason or 'this machine'})"


def _listed(name: str, file: Path, *, is_default: bool) -> dict[str, Any]:
    scheduler, problem = None, None
    try:
        scheduler = str(load_yaml(file).get("scheduler", ""))
    except UsageError as error:
        problem = str(error)
    return {"name": name, "scheduler": scheduler, "default": is_default, "file": str(file), "problem": problem}


@cluster.command()
@click.argument("name")
@output_options
def show(name: str, output: Output) -> None:
    """Print the profile NAME.

    \b
    Example:
      hpc-det cluster show local
    """
    file = find("cluster", name, os.environ)
    if output.is_for_people:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        output.details([load_yaml(file)])


def _checked(name: str) -> str:
    """Return `name`, which becomes a file name; raise UsageError if it is not suitable."""
    if name.startswith((".", "-")) or not all(char.isalnum() or char in "._-" for char in name):
        raise UsageError(
            f"--name: {name!r} is not a valid profile name; use letters, digits, '.', '_' and '-', and start with a "
            "letter, a digit or '_'"
        )
    return name


def _write(target: Path, text: str, force: bool, *, private: bool) -> None:
    """Write the file and the missing folders above it. `private`: for this user alone; else a new file can be read by
    all users, since it may be a profile of the site, and a file that exists keeps its mode.
    """
    exists = target.exists()
    if exists and not force:
        raise UsageError(f"{target}: already exists; pass --force to replace it, or choose another --name")
    mode = stat.S_IMODE(target.stat().st_mode) if exists else 0o644
    missing = [folder for folder in target.absolute().parents if not folder.exists()]
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(target, text)
    if not private:
        target.chmod(mode)
        for folder in missing:
            folder.chmod(0o755)
