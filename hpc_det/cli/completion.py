"""hpc-det completion: shell completion of commands, options, IDs and names."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    The script completes commands, options, IDs and names. For bash, add `eval "$(hpc-det completion bash)"` to
    ~/.bashrc.

    \b
    Example:
      hpc-det completion bash
    """
    from click.shell_completion import get_completion_class

    from hpc_det.cli.main import cli

    program = context.find_root().info_name or "hpc-det"  # `det` if it was called under that name
    found = get_completion_class(shell)
    assert found, shell
    click.echo(found(cli, {}, program, f"_{program.replace('-', '_').upper()}_COMPLETE").source())
