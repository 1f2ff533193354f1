"""hpc-det: the commands by name, and how their errors reach the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from hpc_det.cli.commands import Group, LazyCommand
from hpc_det.errors import INTERRUPTED, HpcDetError, refused, visible

COMMANDS = (
    LazyCommand("experiment", "experiment", "Create experiments and look after them.", alias="e"),
    LazyCommand("top", "top", "Watch all experiments and their jobs on one screen."),
    LazyCommand("trial", "trial", "Look at one trial of an experiment.", alias="t"),
    LazyCommand("checkpoint", "checkpoint", "Look at checkpoints, copy and remove them.", alias="c"),
    LazyCommand("job", "job", "Look at the queue, and change places in it.", alias="j"),
    LazyCommand("report", "report", "Write an experiment as one HTML page."),
    LazyCommand("tensorboard", "tensorboard", "Show experiments or trials in TensorBoard."),
    LazyCommand("cluster", "cluster", "Profiles of clusters, and how to write yours."),
    LazyCommand("doctor", "doctor", "Check what of hpc_det this machine and its cluster support."),
    LazyCommand("config", "config", "Check experiment files."),
    LazyCommand("schema", "schema", "Print the JSON schema of experiment files."),
    LazyCommand("run", "run", "Create an experiment from a Hydra command line."),
    LazyCommand("sweep", "sweep", "Look after sweeps of Hydra apps."),
    LazyCommand("preview-search", "preview_search", "Show what the search of an experiment would train."),
    LazyCommand("template", "template", "Keep settings that several experiments share.", alias="tpl"),
    LazyCommand("task", "task", "What runs now: the gangs of all experiments."),
    LazyCommand("version", "version", "Show the versions of hpc_det and of what it runs on."),
    LazyCommand("completion", "completion", "Have a shell complete commands, ids and names."),
    LazyCommand("install-det", "install_det", "Give hpc-det the second name det."),
)


@click.group(cls=Group, lazy=COMMANDS, wraps_helps=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hpc_det", prog_name="hpc-det")
def cli() -> None:
    """Deep learning experiments as gang jobs on the cluster you already have.

    State lies in $HPC_DET_ROOT, by default ~/hpc_det.

    \b
    Example:
      hpc-det experiment create digits.yaml . --cluster slurm --follow
    """


def main_as_det() -> int:
    """What the script does that `hpc-det install-det` makes."""
    return main(program="det")


def main(argv: Sequence[str] | None = None, program: str = "hpc-det") -> int:
    """The exit code: 0, or the error's. A user's error is its problems on stderr, one per line, never a traceback."""
    os.umask(0o077)  # whatever a command writes is the user's own; `mkdir(mode=)` alone leaves files and parents open
    try:
        code = cli.main(args=argv, prog_name=program, standalone_mode=False)
    except HpcDetError as error:
        return _say(error.problems, error.exit_code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except OSError as error:
        return _say(refused(error).problems, HpcDetError.exit_code)
    return code if isinstance(code, int) else 0


def _say(problems: Sequence[str], exit_code: int) -> int:
    for line in "\n".join(problems).splitlines():
        print(f"hpc-det: {visible(line)}", file=sys.stderr)
    return exit_code
