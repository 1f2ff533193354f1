"""Hydra's composition of `conf/config.yaml` and its groups into one plain tree.

Only commands that take Hydra overrides import this module; all others run without loading Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias, cast

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_det.config.cluster import Cluster
from hpc_det.config.cluster_choice import LOCAL, ChosenCluster
from hpc_det.config.conf_files import conf_folders, unknown_choice
from hpc_det.config.interpolation import Resolved, problem_of, resolved, texts
from hpc_det.config.merge import Tree, leaves
from hpc_det.config.plain_yaml import load_yaml, refuse_bombs, yaml_problem
from hpc_det.config.problems import unknown_key
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, keys_at
from hpc_det.errors import UsageError
from hpc_det.store.site_settings import refuse_writable

Choose: TypeAlias = Callable[[], ChosenCluster]
_DEFAULT_CLUSTER = "hpc_det.default_cluster"
"""The interpolation that conf/config.yaml has in place of a cluster."""
_GROUPS = ("cluster", "template", "experiment")
_ONE_OF = ("cluster", "template")
"""The groups of which one file is chosen."""
_FIXED = re.compile(r"\$\{(?:hpc_det|oc\.env):[^${}]*\}")
"""Interpolations whose value does not depend on other keys."""
_IN_GLOBAL_PACKAGE = re.compile(r"\A\s*#\s*@package\s+_global_\s*$", re.MULTILINE)
# With this override, Hydra reads the search path again, to which `opened` has added folders.
_READ_SEARCH_PATH = "hydra.searchpath=[]"


@dataclass(frozen=True, kw_only=True)
class Composed:
    """The result of a composition."""

    found: Resolved
    """The tree with all interpolations resolved."""
    template_name: str | None
    is_linked: bool
    """True if a value may depend on other keys through an interpolation."""
    chosen: ChosenCluster | None
    """The cluster profile, if no override or file names one."""


def compose(overrides: Sequence[str], env: Mapping[str, str], choose: Choose) -> Composed:
    """Return the tree that these overrides compose; `choose` returns the cluster if nothing names one.

    Raises UsageError.
    """
    with opened(env, choose) as composer:
        return composer.compose(overrides)


@contextmanager
def opened(env: Mapping[str, str], choose: Choose) -> Iterator[Composer]:
    """Return a context with Hydra initialized on the folders of configuration files, the project's being the last."""
    files = {folder: sorted(folder.path.rglob("*.yaml")) for folder in conf_folders(env)}
    folders = [folder.path for folder in files]
    *own, project = folders
    # A file can include any other.
    for path in {
        path for folder in files if folder.owner == "site" for file in files[folder] for path in (file.parent, file)
    }:
        with suppress(OSError):  # Hydra reports it, if it needs the file
            refuse_writable(path)
    # Hydra's own YAML parser has no bound on aliases.
    refuse_bombs(chain.from_iterable(files.values()))
    with hydra.initialize_config_dir(str(project), job_name="hpc_det", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for folder in own:
            loader.get_search_path().prepend(provider="user", path=f"file://{folder}", anchor="main")
        default = _DefaultCluster(choose)
        OmegaConf.register_new_resolver(_DEFAULT_CLUSTER, default.name, replace=True)
        try:
            yield Composer(loader, folders, default)
        finally:
            OmegaConf.clear_resolver(_DEFAULT_CLUSTER)


class _DefaultCluster:
    """Chooses the cluster when Hydra reads its place in config.yaml, which it does only if nothing else names one."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._result: ChosenCluster | UsageError | None = None

    def name(self) -> str:
        try:
            self._result = self._choose()
        except UsageError as error:  # Hydra would word it as an error of its own
            self._result = error
            return LOCAL
        return self._result.name

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise the UsageError of the choice after the block, and instead of an error of the block."""
        self._result = None
        try:
            yield
        finally:
            if isinstance(self._result, UsageError):
                raise self._result from None

    @property
    def chosen(self) -> ChosenCluster | None:
        return None if isinstance(self._result, UsageError) else self._result


@dataclass(frozen=True)
class Composer:
    """An initialized Hydra that composes trees from overrides; every mistake in them is a UsageError."""

    _loader: ConfigLoader
    _folders: Sequence[Path]
    _default: _DefaultCluster

    def compose(self, overrides: Sequence[str]) -> Composed:
        _refuse_own_package(self.parse(overrides), self._folders)
        with self._default.refused(), _usage_errors(overrides):
            composed = hydra.compose("config", [*overrides, _READ_SEARCH_PATH], return_hydra_config=True)
            choices = composed.hydra.runtime.choices
            _refuse_several(choices)
            _refuse_base_60({group: choices[group] for group in _GROUPS if choices.get(group)}, self._folders)
            visible = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
            written = cast(Tree, OmegaConf.to_container(visible, resolve=False, throw_on_missing=True))
        return Composed(
            found=resolved(written),
            template_name=choices.get("template"),
            is_linked=is_linked(written),
            chosen=self._default.chosen,
        )

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        with _usage_errors(overrides):
            parsed = OverridesParser.create(config_loader=self._loader).parse_overrides(list(overrides))
        for group in _ONE_OF:
            if len(named := [str(each.input_line) for each in parsed if each.key_or_group == group]) > 1:
                raise UsageError(f"{group}: {' and '.join(named)} are given; name one")
        return parsed

    def options(self, group: str) -> list[str]:
        """Return the names of the files in a configuration group; an empty list if there is no such group."""
        return self._loader.get_group_options(group, config_name="config", overrides=[_READ_SEARCH_PATH])


def is_linked(tree: object) -> bool:
    """Return whether a tree, before resolution, has an interpolation of other keys."""
    return any("${" in _FIXED.sub("", text) for _path, text in texts(tree))


@contextmanager
def _usage_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into UsageErrors."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _usage_error(error) from None
    except yaml.MarkedYAMLError as error:
        raise UsageError(yaml_problem(error, error.problem_mark.name if error.problem_mark else "conf")) from None
    except (yaml.YAMLError, ValueError) as error:  # a file that is not UTF-8, or an override that fails inside Hydra
        raise UsageError(f"{' '.join(overrides)}: {' '.join(str(error).split())}") from None


def _refuse_several(choices: DictConfig) -> None:
    """Raise UsageError if several templates or clusters are named."""
    # Hydra would merge them by its own rules, not by those of hpc_det.config.merge.
    several = [group for group in _ONE_OF if OmegaConf.is_list(choices.get(group))]
    if several:
        raise UsageError([f"{group}: {list(choices[group])} is a list; name one" for group in several])


def _refuse_base_60(choices: Tree, folders: Sequence[Path]) -> None:
    """Raise UsageError if Hydra read an unquoted time as a number."""
    # YAML 1.1 has base-60 numbers: 1:30:00 is 5400, which a time limit would interpret as minutes.
    problems = [problem for group, name in choices.items() for problem in _misread(group, str(name), folders)]
    if problems:
        raise UsageError(problems)


def _misread(group: str, name: str, folders: Sequence[Path]) -> Iterator[str]:
    for file in _first_file(group, name, folders):
        read = dict(leaves(OmegaConf.to_container(OmegaConf.load(file))))
        for path, value in leaves(load_yaml(file)):
            if isinstance(value, str) and isinstance(read.get(path), int | float):
                yield f"{file}: {path}: Hydra reads {value} as the number {read[path]}; write '{value}' in quotes"


def _refuse_own_package(overrides: Sequence[Override], folders: Sequence[Path]) -> None:
    """Raise UsageError if an experiment file lacks the line `# @package _global_`."""
    # Without that line Hydra puts the keys of the file below the key `experiment`.
    named = [each.value() for each in overrides if each.key_or_group == "experiment" and not each.package]
    names = [name for value in named for name in (value if isinstance(value, list) else [value])]
    found = [file for name in names for file in _first_file("experiment", str(name), folders)]
    misplaced = [file for file in found if not _IN_GLOBAL_PACKAGE.search(file.read_text(errors="replace"))]
    if misplaced:
        raise UsageError([f"{file}: add the first line `# @package _global_`" for file in misplaced])


def _first_file(group: str, name: str, folders: Sequence[Path]) -> list[Path]:
    return [file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()][:1]


def _usage_error(error: Exception) -> UsageError:
    first, *_rest = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return unknown_choice(group, name, error.options)
    if isinstance(error, OverrideParseException):
        if reason := re.search(r" while evaluating .*?': (.+)", str(error)):
            return UsageError(f"{error.override}: {reason[1]}")
        is_file = str(error.override).endswith((".yaml", ".yml"))
        remedy = (
            f"`hpc-det experiment create {error.override}` takes the path of an experiment file"
            if is_file
            else "put a value with spaces or special characters in quotes"
        )
        return UsageError(f"{error.override!r} is not an override: expected KEY=VALUE; {remedy}")
    if match := re.match(r"Could not override '(.+)'", first):
        return UsageError(_not_overridable(match[1]))
    if first.startswith("Ambiguous"):
        return UsageError(f"{first}; write a list as KEY=[a,b], a string as KEY='\"a,b\"'; a sweep needs -m")
    return UsageError(problem_of(error))


def _not_overridable(path: str) -> str:
    *parents, key = path.split(".")
    model: type[Section]
    model, above = (Cluster, tuple(parents[1:])) if parents[:1] == ["cluster"] else (Experiment, tuple(parents))
    known = keys_at(model, above)
    if known is not None and not parents:
        known = [*known, "context_dir", *_GROUPS]
    if known is None:
        return f"{path}: no such key in the composed configuration; to add it, write +{path}=VALUE"
    if key in known:
        return f"{path}: Hydra merges maps; add a new key with +{path}.KEY=VALUE, remove an old one with ~{path}.KEY"
    problem = unknown_key(path, key, known)
    return f"{problem.path}: {problem.what}; {problem.remedy}"
