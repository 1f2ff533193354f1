"""docs/reference/features.md names modules and tests that exist, and omits no public name and no command."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.docs.cli_page import entries
from tests.docs.test_promises import CHECKOUT, names_in

PUBLIC = ("hpc_det/pytorch", "hpc_det/pytorch/deepspeed", "hpc_det/core", "hpc_det/sgd", "hpc_det/client")
ROW = re.compile(r"\| (?P<text>.+) \| `(?P<module>[\w/.]+)` \| `(?P<test_file>[\w/.]+)::(?P<test>\w+)` \|")


class Feature(NamedTuple):
    text: str
    module: str
    test_file: str
    test: str


def features() -> list[Feature]:
    """Return the rows of all tables. A row that does not have this form is an error."""
    page = (CHECKOUT / "docs" / "reference" / "features.md").read_text()
    rows = re.findall(r"(?m)^\| (?!Feature |---).*$", page)
    found = [ROW.fullmatch(row) for row in rows]
    assert all(found), rows[found.index(None)]
    return [Feature(**match.groupdict()) for match in found if match]


def unnamed(names: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Return the names that are in no code span of these texts."""
    spans = [span for text in texts for span in re.findall(r"`([^`]+)`", text)]
    words = {word for span in spans for word in (span, *re.findall(r"\w+", span))}
    return [name for name in names if name not in words]


def public_names(package: str) -> list[str]:
    """Return `__all__` of a package, parsed instead of imported: importing DeepSpeed takes seconds."""
    tree = ast.parse((CHECKOUT / package / "__init__.py").read_text())
    (names,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(ast.literal_eval(names))


@pytest.mark.integration
def test_the_module_and_the_test_of_each_feature_exist() -> None:
    found = features()
    assert [each.module for each in found if not (CHECKOUT / each.module).is_file()] == []
    tests = {file: names_in(CHECKOUT / file) for file in {each.test_file for each in found}}
    assert [each for each in found if each.test not in tests[each.test_file]] == []


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_a_feature(package: str) -> None:
    assert unnamed(public_names(package), (feature.text for feature in features())) == []


def test_every_command_is_a_feature() -> None:
    assert unnamed((entry.name for entry in entries()), (feature.text for feature in features())) == []


def test_a_name_that_the_page_lacks_is_found() -> None:
    assert unnamed(["Trial", "hpc-det job"], ["`Trainer`, `hpc-det job list`", "Trial"]) == ["Trial", "hpc-det job"]
