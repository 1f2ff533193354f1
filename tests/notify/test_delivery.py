"""Each way to deliver a notification, with a real receiver."""

from __future__ import annotations

import email
import email.policy
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.process import kill_tree
from hpc_det.notify import delivery
from hpc_det.notify.delivery import HookError, News, named, send
from tests.facts import unnamed
from tests.launch.gang import is_there
from tests.notify.receiver import Receiver
from tests.stub import Stub
from tests.wait import wait_for


@pytest.fixture
def news(tmp_path: Path) -> News:
    (tmp_path / "12" / "code").mkdir(parents=True)
    return News(
        experiment=12,
        name="größe 数",
        state="ERROR",
        why="rank 0: ValueError",
        best={"metric": "accuracy", "value": 0.97, "trial": 3},
        folder=str(tmp_path / "12"),
        host="node1",
        time="2026-11-20T10:02:05+01:00",
    )


TEXT = "Experiment 12 (größe 数) is ERROR: rank 0: ValueError; best accuracy 0.97 in trial 3"


def problem(hook: dict[str, Any], news: News) -> str:
    with pytest.raises(HookError) as error:
        send(hook, news)
    return str(error.value)


# --- commands


@pytest.mark.integration
def test_a_command_gets_the_news_on_its_input_and_runs_in_the_code(news: News, tmp_path: Path) -> None:
    script = 'cat >../input; printf "%s %s %s %s" "$HPC_DET_EXPERIMENT" "$HPC_DET_STATE" "$0" "$1" >../said'
    send({"command": ["sh", "-c", script, "a b", "$(touch X)"]}, news)
    assert (tmp_path / "12" / "said").read_text() == "12 ERROR a b $(touch X)"
    assert json.loads((tmp_path / "12" / "input").read_text()) == {**vars(news), "text": TEXT}


@pytest.mark.integration
def test_a_command_that_fails_says_its_last_word(news: News) -> None:
    words = "echo first; printf 'the \\033[0mlast\\n\\n'; exit 3"
    assert not unnamed(problem({"command": ["sh", "-c", words]}, news), 3, "the [0mlast")
    assert not unnamed(problem({"command": ["false"]}, news), 1)


@pytest.mark.integration
def test_a_command_that_is_none_is_named(news: News) -> None:
    assert problem({"command": ["./no-such-program"]}, news) == "./no-such-program: No such file or directory"


@pytest.mark.integration
def test_a_command_that_hangs_is_killed_with_what_it_has_started(
    news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "12" / "pid"

    def end_once_it_hangs(process: subprocess.Popen[bytes]) -> None:
        wait_for(pid.exists)
        kill_tree(process)

    monkeypatch.setattr(delivery, "TIME_LIMIT_S", 0.3)
    monkeypatch.setattr(delivery, "kill_tree", end_once_it_hangs)
    hangs = ["sh", "-c", "sleep 60 & echo $! >../.pid; mv ../.pid ../pid; wait"]
    assert not unnamed(problem({"command": hangs}, news), "0.3 s", "killed")
    wait_for(lambda: not is_there(int(pid.read_text())))


# --- web addresses


def test_a_webhook_gets_the_news_with_a_text(news: News, receiver: Receiver) -> None:
    send({"webhook": receiver.url("/T0/B0/secret?x=1")}, news)
    assert receiver.received == [("/T0/B0/secret?x=1", {**vars(news), "text": TEXT})]


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_told_without_the_address(news: News, receiver: Receiver, status: int) -> None:
    receiver.answer = (status, {})
    assert unnamed(problem({"webhook": receiver.url("/secret")}, news), status, "secret") == ["secret"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["/other", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_no_redirect_is_followed(news: News, receiver: Receiver, status: int, target: str) -> None:
    receiver.answer = (status, {"Location": target})
    text = problem({"webhook": receiver.url()}, news)
    assert not unnamed(text, status, "redirects")
    assert [path for path, _ in receiver.received] == ["/hook"]


def test_a_server_that_does_not_answer_is_not_waited_for(
    news: News, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers only after the test."""
    monkeypatch.setattr(delivery, "TIME_LIMIT_S", 0.2)
    receiver.answers.clear()
    assert not unnamed(problem({"webhook": receiver.url()}, news), "timed out")


def test_a_server_that_is_not_there_cannot_be_reached(news: News, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        text = problem({"webhook": f"http://127.0.0.1:{taken.getsockname()[1]}/secret"}, news)
    assert not unnamed(text, "Connection refused")
    assert "secret" not in text


def test_a_proxy_of_the_environment_is_used(news: News, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", receiver.url(""))
    send({"webhook": "http://hooks.example.org/a"}, news)
    assert receiver.received[0][0] == "http://hooks.example.org/a"


# --- mails


@pytest.mark.integration
def test_a_mail_goes_through_sendmail(news: News, stub: Stub, tmp_path: Path) -> None:
    stub("sendmail", f'echo "$@" >{tmp_path}/arguments; cat >{tmp_path}/mail')
    send({"mail": "ada@example.org"}, news)
    assert (tmp_path / "arguments").read_text() == "-t -i\n"
    mail = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
    assert mail["To"] == "ada@example.org"
    assert not unnamed(mail["Subject"], "hpc_det", 12, "größe 数", "ERROR")
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail.get_content().splitlines()[0] == TEXT
    (tmp_path / "mail").read_bytes().decode("ascii")


def test_where_there_is_no_sendmail_that_is_said(news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(delivery, "_SENDMAIL_FOLDERS", ())
    assert not unnamed(problem({"mail": "ada"}, news), "sendmail", os.uname().nodename)


def test_a_log_shows_no_address_of_a_webhook() -> None:
    webhook = named({"webhook": "https://hooks.example.org/T0/B0/secret"})
    assert unnamed(webhook, "webhook", "hooks.example.org", "secret") == ["secret"]
    command = named({"command": ["./tell.sh", "secret"], "mail": None})
    assert unnamed(command, "command", "./tell.sh", "secret") == ["secret"]
    assert not unnamed(named({"command": None, "mail": "ada"}), "mail", "ada")
