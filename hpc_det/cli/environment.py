"""hpc-det environment: prepare the Python environment for jobs."""

from __future__ import annotations

import os

import click

from hpc_det.cli.commands import Group
from hpc_det.errors import HpcDetError, count
from hpc_det.node.environment_archive import NotStaged
from hpc_det.store.experiments import state_root
from hpc_det.submit import stage as archives
from hpc_det.submit.bundle import bundle_path, is_current, write_bundle
from hpc_det.view.formatting import size


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


@environment.command()
@click.option("--image", is_flag=True, help="Write a squashfs image, for `environment.stage: image`.")
def stage(image: bool) -> None:
    """Write the archive of this environment, of which nodes make local copies with `environment.stage: tar`.

    A submission of such an experiment does so, too. The command helps after packages were changed while jobs are
    queued. If the archive has all files already, nothing is written.

    \b
    Example:
      hpc-det environment stage
    """
    path = archives.archive_path(state_root(os.environ), "image" if image else "tar")
    if archives.is_current(path):
        click.echo(f"{path} has the files of the environment already")
        return
    try:
        written = archives.write_archive(path)
    except (NotStaged, OSError) as error:
        raise HpcDetError(str(error)) from None
    kind = "squashfs image" if written.is_image else "tar file"
    click.echo(
        f"Wrote {path}: {kind} of {count(written.files, 'file')} in {written.prefix}, {size(written.size_bytes)}"
    )
