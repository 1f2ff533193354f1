from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.config.secrets import MASK, masked
from hpc_det.plan.effective import Effective
from tests.facts import golden, unnamed

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]
HOOK = "https://hooks.example.org/T0/B0/secret"


def test_a_hook_hears_of_ends_by_default(build: Build) -> None:
    found = build(notify=[{"command": ["./tell.sh", "--loud"]}, {"mail": "ada", "states": ["RUNNING"]}])
    assert found.tree["notify"] == [
        {
            "command": ["./tell.sh", "--loud"],
            "webhook": None,
            "mail": None,
            "states": ["COMPLETED", "ERROR", "CANCELED"],
        },
        {"command": None, "webhook": None, "mail": "ada", "states": ["RUNNING"]},
    ]


def test_hooks_of_the_template_come_first(build: Build) -> None:
    found = build(template={"notify": [{"mail": "site@example.org"}]}, notify=[{"mail": "ada@example.org"}])
    assert [hook["mail"] for hook in found.tree["notify"]] == ["site@example.org", "ada@example.org"]


@pytest.mark.parametrize(
    "hook",
    [
        {"mail": "ada+x@mail.example.org"},
        {"mail": "root"},
        {"webhook": "http://10.0.0.1:8080/a?b=c"},
        {"webhook": "https://[::1]/a"},
        {"command": ["sh", "-c", "echo '$(x)'; true"], "states": ["PAUSED"]},
    ],
)
def test_what_there_may_be(build: Build, hook: dict[str, Any]) -> None:
    assert len(build(notify=[hook]).tree["notify"]) == 1


WRONG_HOOKS: list[tuple[dict[str, Any], list[object]]] = [
    ({}, ["notify[0]", "command", "webhook", "mail"]),
    ({"mail": "ada", "webhook": HOOK}, ["notify[0]"]),
    ({"command": "mail ada"}, ["notify[0].command", "'mail ada'"]),
    ({"command": []}, ["notify[0].command", "[]"]),
    ({"mail": "ada@example.org, eve@example.org"}, ["notify[0].mail", "'ada@example.org, eve@example.org'"]),
    ({"mail": "ada@example.org\nBcc: eve"}, ["notify[0].mail", "'ada@example.org\\nBcc: eve'"]),
    ({"mail": "ada@example.org\n"}, ["notify[0].mail", "'ada@example.org\\n'"]),
    ({"mail": "-oQ/tmp ada"}, ["notify[0].mail", "'-oQ/tmp ada'"]),
    ({"command": ["a\nb"]}, ["notify[0].command[0]", "U+000A"]),
    (
        {"mail": "ada", "states": ["DONE"]},
        ["notify[0].states[0]", "'DONE'", "RUNNING", "PAUSED"],
    ),
    ({"mail": "ada", "states": []}, ["notify[0].states", "[]", "RUNNING"]),
    ({"mial": "ada"}, ["notify[0].mial", "'mial'", "'mail'"]),
]


@pytest.mark.parametrize(
    ("hook", "facts"),
    WRONG_HOOKS,
)
def test_what_there_may_not_be(problems: Problems, hook: dict[str, Any], facts: list[object]) -> None:
    assert any(not unnamed(line, *facts) for line in problems(notify=[hook])), problems(notify=[hook])


WRONG_ADDRESSES: list[tuple[str, list[object]]] = [
    ("ftp://hooks.example.org/secret", []),
    ("file:///secret", []),
    ("hooks.example.org/secret", []),
    ("https:///secret", []),
    ("https://ada:secret@example.org/", []),
    ("https://example.org:secret/", []),
    ("https://example.org/a secret", []),
    ("https://example.org/größe-secret", []),
]


@pytest.mark.parametrize(
    ("url", "facts"),
    WRONG_ADDRESSES,
)
def test_an_address_that_is_none_is_told_without_it(problems: Problems, url: str, facts: list[object]) -> None:
    (line,) = problems(notify=[{"webhook": url}])
    assert not unnamed(line, "notify[0].webhook", *facts)
    assert "secret" not in line


def test_the_words_for_a_wrong_hook(problems: Problems) -> None:
    hooks = [*(hook for hook, _ in WRONG_HOOKS), *({"webhook": url} for url, _ in WRONG_ADDRESSES)]
    assert [problem for hook in hooks for problem in problems(notify=[hook])] == golden(__file__, "notify.txt")


def test_the_address_of_a_webhook_is_shown_nowhere(build: Build) -> None:
    tree = build(notify=[{"webhook": HOOK}, {"mail": "ada"}]).tree
    shown = masked(tree)
    assert [hook["webhook"] for hook in shown["notify"]] == [MASK, None]
    assert tree["notify"][0]["webhook"] == HOOK, "the jobs need it"


@pytest.mark.parametrize("written", [HOOK, [HOOK], {"webhook": HOOK}, [{"webhook": [HOOK]}]])
def test_what_is_written_wrongly_shows_no_address(written: object) -> None:
    assert "secret" not in json.dumps(masked({"notify": written}))
