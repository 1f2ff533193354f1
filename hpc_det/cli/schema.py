"""hpc-det schema: print the JSON schema of experiment files or cluster profiles."""

from __future__ import annotations

import json

import click

from hpc_det.config.json_schema import cluster_schema, experiment_schema


@click.command()
@click.argument("of", type=click.Choice(["experiment", "cluster"]), default="experiment")
def schema(of: str) -> None:
    """Print the JSON schema of experiment files.

    With `cluster`, print that of cluster profiles. An editor with the schema completes keys and marks mistakes while
    you type. Rules that involve several keys, such as slots and nodes, are checked only by `hpc-det config check`.

    \b
    Example:
      hpc-det schema
      sed -i '1i # yaml-language-server: $schema=experiment.schema.json' digits.yaml
    """
    chosen = cluster_schema() if of == "cluster" else experiment_schema()
    click.echo(json.dumps(chosen, indent=1, ensure_ascii=False))
