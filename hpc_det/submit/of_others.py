"""What a fork of somebody else's experiment cannot take along: their secrets, their other experiments, and whom they
have told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_det.config.merge import Tree
from hpc_det.config.secrets import MASK, masked_names, masked_paths
from hpc_det.errors import UsageError

if TYPE_CHECKING:
    from hpc_det.plan.effective import Effective

_VARIABLES = "environment.environment_variables"


def without_hooks(before: Tree) -> Tree:
    """News of the fork are none of the owner's business, and the address of a webhook is a secret."""
    return {key: value for key, value in before.items() if key != "notify"}


def check_is_ones_own(found: Effective, before: Tree, owner: str) -> None:
    """`before`: the configuration of the `owner`, masked. Raises UsageError with each key that has to be said anew."""
    if problems := [*_secrets(found, owner), *_sources(found, before, owner)]:
        raise UsageError(problems)


def _secrets(found: Effective, owner: str) -> Iterator[str]:
    for path in masked_paths(found.tree):
        yield f"{path}: a secret of {owner}'s; give yours with --config {path}=VALUE"
    variables = found.experiment.environment.variables(found.cluster.slot_type)
    if names := masked_names(variables):
        again = ", ".join(item.replace(MASK, "VALUE") for item in dict.fromkeys(variables))
        yield (
            f"{_VARIABLES}: {', '.join(names)}: secrets of {owner}'s; give yours with --config '{_VARIABLES}=[{again}]'"
        )
    if MASK in found.cluster.setup:
        yield (
            f"cluster.setup: a line sets a secret of {owner}'s; choose a profile that you may use with --cluster NAME"
        )


def _sources(found: Effective, before: Tree, owner: str) -> Iterator[str]:
    """Numbers of experiments are each user's own."""
    for key in ("source_trial_id", "source_checkpoint_uuid"):
        value = found.tree["searcher"].get(key)
        if value and value == before["searcher"].get(key):
            yield f"searcher.{key}: {value!r} is {owner}'s; say one of yours, or null, with --config searcher.{key}="
