from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.config.plain_yaml import dump_yaml, load_yaml, parse_yaml
from hpc_det.errors import UsageError
from tests.facts import golden, refused, unnamed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5", 1.5),
        ("-2", -2),
        ("1_000", 1000),
        ("0x10", 16),
        ("12:30:00", "12:30:00"),
        ("010", "010"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("", None),
        ("[1, a]", [1, "a"]),
    ],
)
def test_numbers_are_what_they_look_like(text: str, value: Any) -> None:
    assert parse_yaml(text, "here") == value


MISTAKES: list[tuple[str, list[object]]] = [
    ("a: 1\nb: 2\na: 3", ["file.yaml:3", "'a'", 1]),
    ("x:\n  {a: 1, a: 2}", ["file.yaml:2", "'a'", 2]),
    ("a: [1\nb: 2", ["file.yaml:2", "','", "']'", "':'"]),
    ("- a", ["file.yaml", "name: digits"]),
    ("a: !!binary aGk=", ["file.yaml", "YAML", "JSON"]),
    ("a: &x [*x]", ["file.yaml", "YAML"]),
    ("a: !!python/name:os.system", ["file.yaml:1"]),
    ("a: \0", ["file.yaml", "YAML"]),
]


@pytest.mark.parametrize(
    ("text", "facts"),
    MISTAKES,
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, facts: list[object]) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        load_yaml(file)
    assert not unnamed(str(error.value).removeprefix(f"{tmp_path}/"), *facts)


def test_the_words_for_a_mistake(tmp_path: Path) -> None:
    said, file = [], tmp_path / "file.yaml"
    for text, _ in MISTAKES:
        file.write_text(text)
        with pytest.raises(UsageError) as error:
            load_yaml(file)
        said += [problem.removeprefix(f"{tmp_path}/") for problem in error.value.problems]
    assert said == golden(__file__, "yaml.txt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(UsageError, "none.yaml"):
        load_yaml(tmp_path / "none.yaml")


def test_an_empty_file_is_an_empty_map(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert load_yaml(tmp_path / "empty.yaml") == {}


def test_a_merge_key_may_be_overridden() -> None:
    assert parse_yaml("base: &b {x: 1, y: 2}\nown: {<<: *b, x: 3}", "here")["own"] == {"x": 3, "y": 2}


ODD = (
    *("0E0", "1e-3", "0x1F", "1_000", "010", "-.Inf", "5.", "12:30:00", "2020-01-01", "~", "null", "Yes", "off", "y"),
    *("=", "<<", "- a", "a: b", "#c", "!t", "&a", "*a", "%", "@", "'", '"', " x ", "\t", "\r\n", "a\n\n b\n"),
    *("\x85", "a\x85b", "\u2028", "\u2029", "\ufeff", "\0", "\x7f"),
)
TEXTS = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8
)


@pytest.mark.integration
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_written_is_read_back(tree: dict[str, Any]) -> None:
    assert (parse_yaml(dump_yaml(tree), "here") or {}) == tree


# --- aliases


def bomb(levels: int) -> str:
    """Return YAML of `levels` + 1 lines that stands for ten to the power of `levels` values."""
    repeated = [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(levels)]
    return "\n".join(["a0: &a0 [x]", *repeated])


MERGED = "a: &a {k: [1, 2]}\n" + "\n".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{former}'] * 10)}], {name}: 1}}"
    for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)
LONG = f"a: &a '{'x' * 100_000}'\nb: [{', '.join(['*a'] * 1000)}]"


@pytest.mark.parametrize("text", [bomb(9), bomb(20), MERGED, LONG])
def test_aliases_that_repeat_too_much_are_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match=r"conf\.yaml:\d+: .*100000"):
        parse_yaml(text, "conf.yaml")


def test_aliases_are_otherwise_what_they_stand_for() -> None:
    assert parse_yaml(bomb(2), "conf.yaml")["a2"] == [[["x"]] * 10] * 10


@pytest.mark.long
def test_without_aliases_a_file_may_be_as_long_as_it_likes() -> None:
    many = "[" + ", ".join(["1"] * 100_001) + "]"
    assert len(parse_yaml(many, "conf.yaml")) == 100_001


def test_a_missing_file_is_named_although_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with refused(UsageError, "tiny.yaml"):
        load_yaml(Path("tiny.yaml"))
