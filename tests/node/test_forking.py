"""Forked processes: what they share with the process that has imported their modules, and what they do not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpc_det.node.fork_server import ForkServerProcess
from hpc_det.node.forking import (
    Forked,
    close_files_of_parent,
    forked,
    prepare_to_compute,
    wait_for_code,
    why_not_to_fork,
    write_through_to,
)
from tests.forked_functions import FUNCTIONS
from tests.processes import words
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration


def in_fresh_python(program: str, **env: str) -> str:
    """Return what a Python that has imported nothing prints."""
    environment = {**os.environ, **env}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_forked_process_exits_with_the_code_of_its_function() -> None:
    assert wait_for_code(forked(lambda: 7)) == 7


def test_an_error_of_the_function_is_printed_and_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert wait_for_code(forked(lambda: 1 // 0)) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_forked_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    pid = forked(lambda: (tmp_path / "session").write_text(str(os.getsid(0))))
    wait_for_code(pid)
    assert (tmp_path / "session").read_text() == str(pid)


def waits() -> int:
    signal.pause()
    return 0


def test_a_forked_process_is_shown_as_the_command_line_that_it_was_given() -> None:
    process = Forked(waits, shown_as=["python", "-m", "a.b"])
    try:
        wait_for(lambda: words(process.pid, "cmdline")[:3] == ["python", "-m", "a.b"])
        assert not any(words(process.pid, "cmdline")[3:])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert process.returncode == -signal.SIGKILL


def test_a_shown_command_line_is_cut_to_the_length_of_that_of_the_parent(tmp_path: Path) -> None:
    own, long = Path("/proc/self/cmdline"), "x" * 10_000
    wait_for_code(forked(lambda: (tmp_path / "shown").write_bytes(own.read_bytes()), shown_as=[long]))
    assert (tmp_path / "shown").read_text() == long[: len(own.read_bytes()) - 1] + "\0"


def test_a_forked_process_that_another_part_of_the_parent_has_killed_counts_as_killed() -> None:
    process = Forked(waits)
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    assert process.poll() == -signal.SIGKILL


def test_a_forked_process_keeps_only_its_output_of_the_files_of_its_parent(tmp_path: Path) -> None:
    def run() -> int:
        close_files_of_parent()
        (tmp_path / "files").write_text(" ".join(sorted(os.listdir("/proc/self/fd"))))
        return os.stat(0).st_rdev != os.stat(os.devnull).st_rdev

    with open(os.devnull):
        assert wait_for_code(forked(run)) == 0
    # 3 is the listing itself.
    assert (tmp_path / "files").read_text().split()[:4] in (["0", "1", "2", "3"], ["0", "1", "2"])


def test_output_of_a_forked_process_is_in_its_file_when_it_is_killed(tmp_path: Path) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)

    def run() -> int:
        write_through_to(log)
        print("last words", end="")
        os.kill(os.getpid(), 9)
        return 0

    assert wait_for_code(forked(run)) == -9
    os.close(log)
    assert (tmp_path / "log").read_text() == "last words"


def test_generators_of_forked_processes_draw_different_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")

    def draw() -> int:
        prepare_to_compute()
        (tmp_path / str(os.getpid())).write_text(f"{random.random()} {numpy.random.rand()}")
        return 0

    pids = [forked(draw) for _ in range(2)]
    assert [wait_for_code(pid) for pid in pids] == [0, 0]
    first, second = ((tmp_path / str(pid)).read_text().split() for pid in pids)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_a_process_with_threads_is_not_forked() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert why_not_to_fork() is not None
    finally:
        stop.set()
        thread.join()


def test_a_process_that_has_queried_the_gpus_is_not_forked() -> None:
    program = "from hpc_det.node.forking import *; import_all(['torch']); {}print(why_not_to_fork())"
    assert in_fresh_python(program.format("")) == "None"
    assert in_fresh_python(program.format("import torch; torch.cuda._is_in_bad_fork = lambda: True; ")) != "None"
    if in_fresh_python("import torch; print(torch.backends.cuda.is_built())") == "True":
        # Unlike device_count, it asks the CUDA runtime whatever CUDA_VISIBLE_DEVICES is.
        # Lightning, which other tests of this process import, has it ask NVML instead.
        asks = program.format("import torch; torch.cuda.is_available(); ")
        assert in_fresh_python(asks, PYTORCH_NVML_BASED_CUDA_CHECK="0") != "None"


@pytest.mark.parametrize("threads", ["1", "2"])
def test_numpy_has_the_threads_in_a_fork_that_it_has_in_a_fresh_python(threads: str) -> None:
    count = "len(os.listdir('/proc/self/task'))"
    fresh = in_fresh_python(f"import os, numpy; print({count})", OMP_NUM_THREADS=threads)
    shared = in_fresh_python(
        "import os; from hpc_det.node.forking import *; import_all(['numpy']); "
        f"wait_for_code(forked(lambda: (prepare_to_compute(), print({count}))[1] or 0))",
        OMP_NUM_THREADS=threads,
    )
    assert shared == fresh


# --- the fork server


def test_the_fork_server_forks_calls_and_reports_their_exit_codes(tmp_path: Path) -> None:
    server = ForkServerProcess.start([FUNCTIONS])
    for number in range(3):
        server.fork({"number": number}, f"{FUNCTIONS}:write_and_exit", [str(tmp_path / str(number)), number])
    heads = [message.head for message in (server.line.receive() for _ in range(7)) if message]
    server.line.connection.close()
    assert heads[0] == {"ready": None}
    exits = [head for head in heads if "exited" in head]
    assert {head["forked"]["number"]: head["pid"] for head in heads if "forked" in head} == {
        number: json.loads((tmp_path / str(number)).read_text())["pid"] for number in range(3)
    }
    assert sorted((each["exited"]["number"], each["code"]) for each in exits) == [(0, 0), (1, 1), (2, 2)]
    assert {json.loads((tmp_path / str(number)).read_text())["parent"] for number in range(3)} == {server.process.pid}
    assert server.process.wait() == 0


def test_the_fork_server_imports_more_modules_after_the_first_fork() -> None:
    server = ForkServerProcess.start([FUNCTIONS], later=["no_such_module", "wave"])
    for number in range(2):
        server.fork(number, f"{FUNCTIONS}:has_imported", ["wave"])
    heads = [message.head for message in (server.line.receive() for _ in range(5)) if message]
    server.line.connection.close()
    assert {head["exited"]: head["code"] for head in heads if "exited" in head} == {0: 0, 1: 1}
    assert server.process.wait() == 0


def test_the_fork_server_says_if_later_imports_make_its_forks_unsafe(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    server = ForkServerProcess.start([FUNCTIONS], later=["starts_a_thread"], environment=environment)
    for number in range(2):
        server.fork(number, f"{FUNCTIONS}:has_imported", [])
    heads = [message.head for message in (server.line.receive() for _ in range(4)) if message]
    server.line.connection.close()
    assert [head["forked"] for head in heads if "forked" in head] == [0]
    assert [bool(head["ready"]) for head in heads if "ready" in head] == [False, True]
    assert server.process.wait() == 0


def test_the_fork_server_ends_all_processes_on_request(tmp_path: Path) -> None:
    server = ForkServerProcess.start([FUNCTIONS])
    server.fork("a", f"{FUNCTIONS}:write_and_wait", str(tmp_path / "up"))
    wait_for((tmp_path / "up").exists)
    server.line.send({"end": 4})
    _, _, exited, ended = (server.line.receive() for _ in range(4))
    assert [message.head for message in (exited, ended) if message] == [{"exited": "a", "code": -9}, {"ended": 4}]
    server.line.connection.close()
    assert server.process.wait() == 0


def test_processes_end_with_the_owner_of_the_fork_server(tmp_path: Path) -> None:
    server = ForkServerProcess.start([FUNCTIONS])
    server.fork("a", f"{FUNCTIONS}:write_and_wait", str(tmp_path / "up"))
    wait_for((tmp_path / "up").exists)
    server.line.connection.close()
    assert server.process.wait() == 0
    assert not Path(f"/proc/{(tmp_path / 'up').read_text()}").exists()


STARTS_A_THREAD = """
import os, threading, time
threading.Thread(target=time.sleep, args=[600], daemon=True).start()
os.environ["OF_THE_TEST"] = "changed"
"""


def test_where_imports_have_started_a_thread_the_fork_server_executes_fresh_processes(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(STARTS_A_THREAD)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "OF_THE_TEST": "as given"}
    shared = os.memfd_create("shared")
    os.write(shared, b"a buffer")
    server = ForkServerProcess.start(["starts_a_thread"], files=[shared], environment=environment)
    server.fork("a", f"{FUNCTIONS}:write_what_it_is", [str(tmp_path / "found"), "starts_a_thread", shared])
    ready, forked, exited = (message.head for message in (server.line.receive() for _ in range(3)) if message)
    os.close(shared)
    found = json.loads((tmp_path / "found").read_text())
    command = found.pop("command")
    server.line.connection.close()
    assert server.process.wait() == 0
    assert "1 threads" in ready["ready"]
    assert exited == {"exited": "a", "code": 5}
    assert found == {
        "has module": False,
        "threads": 1,
        "variable": "as given",
        "session": True,
        "parent": server.process.pid,
        "inherited": "a buffer",
        "sockets": 0,
    }
    assert "starts_a_thread" not in command, "another program than the fork server's"
    assert not [word for word in command if str(tmp_path) in word], "arguments may be secrets"
    assert forked["pid"] > 0


def test_executed_processes_report_errors_and_end_with_the_owner(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(STARTS_A_THREAD)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    server = ForkServerProcess.start(["starts_a_thread"], environment={**os.environ, "PYTHONPATH": path})
    server.fork("wrong", "missing_module:function", None)
    heads = [message.head for message in (server.line.receive() for _ in range(3)) if message]
    assert heads[2] == {"exited": "wrong", "code": 1}
    server.fork("a", f"{FUNCTIONS}:write_and_wait", str(tmp_path / "up"))
    wait_for((tmp_path / "up").exists)
    server.line.connection.close()
    assert server.process.wait() == 0
    assert not Path(f"/proc/{(tmp_path / 'up').read_text()}").exists()
