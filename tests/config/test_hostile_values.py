"""Any value of a YAML file arrives unchanged or is refused; it never becomes another value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpc_det.config.request import from_file
from hpc_det.errors import UsageError
from hpc_det.plan.effective import effective
from tests.config.conftest import CONFIG
from tests.submit.hostile import VALUES

pytestmark = pytest.mark.integration

ODDITIES = [
    *VALUES,
    *("yes", "no", "on", "off", "~", "null", "True", "1e3", "0x1f", "010", "12:30:00", "2020-01-01", ".inf", ".nan"),
    *(
        "- a",
        "a: b",
        "[a]",
        "{a: b}",
        "&a",
        "*a",
        "!!python/object:os.system x",
        "<<",
        "=",
        "? a",
        "%TAG",
        "@a",
        "|",
        ">",
    ),
    *(
        "'",
        '"',
        "''",
        '"\\n"',
        " a",
        "a ",
        "#",
        "a #b",
        "${X}",
        "???",
        "${X:-a}",
        "a\nb",
        "\ta",
        "\x1b[0m",
        "$x",
        "$(x)",
    ),
    *(
        "0E0",
        "1_000",
        "\x85",
        "\N{NO-BREAK SPACE}",
        "\N{LINE SEPARATOR}",
        "\ufeff",
        "e\u0301",
        "\U0001f600",
        "\x00",
        "",
    ),
]
# Texts such as "${oc.env:HOME}" are not data: tests/config/test_interpolation.py.
TEXTS = (
    st.text(max_size=12).filter(lambda text: "${" not in text)
    | st.sampled_from(ODDITIES)
    | st.lists(st.sampled_from(ODDITIES), max_size=3).map("".join)
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES_OF_DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SETTINGS = settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def tagged(tree: dict[str, Any]) -> str:
    """Return YAML with every value in double quotes, numbers with a tag."""
    return yaml.safe_dump(tree, default_style='"')


def as_json(tree: dict[str, Any]) -> str:
    """Return the common subset of JSON and YAML, with YAML escapes for characters that YAML files may not contain."""
    text = json.dumps(tree, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08X}", text)


WRITERS = st.sampled_from([tagged, as_json])


def arrived(file: Path, code: Path, env: dict[str, str], text: str) -> dict[str, Any] | None:
    """Return the effective tree of a file with this text, or None if it was refused."""
    file.write_text(text, encoding="ascii")
    try:
        return effective(from_file(file, code, [], None, None, env)).tree
    except UsageError:
        return None


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal, including types: 1 is not True."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(value=VALUES_OF_DATA, writer=WRITERS)
@example(value={"on": "yes", "~": 1e3, "0E0": "12:30:00"}, writer=as_json)
@SETTINGS
def test_what_is_the_users_own_arrives_as_it_is(
    value: Any, writer: Callable[[Any], str], tmp_path: Path, code: Path, env: dict[str, str]
) -> None:
    file = writer({**CONFIG, "data": {"value": value}, "hyperparameters": {"value": [value]}})
    tree = arrived(tmp_path / "x.yaml", code, env, file)
    if tree is not None:
        assert same(tree["data"], {"value": value})
        assert same(tree["hyperparameters"], {"value": [value]})


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("name", lambda text: {"name": text}),
        ("description", lambda text: {"description": text}),
        ("labels", lambda text: {"labels": [text]}),
        ("environment", lambda text: {"environment": {"environment_variables": [f"A={text}"]}}),
        ("resources", lambda text: {"resources": {"resource_pool": text or None}}),
    ],
)
@given(text=TEXTS, writer=WRITERS)
@SETTINGS
def test_a_text_of_ours_arrives_as_it_is_or_is_refused(
    path: str,
    change: Callable[[str], dict[str, Any]],
    text: str,
    writer: Callable[[Any], str],
    tmp_path: Path,
    code: Path,
    env: dict[str, str],
) -> None:
    changes = change(text)
    tree = arrived(tmp_path / "x.yaml", code, env, writer({**CONFIG, **changes}))
    if tree is None:
        assert not text.strip() or not text.isprintable()
        return
    for key, value in changes[path].items() if isinstance(changes[path], dict) else [(None, changes[path])]:
        assert same(tree[path] if key is None else tree[path][key], value)


@pytest.mark.parametrize("text", [value for value in VALUES if value.isprintable()])
def test_printable_hostile_values_are_taken(text: str, tmp_path: Path, code: Path, env: dict[str, str]) -> None:
    tree = arrived(tmp_path / "x.yaml", code, env, tagged({**CONFIG, "name": text, "data": {text: text}}))
    assert tree is not None
    assert (tree["name"], tree["data"]) == (text, {text: text})
