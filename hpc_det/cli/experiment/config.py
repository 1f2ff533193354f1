"""hpc-det experiment config: print the effective configuration of an experiment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.output import Output, output_options, show
from hpc_det.config.merge import Tree, leaves
from hpc_det.config.plain_yaml import dump_yaml
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import shown_config


@click.command()
@any_experiment_argument
@click.option("--origins", is_flag=True, help="Also show the source of each key; not with --json or --csv.")
@output_options
def config(experiment: ExperimentFolder, origins: bool, output: Output) -> None:
    """Print the effective configuration of an experiment, with secrets masked.

    Name, description and labels are the current ones; all other settings are those that its jobs use.

    \b
    Example:
      hpc-det experiment config 12 --origins
    """
    tree, written_by = shown_config(experiment)
    if not output.is_for_people:
        output.details([tree])
    elif origins:
        show("\n".join(explained(tree, written_by)))
    else:
        click.echo(dump_yaml(tree), nl=False)


def explained(tree: Tree, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line with the value and the origin of each leaf of `tree`."""
    rows = [(f"{path}: {json.dumps(value, ensure_ascii=False)}", origins[path]) for path, value in leaves(tree)]
    width = max(len(setting) for setting, _ in rows)
    yield from (f"{setting.ljust(width)}  ({origin})" for setting, origin in rows)
