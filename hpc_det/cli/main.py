"""The hpc-det program: its commands by name, and the report of their errors to the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from hpc_det.cli.commands import Group, LazyCommand
from hpc_det.errors import INTERRUPTED, HpcDetError, refused, visible

COMMANDS = (
    LazyCommand("experiment", "experiment", "Create, control and inspect experiments.", alias="e"),
    LazyCommand("top", "top", "Watch all experiments and their jobs on one screen."),
    LazyCommand("trial", "trial", "Inspect, profile or kill one trial of an experiment.", alias="t"),
    LazyCommand("checkpoint", "checkpoint", "Describe, copy and remove checkpoints.", alias="c"),
    LazyCommand("job", "job", "Show the queue, and hold, release or reorder your jobs.", alias="j"),
    LazyCommand("report", "report", "Write a report of experiments as one HTML page."),
    LazyCommand("tensorboard", "tensorboard", "Show experiments or trials in TensorBoard."),
    LazyCommand("cluster", "cluster", "Show cluster profiles, and write one for your site."),
    LazyCommand("doctor", "doctor", "Check what hpc_det needs of this machine and its cluster."),
    LazyCommand("environment", "environment", "Prepare the Python environment of the ranks for jobs."),
    LazyCommand("config", "config", "Check experiment files, and import those of Determined."),
    LazyCommand("schema", "schema", "Print the JSON schema of experiment files."),
    LazyCommand("run", "run", "Create an experiment from a Hydra command line."),
    LazyCommand("sweep", "sweep", "Show sweeps of Hydra apps, and wait for them."),
    LazyCommand("preview-search", "preview_search", "Show what the search of an experiment would train."),
    LazyCommand("template", "template", "Manage templates: settings that several experiments share.", alias="tpl"),
    LazyCommand("task", "task", "List the running gangs of all experiments."),
    LazyCommand("version", "version", "Show the versions of hpc_det and of the packages it uses."),
    LazyCommand("completion", "completion", "Print the completion script of a shell."),
    LazyCommand("install-det", "install_det", "Install `det` as a second name of hpc-det."),
)


@click.group(cls=Group, lazy=COMMANDS, wraps_helps=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hpc_det", prog_name="hpc-det")
def cli() -> None:
    """Run deep learning experiments as gang jobs on the cluster you already have.

    State is stored in $HPC_DET_ROOT; default: the site's choice, or ~/hpc_det.

    \b
    Example:
      hpc-det experiment create digits.yaml . --cluster slurm --follow
    """


def main_as_det() -> int:
    """Run the command line under the name `det`; called by the script that `hpc-det install-det` writes."""
    return main(program="det")


def main(argv: Sequence[str] | None = None, program: str = "hpc-det") -> int:
    """Run a command and return its exit code: 0, or that of the error.

    An HpcDetError or OSError prints its problems on stderr, one per line, without a traceback.
    """
    os.umask(0o077)  # all that a command writes is private; `mkdir(mode=)` alone leaves files and parent folders open
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
    for line in "\n".join(problems).splitlines():  # a problem may have several lines; each gets the prefix
        print(f"hpc-det: {visible(line)}", file=sys.stderr)
    return exit_code
