"""hpc-det completion: what a shell needs to complete commands, options, ids and names."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Have a shell complete commands, ids and names.

    Prints the script that it needs. For bash, `eval "$(hpc-det completion bash)"` in ~/.bashrc is enough.

    \b
    Example:
      hpc-det completion bash
    """
    from click.shell_completion import get_completion_class

    from hpc_det.cli.main import cli

    program = context.find_root().info_name or "hpc-det"
    found = get_completion_class(shell)
    assert found, shell
    click.echo(found(cli, {}, program, f"_{program.replace('-', '_').upper()}_COMPLETE").source())
