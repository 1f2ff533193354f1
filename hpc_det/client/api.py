"""The functions of hpc_det.client: create experiments and find them."""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence

from hpc_det.client.checkpoint import Checkpoint
from hpc_det.client.creation import Config, Overrides, job_scripts, private_files, request_of, say_notes, submit_new
from hpc_det.client.experiment import Experiment
from hpc_det.client.lookup import created_trial, selected, store
from hpc_det.client.trial import Trial
from hpc_det.config.request import for_test
from hpc_det.errors import UsageError, say
from hpc_det.plan.effective import Effective, effective
from hpc_det.store.group import Group
from hpc_det.view.checkpoints import find
from hpc_det.view.state import ExperimentState
from hpc_det.view.summary import WITHOUT_FACTS

Path = str | os.PathLike[str]


def create(
    config: Config,
    context_dir: Path | None = None,
    *,
    cluster: str | None = None,
    template: str | None = None,
    includes: Sequence[Path] = (),
    overrides: Overrides = (),
    paused: bool = False,
    test: bool = False,
    shared: bool | str = False,
) -> Experiment:
    """Create an experiment, submit its jobs, and return it at once.

    The arguments are those of `hpc-det experiment create`. `config`: a YAML file or its content. `context_dir`: the
    folder of the code; default: the `context_dir` of `config`, or the current directory. `cluster`: name of a cluster
    profile; default: the first of HPC_DET_CLUSTER, the site's default, the only profile found and this machine.
    `overrides`: {"a.b": value} or ["a.b=value"]. `paused`: submit jobs only
    when `Experiment.activate` is called. `test`: train one batch. `shared`: True or the name of a group that may view
    and fork the experiment.

    Notes about the configuration are printed on stderr. Raises UsageError with all problems of the configuration;
    nothing is submitted then.
    """
    found = _effective(config, context_dir, cluster, template, includes, overrides, test=test)
    group = Group.of(shared if isinstance(shared, str) else None) if shared else None
    with private_files():
        return Experiment(submit_new(found, store(), group=group, is_paused=paused))


def dry_run(
    config: Config,
    context_dir: Path | None = None,
    *,
    cluster: str | None = None,
    template: str | None = None,
    includes: Sequence[Path] = (),
    overrides: Overrides = (),
    test: bool = False,
) -> builtins.list[str]:
    """Return the job scripts that `create` would submit with these arguments, without writing or submitting anything.

    There is one script, or several if the trials exceed the cluster's `max_array_size`. Raises UsageError as `create`.
    """
    found = _effective(config, context_dir, cluster, template, includes, overrides, test=test)
    return job_scripts(found, store())


def get(experiment: int, *, owner: str | None = None) -> Experiment:
    """Return an experiment by its number. Raises UsageError if it does not exist or is not shared with this user.

    `owner`: the name of another user, or the path of their HPC_DET_ROOT.
    """
    return Experiment(store(owner).existing(experiment))


def get_trial(experiment: int, trial: int, *, owner: str | None = None) -> Trial:
    """Return trial number `trial` of an experiment. Raises UsageError if the search has not created it."""
    found = get(experiment, owner=owner)
    return Trial(found, created_trial(found.folder, trial).id)


def get_checkpoint(uuid: str, *, owner: str | None = None) -> Checkpoint:
    """Return a checkpoint by its UUID, or at least the first four characters of it. Raises UsageError for no match, and
    for several.
    """
    return Checkpoint(find(store(owner), uuid))


def list(
    states: Sequence[ExperimentState | str] | ExperimentState | str | None = None,
    name: str | None = None,
    labels: Sequence[str] | str | None = None,
    owner: str | None = None,
    *,
    archived: bool = False,
) -> builtins.list[Experiment]:
    """Return the experiments that match all conditions, oldest first.

    `states`: one of these, such as "RUNNING"; `name`: exactly this name; `labels`: all of these; `owner`: of another
    user, as in `get`; `archived`: include archived ones. Experiments with damaged files are left out, with a note on
    stderr. Raises UsageError for an unknown state.
    """
    experiments, found = store(owner), builtins.list[Experiment]()
    wanted = [_state(each) for each in _several(states)]
    for summary in selected(experiments, states=wanted, name=name, labels=_several(labels), with_archived=archived):
        if summary.name in WITHOUT_FACTS:
            say(f"note: experiment {summary.id} is left out: its files cannot be read by this hpc_det")
        else:
            found.append(Experiment(experiments.folder(summary.id)))
    return found


def _effective(
    config: Config,
    context_dir: Path | None,
    cluster: str | None,
    template: str | None,
    includes: Sequence[Path],
    overrides: Overrides,
    *,
    test: bool,
) -> Effective:
    """Return the effective configuration, and print its notes. Raises UsageError with all problems."""
    request = request_of(
        config, context_dir, cluster=cluster, template=template, includes=includes, overrides=overrides
    )
    found = effective(for_test(request) if test else request)
    say_notes(found)
    return found


def _several(given: Sequence[str] | str | None) -> Sequence[str]:
    return () if given is None else [given] if isinstance(given, str) else given


def _state(name: str) -> ExperimentState:
    try:
        return ExperimentState(name)
    except ValueError:
        known = ", ".join(state.value for state in ExperimentState)
        raise UsageError(f"states: {name!r} is not a state; the states are {known}") from None
