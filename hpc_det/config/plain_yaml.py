"""YAML as plain data: strict where YAML 1.1 surprises, bounded in size, and every mistake with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from hpc_det.config.merge import Tree
from hpc_det.errors import UsageError

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, and reads numbers as YAML 1.2 does.

    In YAML 1.1 `1e-3` is a string, `12:30:00` the number 45000 and `010` the number 8.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        check_aliases(node)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[tuple[str, str], int] = {}
        for key, _value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first_line := first_lines.get((key.tag, key.value)):
                raise ComposerError(
                    None, None, f"duplicate key {key.value!r}, first on line {first_line}", key.start_mark
                )
            first_lines[key.tag, key.value] = key.start_mark.line + 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag[len(_TAG) :] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _TAG + "int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would take for something else, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """In double quotes, and escaped, where a plain text would be read with other line ends than it has."""
    style = '"' if _LINE_ENDS.search(text) else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_LINE_ENDS = re.compile("[\r\x85\u2028\u2029\ufeff]")
_Dumper.add_representer(str, _represented)


def dump_yaml(tree: Tree | None) -> str:
    """The tree as YAML, from which `load_yaml` reads the same."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120) if tree else ""


def parse_yaml(text: str, where: str) -> Any:
    """The data in `text`; UsageError with `where` and the line if it is not YAML, or not what JSON can hold."""
    try:
        data = yaml.load(text, Loader=_Loader)
        json.dumps(data)  # a cycle, a binary or a set would fail much later
    except yaml.MarkedYAMLError as error:
        raise UsageError(yaml_problem(error, where)) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: not plain YAML data: {str(error).splitlines()[0]}") from None
    return data


def yaml_problem(error: yaml.MarkedYAMLError, where: str) -> str:
    """What the parser says, with `where` and the line."""
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{where}{line}: {error.problem or 'not YAML'}"


def load_yaml(path: Path) -> Tree:
    """The map in the file `path`; an empty file is an empty map."""
    return parse_map(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The file's text; UsageError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from None


def parse_map(text: str, where: str) -> Tree:
    """As parse_yaml; UsageError for anything but a map or nothing."""
    data = parse_yaml(text, where)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{where}: holds a {type(data).__name__}, expected a map of settings such as `name: digits`")
    return data


# --- a bound on what aliases repeat: ten lines of `[*a, *a, ...]` can stand for a billion values

MOST_REPEATED = 100_000
"""Values that aliases may add to those that are written."""
_CHARS = 100
"""Of a text that count as one more value."""


class TooManyRepeated(ComposerError):
    """The document would be too large with each alias written out."""


def check_aliases(root: yaml.Node | None) -> None:
    """Raises TooManyRepeated with the line where it is."""
    if root is not None:
        _Sizes().expanded(root)


def refuse_bombs(files: Iterable[Path]) -> None:
    """Before another parser reads them, which finds other mistakes. Raises UsageError with file and line."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if "&" in text and "*" in text:
                check_aliases(yaml.compose(text, Loader=yaml.SafeLoader))
        except TooManyRepeated as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise UsageError(f"{file}{line}: {error.problem}") from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue


class _Sizes:
    def __init__(self) -> None:
        self._expanded: dict[int, int] = {}
        """By id() of a node, with its aliases written out."""
        self._written = 0

    def expanded(self, node: yaml.Node) -> int:
        if id(node) in self._expanded:
            return self._expanded[id(node)]
        self._expanded[id(node)] = 0  # for a node that contains itself, which is an error of its own
        own = 1 + len(node.value) // _CHARS if isinstance(node, yaml.ScalarNode) else 1
        self._written += own
        size = own + sum(map(self.expanded, _children(node)))
        if size - self._written > MOST_REPEATED:
            raise TooManyRepeated(
                None,
                None,
                f"aliases (such as *name) repeat more than {MOST_REPEATED} values up to here; write out what is meant, "
                f"or keep the values in a file of their own that the trial reads",
                node.start_mark,
            )
        self._expanded[id(node)] = size
        return size


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return []
