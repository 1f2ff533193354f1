"""hpc-det experiment: create experiments and look after them."""

from __future__ import annotations

import click

from hpc_det.cli.commands import Group, LazyCommand

COMMANDS = (
    LazyCommand("activate", "experiment.continue_", "Go on with experiments that were paused."),
    LazyCommand("archive", "experiment.archive", "Hide finished experiments from listings."),
    LazyCommand("cancel", "experiment.stop", "Save a checkpoint of each trial, then end the experiments."),
    LazyCommand(
        "cleanup",
        "experiment.cleanup",
        "Delete logs that are older than their experiment's `retention_policy` says; fit for cron.",
    ),
    LazyCommand("config", "experiment.config", "Print the effective configuration of an experiment, secrets masked."),
    LazyCommand(
        "continue",
        "experiment.continue_",
        "Go on with an experiment that was cancelled, has failed, or shall train longer.",
    ),
    LazyCommand("create", "experiment.create", "Create an experiment from a YAML file and the folder of its code."),
    LazyCommand(
        "delete", "experiment.delete", "Delete experiments that have ended, with their checkpoints, wherever these lie."
    ),
    LazyCommand(
        "delete-tb-files",
        "experiment.delete",
        "Delete the TensorBoard files of experiments that have ended, profiler traces too.",
    ),
    LazyCommand(
        "describe",
        "experiment.describe",
        "Describe experiments: state and trials, or attempts, metrics and checkpoints of the only trial.",
    ),
    LazyCommand(
        "download", "experiment.download", "Copy the best checkpoints of an experiment, and print their folders."
    ),
    LazyCommand(
        "download-model-def",
        "experiment.download",
        "Copy the code of an experiment as it was submitted, and print the folder.",
    ),
    LazyCommand("fork", "experiment.continue_", "Run an experiment again, as another one."),
    LazyCommand(
        "kill", "experiment.stop", "End experiments now, with all their trials and jobs, without another checkpoint."
    ),
    LazyCommand("label", "experiment.set", "Words to find experiments by."),
    LazyCommand("list", "experiment.list", "List experiments."),
    LazyCommand("list-checkpoints", "experiment.list_checkpoints", "List the checkpoints of an experiment."),
    LazyCommand(
        "list-trials",
        "experiment.list_trials",
        "List the trials of an experiment, with the hyperparameters in which they differ.",
    ),
    LazyCommand(
        "logs", "experiment.logs", "Print what the jobs and their ranks printed, attempt after attempt, merged by time."
    ),
    LazyCommand(
        "pause", "experiment.stop", "Have the trials of experiments save, and free their nodes until `activate`."
    ),
    LazyCommand("set", "experiment.set", "Change what is said of experiments, and what is kept of them."),
    LazyCommand(
        "tune-throughput",
        "experiment.tune_throughput",
        "Find out what limits the throughput of an experiment, and which settings to try.",
    ),
    LazyCommand("unarchive", "experiment.archive", "Show archived experiments in listings again."),
    LazyCommand(
        "verify-resume",
        "experiment.verify_resume",
        "Check that a trial resumes bit for bit, before you trust it with a month of GPUs.",
    ),
    LazyCommand("wait", "experiment.wait", "Wait until experiments have ended; exit code 0 only if all are COMPLETED."),
)


@click.group(cls=Group, lazy=COMMANDS)
def experiment() -> None:
    """Create experiments and look after them."""
