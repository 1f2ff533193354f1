from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.config.secrets import MASK, masked
from hpc_det.plan.effective import Effective

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


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ({}, "notify[0]: nobody is named (from config); give one of command, webhook, mail; a list may have several"),
        ({"mail": "ada", "webhook": HOOK}, "notify[0]: webhook and mail are given together (from config); give one of"),
        ({"command": "mail ada"}, "notify[0].command: got 'mail ada' (from config); expected a list of words"),
        ({"command": []}, "notify[0].command: got [] (from config); expected a list of words"),
        ({"mail": "ada@example.org, eve@example.org"}, "notify[0].mail: got 'ada@example.org, eve@example.org'"),
        ({"mail": "ada@example.org\nBcc: eve"}, "notify[0].mail: got 'ada@example.org\\nBcc: eve'"),
        ({"mail": "ada@example.org\n"}, "notify[0].mail: got 'ada@example.org\\n'"),
        ({"mail": "-oQ/tmp ada"}, "notify[0].mail: got '-oQ/tmp ada'"),
        ({"command": ["a\nb"]}, "notify[0].command[0]: control character U+000A"),
        (
            {"mail": "ada", "states": ["DONE"]},
            "notify[0].states[0]: got 'DONE'; expected a list of RUNNING, PAUSED",
        ),
        ({"mail": "ada", "states": []}, "notify[0].states: got [] (from config); expected a list of RUNNING"),
        ({"mial": "ada"}, "notify[0].mial: unknown key 'mial' (from config); did you mean 'mail'?"),
    ],
)
def test_what_there_may_not_be(problems: Problems, hook: dict[str, Any], problem: str) -> None:
    assert any(line.startswith(problem) for line in problems(notify=[hook])), problems(notify=[hook])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://hooks.example.org/secret", "is no address of http or https"),
        ("file:///secret", "is no address of http or https"),
        ("hooks.example.org/secret", "is no address of http or https"),
        ("https:///secret", "names no host"),
        ("https://ada:secret@example.org/", "holds a name or password before its host"),
        ("https://example.org:secret/", "has a host or a port that is none"),
        ("https://example.org/a secret", "holds blanks or characters that an address has to escape"),
        ("https://example.org/größe-secret", "holds blanks or characters that an address has to escape"),
    ],
)
def test_an_address_that_is_none_is_told_without_it(problems: Problems, url: str, problem: str) -> None:
    (line,) = problems(notify=[{"webhook": url}])
    assert line.startswith(f"notify[0].webhook: {problem}")
    assert "secret" not in line


def test_the_address_of_a_webhook_is_shown_nowhere(build: Build) -> None:
    tree = build(notify=[{"webhook": HOOK}, {"mail": "ada"}]).tree
    shown = masked(tree)
    assert [hook["webhook"] for hook in shown["notify"]] == [MASK, None]
    assert tree["notify"][0]["webhook"] == HOOK, "the jobs need it"


@pytest.mark.parametrize("written", [HOOK, [HOOK], {"webhook": HOOK}, [{"webhook": [HOOK]}]])
def test_what_is_written_wrongly_shows_no_address(written: object) -> None:
    assert "secret" not in json.dumps(masked({"notify": written}))
