"""The available templates with their owners, and changes of the user's own ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hpc_det.config.checks import searcher_name, space_problems, text_problems
from hpc_det.config.conf_files import Owner, group_files, unknown_choice
from hpc_det.config.determined_keys import in_todays_names
from hpc_det.config.interpolation import texts
from hpc_det.config.merge import Tree
from hpc_det.config.plain_yaml import load_yaml, parse_map, read_text
from hpc_det.config.problems import render, schema_problems
from hpc_det.config.schema import Experiment
from hpc_det.errors import MISSING, Problem, UsageError
from hpc_det.node.files import write_atomic
from hpc_det.store.experiments import state_root

GROUP = "template"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_HYDRAS_VALUES = ("null", "true", "false", "inf", "nan")


@dataclass(frozen=True, kw_only=True)
class Template:
    """The file of a template's name, and the files of the same name that it hides."""

    name: str
    owner: Owner
    file: Path
    hides: tuple[tuple[Owner, Path], ...]

    def tree(self) -> Tree:
        """Return its content. Raises UsageError if that is not YAML."""
        return load_yaml(self.file)


def templates(env: Mapping[str, str]) -> list[Template]:
    """Return all templates by name: the user's, the site's and the project's."""
    return [
        Template(name=name, owner=files[0][0], file=files[0][1], hides=tuple(files[1:]))
        for name, files in sorted(group_files(GROUP, env).items())
    ]


def template(name: str, env: Mapping[str, str]) -> Template:
    """Return the template of this name. Raises UsageError that names the known ones."""
    found = {each.name: each for each in templates(env)}
    if name not in found:
        raise unknown_choice(GROUP, name, found)
    return found[name]


def set_template(name: str, file: Path, env: Mapping[str, str]) -> bool:
    """Store `file` as the user's template `name`, and return whether it replaced one.

    Raises UsageError with every problem of the name and of the file; then nothing is changed.
    """
    text = read_text(file)
    wrong = problems_of(parse_map(text, str(file))) + _header(text)
    problems = [*_name_problems(name, env), *(f"{file}: {line}" for line in wrong)]
    if problems:
        raise UsageError(problems)
    stored = _own_file(name, env)
    known = stored.exists()
    stored.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(stored, text)
    return known


def remove_template(name: str, env: Mapping[str, str]) -> tuple[Owner, Path] | None:
    """Remove the user's template, and return the file that it hid, which now has the name. Experiments keep their
    settings.
    """
    found = template(name, env)
    if found.owner != "user":
        raise UsageError(_not_yours(found, "remove"))
    found.file.unlink()
    return next(iter(found.hides), None)


def problems_of(tree: Tree) -> list[str]:
    """Return the problems of a template alone: its values must be valid, but keys may be missing."""
    own = in_todays_names({key: value for key, value in tree.items() if key != GROUP})
    problems: list[Problem] = []
    if GROUP in tree:
        what = f"names the template {tree[GROUP]!r}"
        problems.append(Problem(GROUP, what, "a template uses no other; copy what it needs"))
    try:
        Experiment.model_validate(own)
    except ValidationError as error:
        # Maps merge with the experiment's; an element of a list stays as it is.
        problems += (
            found for found in schema_problems(Experiment, error) if found.what != MISSING or "[" in found.path
        )
        # The value of an interpolation is known with the experiment.
        linked = {path.partition("[")[0] for path, text in texts(own) if "${" in text}
        problems = [found for found in problems if found.path.partition("[")[0] not in linked]
    problems += text_problems(own)
    # Where the experiment will name the searcher, a range to search is as good as a constant.
    problems += space_problems(own.get("hyperparameters"), searcher_name(own) or "")
    return render(problems, lambda path: None)


def _header(text: str) -> list[str]:
    """Return a problem for Hydra's header, with which Hydra would place the settings elsewhere, unlike --template."""
    if re.match(r"\s*#\s*@package\b", text):
        return ["`# @package` is for experiments; leave it out of a template"]
    return []


def _name_problems(name: str, env: Mapping[str, str]) -> list[str]:
    if not _NAME.fullmatch(name) or name.lower() in _HYDRAS_VALUES:
        return [
            f"template {name!r}: no name for a template; give a letter, then letters, digits, _ and -, at most 64, "
            f"and none of {', '.join(_HYDRAS_VALUES)}"
        ]
    return [_not_yours(found, "set") for found in templates(env) if found.name == name and found.owner != "user"]


def _not_yours(found: Template, verb: str) -> str:
    owner = {"site": "the site", "hpc_det": "hpc_det"}[found.owner]
    remedy = "give yours another name" if verb == "set" else "only your own can be removed"
    return f"template {found.name!r}: belongs to {owner} ({found.file}); {remedy}"


def _own_file(name: str, env: Mapping[str, str]) -> Path:
    return state_root(env) / "conf" / GROUP / f"{name}.yaml"
