"""hpc-det: the commands by name, and how their errors reach the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from hpc_det.cli.lazy import LazyCommand, LazyGroup
from hpc_det.errors import INTERRUPTED, HpcDetError, refused, visible

COMMANDS = (
    LazyCommand(
        name="experiment",
        alias="e",
        where="hpc_det.cli.experiment:experiment",
        help="Create experiments and look after them.",
    ),
    LazyCommand(
        name="top",
        where="hpc_det.cli.top.command:top",
        help="Watch all experiments and their jobs on one screen.",
    ),
    LazyCommand(
        name="trial",
        alias="t",
        where="hpc_det.cli.trial:trial",
        help="Look at one trial of an experiment.",
    ),
    LazyCommand(
        name="checkpoint",
        alias="c",
        where="hpc_det.cli.checkpoint:checkpoint",
        help="Look at checkpoints, copy and remove them.",
    ),
    LazyCommand(
        name="job",
        alias="j",
        where="hpc_det.cli.job:job",
        help="Look at the queue, and change places in it.",
    ),
    LazyCommand(
        name="report",
        where="hpc_det.cli.report:report",
        help="Write an experiment as one HTML page.",
    ),
    LazyCommand(
        name="tensorboard",
        where="hpc_det.cli.tensorboard:tensorboard",
        help="Show experiments or trials in TensorBoard.",
    ),
    LazyCommand(
        name="cluster",
        where="hpc_det.cli.cluster:cluster",
        help="Profiles of clusters, and how to write yours.",
    ),
    LazyCommand(
        name="doctor",
        where="hpc_det.cli.doctor:doctor",
        help="Check what of hpc_det this machine and its cluster support.",
    ),
    LazyCommand(
        name="config",
        where="hpc_det.cli.config:config",
        help="Check experiment files.",
    ),
    LazyCommand(
        name="schema",
        where="hpc_det.cli.schema:schema",
        help="Print the JSON schema of experiment files.",
    ),
    LazyCommand(
        name="run",
        where="hpc_det.cli.run:run",
        help="Create an experiment from a Hydra command line.",
    ),
    LazyCommand(
        name="sweep",
        where="hpc_det.cli.sweep:sweep",
        help="Look after sweeps of Hydra apps.",
    ),
    LazyCommand(
        name="preview-search",
        where="hpc_det.cli.preview:preview_search",
        help="Show what the search of an experiment would train.",
    ),
    LazyCommand(
        name="template",
        alias="tpl",
        where="hpc_det.cli.template:template",
        help="Keep settings that several experiments share.",
    ),
    LazyCommand(
        name="task",
        where="hpc_det.cli.task:task",
        help="What runs now: the gangs of all experiments.",
    ),
    LazyCommand(
        name="version",
        where="hpc_det.cli.version:version_",
        help="Show the versions of hpc_det and of what it runs on.",
    ),
    LazyCommand(
        name="completion",
        where="hpc_det.cli.completion:completion",
        help="Have a shell complete commands, ids and names.",
    ),
    LazyCommand(
        name="install-det",
        where="hpc_det.cli.det:install_det",
        help="Give hpc-det the second name det.",
    ),
)


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
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
