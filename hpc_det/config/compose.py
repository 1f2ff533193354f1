"""Hydra's part: `conf/config.yaml` and its groups composed into one plain tree. Imported only to run overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hpc_det.config.cluster import Cluster
from hpc_det.config.merge import Tree, leaves
from hpc_det.config.plain_yaml import load_yaml, refuse_bombs, yaml_problem
from hpc_det.config.problems import unknown_key
from hpc_det.config.request import unknown_choice
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, keys_at
from hpc_det.errors import UsageError
from hpc_det.resources import data_path

_GROUPS = ("cluster", "template", "experiment")
_FIXED = re.compile(r"\$\{(?:hpc_det|oc\.env):[^${}]*\}")
"""Interpolations whose value no other key changes."""
_IN_GLOBAL_PACKAGE = re.compile(r"\A\s*#\s*@package\s+_global_\s*$", re.MULTILINE)
# Hydra reads the search path again only if this override is given.
_READ_SEARCH_PATH = "hydra.searchpath=[]"


@dataclass(frozen=True, kw_only=True)
class Composed:
    tree: Tree
    """Interpolations resolved."""
    template_name: str | None
    is_linked: bool
    """Whether some value may follow from other keys, by an interpolation."""


def compose(overrides: Sequence[str], folders: Sequence[Path]) -> Composed:
    """Groups are searched in `folders`, first wins; the last is the project's own, which holds `config.yaml`."""
    with opened(folders) as composer:
        return composer.compose(overrides)


@contextmanager
def opened(folders: Sequence[Path]) -> Iterator[Composer]:
    """Hydra on these folders."""
    OmegaConf.register_new_resolver("hpc_det", lambda name: str(data_path(name)), replace=True)
    *own, project = folders
    refuse_bombs(file for folder in folders for file in sorted(folder.rglob("*.yaml")))
    with hydra.initialize_config_dir(str(project), job_name="hpc_det", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for folder in own:
            loader.get_search_path().prepend(provider="user", path=f"file://{folder}", anchor="main")
        yield Composer(loader, folders)


@dataclass(frozen=True)
class Composer:
    """Trees from overrides; every mistake in them is a UsageError."""

    _loader: ConfigLoader
    _folders: Sequence[Path]

    def compose(self, overrides: Sequence[str]) -> Composed:
        _refuse_own_package(self.parse(overrides), self._folders)
        with _usage_errors(overrides):
            composed = hydra.compose("config", [*overrides, _READ_SEARCH_PATH], return_hydra_config=True)
            choices = composed.hydra.runtime.choices
            _refuse_several(choices)
            _refuse_base_60({group: choices[group] for group in _GROUPS if choices.get(group)}, self._folders)
            visible = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
            written = OmegaConf.to_container(visible, resolve=False)
            with bounded(sum("${" in text for text in texts(written))):
                tree = OmegaConf.to_container(visible, resolve=True, throw_on_missing=True)
            return Composed(tree=cast(Tree, tree), template_name=choices.get("template"), is_linked=is_linked(written))

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        with _usage_errors(overrides):
            return OverridesParser.create(config_loader=self._loader).parse_overrides(list(overrides))

    def options(self, group: str) -> list[str]:
        """The files of a group of configuration files; none if it is no group."""
        return self._loader.get_group_options(group, config_name="config", overrides=[_READ_SEARCH_PATH])


def is_linked(tree: object) -> bool:
    """Whether a tree, as it is written, has an interpolation of other keys."""
    return any("${" in _FIXED.sub("", text) for text in texts(tree))


def texts(tree: object) -> Iterator[str]:
    """Every value that is a text."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(value)


@contextmanager
def _usage_errors(overrides: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _usage_error(error) from None
    except yaml.MarkedYAMLError as error:
        raise UsageError(yaml_problem(error, error.problem_mark.name if error.problem_mark else "conf")) from None
    except (yaml.YAMLError, ValueError) as error:  # a file that is no text; some overrides fail inside Hydra
        raise UsageError(f"{' '.join(overrides)}: {' '.join(str(error).split())}") from None


def _refuse_several(choices: DictConfig) -> None:
    """Hydra would merge several templates or clusters by its own rules."""
    several = [group for group in ("cluster", "template") if OmegaConf.is_list(choices.get(group))]
    if several:
        raise UsageError([f"{group}: {list(choices[group])} is a list; name one" for group in several])


def _refuse_base_60(choices: Tree, folders: Sequence[Path]) -> None:
    """Hydra reads an unquoted 1:30:00 as the number 5400, which a time limit would take for minutes."""
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
    """Hydra would put what such a file sets below the key `experiment`."""
    named = [each.value() for each in overrides if each.key_or_group == "experiment" and not each.package]
    names = [name for value in named for name in (value if isinstance(value, list) else [value])]
    found = [file for name in names for file in _first_file("experiment", str(name), folders)]
    misplaced = [file for file in found if not _IN_GLOBAL_PACKAGE.search(file.read_text(errors="replace"))]
    if misplaced:
        raise UsageError([f"{file}: give it the first line `# @package _global_`" for file in misplaced])


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
        return UsageError(f"{error.override!r} is no override: expected KEY=VALUE; text with blanks or signs in quotes")
    if match := re.match(r"Could not override '(.+)'", first):
        return UsageError(_not_overridable(match[1]))
    if first.startswith("Ambiguous"):
        return UsageError(f"{first}; a list is KEY=[a,b], a text is KEY='\"a,b\"', a sweep needs -m")
    if error.__cause__ is not None:
        first += f": {str(error.__cause__).splitlines()[0]}"
    full_key = getattr(error, "full_key", None)
    return UsageError(f"{full_key}: {first}" if full_key else first)


def _not_overridable(path: str) -> str:
    *parents, key = path.split(".")
    model: type[Section]
    model, above = (Cluster, tuple(parents[1:])) if parents[:1] == ["cluster"] else (Experiment, tuple(parents))
    known = keys_at(model, above)
    if known is not None and not parents:
        known = [*known, "context_dir", *_GROUPS]
    if known is None:
        return f"{path}: no such key in what the files compose; to add it write +{path}=VALUE"
    if key in known:
        return f"{path}: Hydra merges maps; add the new key with +{path}.KEY=VALUE and remove the old with ~{path}.KEY"
    problem = unknown_key(path, key, known)
    return f"{problem.path}: {problem.what}; {problem.remedy}"


# --- a bound on interpolations: sixty lines of `"${above}${above}"` expand to 2^60 characters, and OmegaConf takes as
# many steps to resolve them

MOST_REPEATED = 5_000
"""Resolved interpolations beyond those that are written."""
_CHARS = 1000
"""So many characters of a resolved text count as one more interpolation."""
_only_one = Lock()
"""Threads that compose would put each other's counters in the class."""


class TooManyRepeated(InterpolationResolutionError):
    """OmegaConf adds the key at which it is."""


@contextmanager
def bounded(written: int) -> Iterator[None]:
    """Within, OmegaConf raises TooManyRepeated instead of a very large tree. `written`: interpolations in the files.

    All ways in which OmegaConf resolves one, also nested ones and those of resolvers, go through resolve_parse_tree.
    """
    left = written + MOST_REPEATED

    def counted(self: Container, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        _check(left)
        resolved = resolve(self, *args, **kwargs)
        left -= len(resolved) // _CHARS if isinstance(resolved, str) else 0
        _check(left)
        return resolved

    with _only_one:
        resolve = Container.resolve_parse_tree
        Container.resolve_parse_tree = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _check(left: int) -> None:
    if left < 0:
        raise TooManyRepeated(
            f"interpolations (such as ${{name}}) repeat more than {MOST_REPEATED} values up to here; write the "
            f"values out, or move them to a file that the trial reads"
        )
