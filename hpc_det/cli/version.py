"""hpc-det version: show the installed versions of hpc_det and the packages it uses."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click

from hpc_det.cli.output import Output, column, output_options

PACKAGES = ("hpc_det", "torch", "deepspeed", "submitit", "hydra-core", "omegaconf", "mpi4py")


@click.command("version")
@output_options
def version_(output: Output) -> None:
    """Show the versions of hpc_det and of the packages it uses.

    \b
    Example:
      hpc-det version
    """
    records = [{"package": package, "version": _installed(package)} for package in PACKAGES]
    output.table(records, [column("PACKAGE", "package"), column("VERSION", "version", missing="not installed")])


def _installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
