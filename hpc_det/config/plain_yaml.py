"""Reading and writing YAML as plain data: stricter than YAML 1.1, bounded in size, with the line of each mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from hpc_det.config.merge import Tree, join
from hpc_det.errors import UsageError, closest, some

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """A loader that refuses duplicate keys and reads numbers by the rules of YAML 1.2.

    In YAML 1.1 `1e-3` is a string, `12:30:00` the number 45000 and `010` the number 8.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        check_aliases(node)  # before the nodes become objects, which write each alias out
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[tuple[str, str], int] = {}
        for key, _value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first_line := first_lines.get((key.tag, key.value)):
                raise ComposerError(
                    None, None, f"duplicate key {key.value!r}, first on line {first_line}; keep one", key.start_mark
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
    """A dumper that quotes every string which YAML 1.1 or 1.2 would read as another type, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return the scalar of a string, in double quotes if it has line ends that YAML would normalize."""
    style = '"' if _LINE_ENDS.search(text) else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_LINE_ENDS = re.compile("[\r\x85\u2028\u2029\ufeff]")
_Dumper.add_representer(str, _represented)


def dump_yaml(tree: Tree | None) -> str:
    """Return the tree as YAML, which `load_yaml` reads back as an equal tree; an empty tree is ""."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120) if tree else ""


def parse_yaml(text: str, where: str) -> Any:
    """Return the data in `text`. Raises UsageError, with `where` and the line, if it is not YAML with JSON's types."""
    try:
        data = yaml.load(text, Loader=_Loader)
        json.dumps(data)  # refuses cycles, binaries and sets, which would otherwise fail after the submission
    except yaml.MarkedYAMLError as error:
        raise UsageError(yaml_problem(error, where)) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: not plain YAML data: {str(error).splitlines()[0]}") from None
    return data


def yaml_problem(error: yaml.MarkedYAMLError, where: str) -> str:
    """Return the message of a parser's error, with `where` and the line."""
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    problem = error.problem or "not YAML"
    return f"{where}{line}: {next((text for pattern, text in _IN_WORDS if re.search(pattern, problem)), problem)}"


# The parser's errors for the usual mistakes, which it describes in terms of its tokens.
_IN_WORDS = (
    (r"^found character '\\t'", "a tab; indent with spaces, since YAML allows no tab there"),
    (
        "^mapping values are not allowed here",
        "a `key: value` where none can be: give a key the same indent as its neighbours, put a blank after each colon, "
        "and quote a value that contains a colon and a blank",
    ),
    (
        "^expected <block end>",
        "the indent of this line matches no line above; give the keys of one map the same indent, in spaces",
    ),
    (
        "^could not find expected ':'",
        "no colon after the key; write `key: value`, with the same indent as its neighbours",
    ),
    (
        r"^expected ',' or '[\]}]', but got '<",
        "a bracket is not closed; end a list [...] with ] and a map {...} with }",
    ),
)


def key_lines(text: str) -> dict[str, int]:
    """Return the line of each key of the map in `text`, by its dotted path; empty if `text` is not YAML."""
    try:
        return dict(_key_lines(yaml.compose(text, Loader=_Loader), ""))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return {}


def _key_lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            yield join(path, key.value), key.start_mark.line + 1
            yield from _key_lines(value, join(path, key.value))


def load_yaml(path: Path) -> Tree:
    """Return the map in the file `path`; an empty file is an empty map. Raises UsageError."""
    return parse_map(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; {_instead_of(path)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; expected a file such as {path / 'experiment.yaml'}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from None


def _instead_of(missing: Path) -> str:
    """Return what may have been meant by a file that does not exist: a similar name, or the names that there are."""
    try:
        folder = missing.absolute().parent
        if not folder.is_dir():
            return f"there is no folder {folder}"
        files = {file.stem: file.name for file in sorted(folder.iterdir()) if file.suffix in (".yaml", ".yml")}
    except OSError:  # the folder may not be read, or the current directory has been deleted
        return "give the path of an experiment file"
    if close := closest(missing.stem, files):
        return f"did you mean {files[close]!r}?"
    return f"{folder} contains {some([*files.values()]) or 'no .yaml file'}"


def parse_map(text: str, where: str) -> Tree:
    """Return the map in `text`, as parse_yaml. Raises UsageError if it contains anything but a map or nothing."""
    data = parse_yaml(text, where)
    if data is None:
        return {}
    if not isinstance(data, dict):
        kind = {str: "text"}.get(type(data), f"a {type(data).__name__}")
        raise UsageError(f"{where}: contains {kind}; expected a map of settings such as `name: digits`")
    return data


# --- a bound on what aliases repeat: ten lines of `[*a, *a, ...]` can stand for a billion values

MOST_REPEATED = 100_000
"""Largest number of values that aliases may add to those that are written."""
_CHARS = 100
"""Number of characters of a string that count as one more value."""


class TooManyRepeated(ComposerError):
    """The document would be too large with all aliases written out."""


def check_aliases(root: yaml.Node | None) -> None:
    """Raise TooManyRepeated, with the line, if the aliases below `root` repeat too many values."""
    if root is not None:
        _Sizes().expanded(root)


def refuse_bombs(files: Iterable[Path]) -> None:
    """Raise UsageError, with file and line, if aliases in one of the files repeat too many values.

    For files that another parser reads afterwards. Files with other mistakes are passed over: that parser reports them.
    """
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
    """The sizes of YAML nodes with aliases written out, as numbers of values."""

    def __init__(self) -> None:
        self._expanded: dict[int, int] = {}
        """Size of each node, by its id()."""
        self._written = 0
        """Number of values in the text so far, without those that aliases repeat."""

    def expanded(self, node: yaml.Node) -> int:
        """Return the size of `node`. Raises TooManyRepeated."""
        if id(node) in self._expanded:
            return self._expanded[id(node)]
        self._expanded[id(node)] = 0  # ends the recursion for a node that contains itself, which parse_yaml refuses
        own = 1 + len(node.value) // _CHARS if isinstance(node, yaml.ScalarNode) else 1
        self._written += own
        size = own + sum(map(self.expanded, _children(node)))
        if size - self._written > MOST_REPEATED:
            raise TooManyRepeated(
                None,
                None,
                f"aliases (such as *name) repeat more than {MOST_REPEATED} values up to here; write the values out, "
                f"or put them into a file that the trial reads",
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
