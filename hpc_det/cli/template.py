"""hpc-det template: manage settings that several experiments share."""

from __future__ import annotations

import os
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_det.cli.commands import Group
from hpc_det.cli.output import Column, Output, output_options
from hpc_det.config.plain_yaml import dump_yaml
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError

if TYPE_CHECKING:
    from hpc_det.config.templates import Template


@click.group(cls=Group)
def template() -> None:
    """Manage templates: settings that several experiments share.

    An experiment's own configuration is merged over its template: `experiment create --template NAME`, `run
    template=NAME`. Your templates are in $HPC_DET_ROOT/conf/template. They take precedence over those of the site, in
    the folders of $HPC_DET_SITE_CONF, and over those of hpc_det. Changes to a template do not affect experiments that
    already exist.
    """


@template.command("list")
@click.option("-d", "--details", "--detail", is_flag=True, help="Also show the settings of each template.")
@output_options
def list_(details: bool, output: Output) -> None:
    """List all templates, with their owners and the templates of the same name that they hide.

    \b
    Example:
      hpc-det template list --json
      [{"name": "small", "from": "user",
        "file": "/home/me/hpc_det/conf/template/small.yaml",
        "hides": [{"from": "hpc_det", "file": "..."}]}]
    `from` is user, site or hpc_det. With --details a record also has `config`,
    with secrets masked; if the file is invalid, `config` is null and `problem`
    has the reason.
    """
    from hpc_det.config.templates import templates

    found = templates(os.environ)
    if details and output.is_for_people:
        click.echo("\n".join(_in_words(item, _details(item)) for item in found), nl=False)
    else:
        output.table([_record(item, details=details) for item in found], COLUMNS)


@template.command()
@click.argument("name")
@output_options
def describe(name: str, output: Output) -> None:
    """Show the settings of a template, with secrets masked.

    \b
    Example:
      hpc-det template describe small
    """
    from hpc_det.config.templates import template

    found = template(name, os.environ)
    if output.is_for_people:
        click.echo(_in_words(found, {"config": masked(found.tree())}), nl=False)
    else:
        output.details([_record(found, details=True)])


@template.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
def create(name: str, file: Path) -> None:
    """Save a YAML file as your new template NAME.

    \b
    Example:
      hpc-det template create h100 a100.yaml
    """
    from hpc_det.config.templates import set_template, templates

    if any(known.name == name and known.owner == "user" for known in templates(os.environ)):
        raise UsageError(f"template {name!r}: already exists; replace it with `hpc-det template set {name} {file}`")
    set_template(name, file, os.environ)
    click.echo(f"Created template {name}")


@template.command("set")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
def set_(name: str, file: Path) -> None:
    """Save a YAML file as your template NAME, replacing an existing one.

    Every setting in the file must be valid for an experiment; none is required.

    \b
    Example:
      hpc-det template set a100 a100.yaml
    """
    from hpc_det.config.templates import set_template

    known = set_template(name, file, os.environ)
    click.echo(f"{'Updated' if known else 'Set'} template {name}")


@template.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove your template NAME; `rm` is an alias.

    \b
    Example:
      hpc-det template remove a100
    """
    from hpc_det.config.templates import remove_template

    uncovered = remove_template(name, os.environ)  # the template of the site or of hpc_det that it hid, if any
    click.echo(f"Removed template {name}" + (f"; the name now refers to {_whose(*uncovered)}" if uncovered else ""))


def _record(found: Template, *, details: bool) -> dict[str, Any]:
    hides = [{"from": owner, "file": str(file)} for owner, file in found.hides]
    record = {"name": found.name, "from": found.owner, "file": str(found.file), "hides": hides}
    return {**record, **_details(found)} if details else record


def _details(found: Template) -> dict[str, Any]:
    """Return `config` with secrets masked; if the file is invalid, None as `config` and the reason as `problem`."""
    try:
        return {"config": masked(found.tree())}
    except UsageError as error:  # one invalid file must not hide all other templates
        return {"config": None, "problem": str(error)}


def _in_words(found: Template, details: dict[str, Any]) -> str:
    """Return the template as YAML, with its source and problems in comment lines."""
    lines = [f"# {found.name}: {_whose(found.owner, found.file)}"]
    lines += [f"# hides {_whose(owner, file)}" for owner, file in found.hides]
    lines += [f"# {details['problem']}"] if "problem" in details else []
    return "\n".join(lines) + "\n" + dump_yaml(details["config"])


def _whose(owner: str, file: Path) -> str:
    return f"{owner} ({file})"


COLUMNS = (
    Column("NAME", itemgetter("name")),
    Column("FROM", itemgetter("from")),
    Column("HIDES", lambda record: ", ".join(hidden["from"] for hidden in record["hides"]) or "-"),
)
