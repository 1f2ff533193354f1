"""hpc-det experiment: create, control and inspect experiments."""

from __future__ import annotations

import click

from hpc_det.cli.commands import Group, LazyCommand

COMMANDS = (
    LazyCommand("activate", "experiment.continue_", "Resume paused experiments."),
    LazyCommand("archive", "experiment.archive", "Hide finished experiments from listings."),
    LazyCommand("cancel", "experiment.stop", "Save a checkpoint of each trial, then end the experiments."),
    LazyCommand(
        "cleanup",
        "experiment.cleanup",
        "Delete logs that are older than their experiment's `retention_policy` allows; suitable for cron.",
    ),
    LazyCommand(
        "config", "experiment.config", "Print the effective configuration of an experiment, with secrets masked."
    ),
    LazyCommand(
        "continue",
        "experiment.continue_",
        "Continue an experiment that was cancelled, has failed, or should train longer.",
    ),
    LazyCommand("create", "experiment.create", "Create an experiment from a YAML file and the folder of its code."),
    LazyCommand(
        "delete", "experiment.delete", "Delete finished experiments and their checkpoints, wherever these are stored."
    ),
    LazyCommand(
        "delete-tb-files",
        "experiment.delete",
        "Delete the TensorBoard files of finished experiments, including profiler traces.",
    ),
    LazyCommand(
        "describe",
        "experiment.describe",
        "Describe experiments: state and trials, or attempts, metrics and checkpoints of the only trial.",
    ),
    LazyCommand(
        "download", "experiment.download", "Copy the best checkpoints of an experiment and print their folders."
    ),
    LazyCommand(
        "download-model-def",
        "experiment.download",
        "Copy the code of an experiment as it was submitted and print the folder.",
    ),
    LazyCommand("fork", "experiment.continue_", "Run an experiment again as a new experiment."),
    LazyCommand(
        "kill", "experiment.stop", "End experiments at once, with all trials and jobs, without saving checkpoints."
    ),
    LazyCommand("label", "experiment.set", "Add labels to experiments or remove them."),
    LazyCommand("list", "experiment.list", "List experiments."),
    LazyCommand("list-checkpoints", "experiment.list_checkpoints", "List the checkpoints of an experiment."),
    LazyCommand(
        "list-trials",
        "experiment.list_trials",
        "List the trials of an experiment, with the hyperparameters in which they differ.",
    ),
    LazyCommand("logs", "experiment.logs", "Print the output of jobs and ranks, by attempt and merged by time."),
    LazyCommand("pause", "experiment.stop", "Save a checkpoint of each trial, then free the nodes until `activate`."),
    LazyCommand("set", "experiment.set", "Change the name, description, limits, priority or retention of experiments."),
    LazyCommand("sync", "experiment.sync", "Upload offline runs of the experiment's loggers."),
    LazyCommand(
        "tune-throughput",
        "experiment.tune_throughput",
        "Find what limits the throughput of an experiment, and which settings to try.",
    ),
    LazyCommand("unarchive", "experiment.archive", "Show archived experiments in listings again."),
    LazyCommand(
        "verify-resume",
        "experiment.verify_resume",
        "Check that a training resumes bit for bit from its checkpoints.",
    ),
    LazyCommand("wait", "experiment.wait", "Wait until experiments have ended; exit code 0 only if all are COMPLETED."),
)


@click.group(cls=Group, lazy=COMMANDS)
def experiment() -> None:
    """Create, control and inspect experiments."""
