"""Checks of values that are valid alone and contradict each other.

They read plain trees, which may be invalid, so that their problems are reported together with those of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from hpc_det.config.batch_sizes import batch_size_problems
from hpc_det.config.cluster import Cluster
from hpc_det.config.entrypoint import trial_name
from hpc_det.config.fields import time_limit_min
from hpc_det.config.job_sections import Resources
from hpc_det.config.loggers import logger_problems
from hpc_det.config.merge import Tree, device_of_text, same_folder, value_at
from hpc_det.config.schema import Experiment
from hpc_det.config.section import expectation
from hpc_det.config.storage import is_below
from hpc_det.errors import MISSING, Problem, count, shown

_HALVING = ("async_halving", "adaptive_asha")
_WAYS = ("command", "webhook", "mail")
"""The keys of a hook of which exactly one is set."""


def cross_problems(experiment: Tree, cluster: Tree) -> Iterator[Problem]:
    """Yield the contradictions between values. The schema reports values that are invalid alone."""
    yield from _searcher_problems(experiment)
    yield from batch_size_problems(experiment)
    yield from _records_problems(experiment)
    yield from _time_limit_problems(experiment, cluster)
    yield from _packed_slots_problems(experiment)
    yield from _device_problems(experiment)
    yield from _mount_problems(experiment)
    yield from _storage_problems(experiment)
    yield from _profiling_problems(experiment)
    yield from _log_policy_problems(experiment)
    yield from _hook_problems(experiment)
    yield from logger_problems(experiment)


def _searcher_problems(experiment: Tree) -> Iterator[Problem]:
    searcher = value_at(experiment, "searcher") or {}
    if not isinstance(searcher, dict):
        return
    given = [key for key in ("time_metric", "max_time") if searcher.get(key) is not None]
    if given and searcher.get("name") in _HALVING:
        yield Problem(
            f"searcher.{given[0]}",
            _old_length(searcher),
            "give max_length alone, such as {batches: 1000}, or time_metric (batches, records or epochs) with max_time",
        )
    elif searcher.get("max_length") is None and _needs_length(experiment, searcher):
        yield Problem("searcher.max_length", MISSING, f"give {expectation(Experiment, ('searcher', 'max_length'))}")
    sources = ("source_trial_id", "source_checkpoint_uuid")
    if all(searcher.get(key) is not None for key in sources):
        yield Problem("searcher.source_trial_id", f"{' and '.join(sources)} are both given", "keep one of them")


def _old_length(searcher: Tree) -> str:
    if searcher.get("max_length") is not None:
        return "max_length is also given"
    return f"time_metric {shown(searcher.get('time_metric'))} with max_time {shown(searcher.get('max_time'))}"


def _needs_length(experiment: Tree, searcher: Tree) -> bool:
    """Return whether the searcher needs max_length."""
    if searcher.get("name") in _HALVING:
        return True  # rungs are fractions of the length
    # A trial class trains until hpc_det stops it; a script may stop on its own.
    with suppress(ValueError):  # from unbalanced quotes in the entrypoint, which check_entrypoint reports
        return trial_name(experiment.get("entrypoint")) is not None
    return False


def _records_problems(experiment: Tree) -> Iterator[Problem]:
    if value_at(experiment, "hyperparameters", "global_batch_size") is not None:
        return
    for path in ("searcher.max_length", "min_validation_period", "min_checkpoint_period"):
        records = value_at(experiment, *path.split("."), "records")
        if records is not None:
            yield Problem(
                path,
                f"{{records: {records}}} cannot be counted in batches",
                "set hyperparameters.global_batch_size, or use batches or epochs",
            )


def _time_limit_problems(experiment: Tree, cluster: Tree) -> Iterator[Problem]:
    own = value_at(experiment, "resources", "time_limit")
    limit, path = (
        (own, "resources.time_limit") if own is not None else (cluster.get("time_limit"), "cluster.time_limit")
    )
    lead_s = cluster.get("signal_lead_s") or Cluster.model_fields["signal_lead_s"].default
    try:
        minutes = time_limit_min(limit or "")
    except (ValueError, TypeError):
        return
    if type(lead_s) is int and minutes * 60 <= lead_s:
        yield Problem(
            path,
            f"{limit!r} is {minutes * 60} s and does not exceed cluster.signal_lead_s {lead_s}",
            f"give at least {count(lead_s // 60 + 1, 'minute')} or a shorter signal_lead_s",
        )


def _packed_slots_problems(experiment: Tree) -> Iterator[Problem]:
    slots = value_at(experiment, "resources", "slots_per_trial") or Resources().slots_per_trial
    packed = value_at(experiment, "resources", "packed_slots")
    if type(slots) is int and type(packed) is int and slots > 0 and packed % slots:
        low = packed - packed % slots
        yield Problem(
            "resources.packed_slots",
            f"{packed} is not a multiple of resources.slots_per_trial {slots}",
            f"use {low} or {low + slots}" if low else f"use {slots}",
        )


def _device_problems(experiment: Tree) -> Iterator[Problem]:
    """Yield a problem for each map that has both `gpu` and `cuda`."""
    # in_todays_names has renamed `gpu` already, except where `cuda` exists too.
    for key in ("image", "environment_variables"):
        written = value_at(experiment, "environment", key)
        if isinstance(written, dict) and {"gpu", "cuda"} <= written.keys():
            path = f"environment.{key}.gpu"
            yield Problem(path, "gpu is the old name of cuda, and both are given", "keep cuda")


def _mount_problems(experiment: Tree) -> Iterator[Problem]:
    """Yield a problem for each mount or device at the same place in the container as an earlier one."""
    for section in ("bind_mounts", "resources.devices"):
        found = value_at(experiment, *section.split("."))
        first: dict[str, int] = {}
        for i, item in enumerate(found if isinstance(found, list) else ()):
            path = value_at(device_of_text(item) if isinstance(item, str) else item, "container_path")
            if not isinstance(path, str):  # the schema reports it
                continue
            other = first.setdefault(same_folder(path), i)
            if other != i:
                yield Problem(
                    f"{section}[{i}].container_path", f"{shown(path)} is also that of {section}[{other}]", "keep one"
                )


def _storage_problems(experiment: Tree) -> Iterator[Problem]:
    storage = value_at(experiment, "checkpoint_storage")
    kind, host, path = (value_at(storage, key) for key in ("type", "host_path", "storage_path"))
    if kind == "shared_fs" and isinstance(host, str) and isinstance(path, str) and not is_below(path, host):
        yield Problem(
            "checkpoint_storage.storage_path",
            f"{shown(path)} is not inside checkpoint_storage.host_path {shown(host)}",
            "give a relative path, or one below host_path",
        )
    ways = [value_at(storage, key) for key in ("connection_string", "account_url")]
    if kind == "azure" and ways.count(None) != 1:
        yield Problem(
            "checkpoint_storage.connection_string",
            "exactly one of connection_string and account_url must be given",
            "give one of them",
        )
    elif kind == "azure" and ways[0] is not None and value_at(storage, "credential") is not None:
        yield Problem(
            "checkpoint_storage.credential",
            "connection_string contains a credential already",
            "leave credential out, or give account_url instead of connection_string",
        )


def _profiling_problems(experiment: Tree) -> Iterator[Problem]:
    first = value_at(experiment, "profiling", "begin_on_batch") or 0
    last = value_at(experiment, "profiling", "end_after_batch")
    if type(first) is int and type(last) is int and 0 <= last < first:
        path = "profiling.end_after_batch"
        yield Problem(path, f"{last} is before profiling.begin_on_batch {first}", f"give at least {first}")


def _log_policy_problems(experiment: Tree) -> Iterator[Problem]:
    policies = value_at(experiment, "log_policies")
    names: list[Any] = []
    for i, policy in enumerate(policies if isinstance(policies, list) else ()):
        name = value_at(policy, "name")
        if name is not None and name in names:
            path = f"log_policies[{i}].name"
            yield Problem(path, f"{shown(name)} is also the name of log_policies[{names.index(name)}]", "give another")
        names.append(name)
        if isinstance(policy, dict) and name is None and policy.get("pattern") is None:
            yield Problem(f"log_policies[{i}].pattern", MISSING, "give a pattern, or the name of a default policy")


def _hook_problems(experiment: Tree) -> Iterator[Problem]:
    """Yield the problems of the hooks. No message contains the URL of a webhook, because it is a secret."""
    hooks = experiment.get("notify")
    for i, hook in enumerate(hooks if isinstance(hooks, list) else ()):
        if not isinstance(hook, dict):
            continue
        ways = [way for way in _WAYS if hook.get(way) is not None]
        if len(ways) != 1:
            what = f"{' and '.join(ways)} are given together" if ways else "it notifies nobody"
            yield Problem(f"notify[{i}]", what, f"give one of {', '.join(_WAYS)}; a list may have several hooks")
        if wrong := _not_an_address(hook.get("webhook")):
            yield Problem(f"notify[{i}].webhook", wrong, "give an address such as https://hooks.example.org/a/b")


def _not_an_address(url: Any) -> str | None:
    """Return why `url` is not a supported URL of a webhook, or None if it is one."""
    if not isinstance(url, str) or not url.strip():  # the schema reports it
        return None
    if not re.fullmatch(r"[!-~]+", url):
        return "contains spaces or characters that a URL has to escape"
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError:
        return "has an invalid host or port"
    if parts.scheme not in ("http", "https"):
        return "is not an http or https URL"
    if not host:
        return "names no host"
    return "contains a user name or password before its host, which is not supported" if "@" in parts.netloc else None
