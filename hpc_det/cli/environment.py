"""hpc-det environment: prepare the Python environment for jobs."""

from __future__ import annotations

import os

import click

from hpc_det.cli.commands import Group
from hpc_det.store.experiments import state_root
from hpc_det.submit.bundle import bundle_path, is_current, write_bundle
from hpc_det.view.formatting import count, size


@click.group(cls=Group)
def environment() -> None:
    """Prepare the Python environment of the ranks for jobs."""


@environment.command()
def bundle() -> None:
    """Write the file from which ranks with `environment.bundle: true` import installed packages.

    A submission of such an experiment does so, too. The command helps after packages were changed while jobs are
    queued. If the file has the installed packages already, nothing is written.

    \b
    Example:
      hpc-det environment bundle
    """
    path = bundle_path(state_root(os.environ))
    if is_current(path):
        click.echo(f"{path} has the installed packages already")
        return
    written = write_bundle(path)
    packages = count(written.packages, "package")
    click.echo(f"Wrote {path}: {written.modules} modules of Python and {packages}, {size(written.size_bytes)}")
