"""Run a command as an ordinary user on a login host of the lab: python -m tests.labs.as_user COMMAND...

The login host is a network namespace with two interfaces. Its name and its default route lead to eth0, from which the
nodes cannot be reached; eth1 is in the cluster's network. Its folders are this machine's. If this machine can have no
lab, or this user is not root, the command is not run, and the exit code is 2.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.labs.operator import VARIABLE, serving
from tests.labs.slurm import SCRIPTS, SlurmLab, available, reached_paths

USER = "nobody"
"""Exists on every Debian, and has no permissions."""
NAMESPACE = "hpcdet-login"
OUTSIDE, INSIDE = "198.51.100.2", "10.66.0.2"
"""Addresses of the login host: on a network of RFC 5737, and on the cluster's."""
NO_LAB = 2
"""The exit code if there can be no lab."""
LINK = "hpcdetlogin"
"""The link to the bridge of the nodes."""
ON_THE_HOST = """
mount --bind "$1" /etc/hosts
hostname login1
shift
exec "$@"
"""


def main(command: Sequence[str]) -> int:
    if reason := available():
        print(f"as_user: {reason}; not run: {' '.join(command)}", file=sys.stderr)
        return NO_LAB
    was_running = SlurmLab.is_running()
    lab = SlurmLab.start()
    try:
        with _login_host(lab) as on_the_host:
            return _run(lab, [*on_the_host, *command])
    finally:
        if not was_running:
            lab.stop()


@contextmanager
def _login_host(lab: SlurmLab) -> Iterator[list[str]]:
    """Yield the prefix of a command line that runs it on the login host as USER."""
    _make_room()
    try:
        _make_network()
        hosts = lab.path / "etc" / "hosts.login"
        hosts.write_text(f"127.0.0.1 localhost\n{OUTSIDE} login1\n{_nodes(lab)}")
        user = pwd.getpwnam(USER)
        enter = ["nsenter", f"--net=/run/netns/{NAMESPACE}", "unshare", "--uts", "--mount"]
        paths = [*map(str, reached_paths()), "--"]
        become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        host = ["bash", "-euc", ON_THE_HOST, "login1", str(hosts)]
        yield [*enter, *host, str(SCRIPTS / "with-paths"), *paths, *become, "--"]
    finally:
        _remove_host()


def _make_network() -> None:
    _ip("netns", "add", NAMESPACE)
    _ip("link", "add", LINK, "type", "veth", "peer", "name", "eth1", "netns", NAMESPACE)
    _ip("link", "set", LINK, "master", "hpcdet0", "up")
    _ip("-n", NAMESPACE, "link", "add", "eth0", "type", "veth", "peer", "name", "nobody")
    for device, address in (("eth1", INSIDE), ("eth0", OUTSIDE)):
        _ip("-n", NAMESPACE, "addr", "add", f"{address}/24", "dev", device)
    for device in ("lo", "eth1", "nobody", "eth0"):
        _ip("-n", NAMESPACE, "link", "set", device, "up")
    _ip("-n", NAMESPACE, "route", "add", "default", "via", "198.51.100.1")


def _make_room() -> None:
    """Remove a login host that a killed run has left."""
    found = subprocess.run(["ip", "netns", "pids", NAMESPACE], capture_output=True, text=True)
    if found.stdout.strip():
        sys.exit(f"as_user: {NAMESPACE} is in use by processes {' '.join(found.stdout.split())}; wait for their end")
    _remove_host()


def _remove_host() -> None:
    """Remove what exists of the host: the link first, since deleting only the namespace would remove the link with a
    delay.
    """
    for removed in (["link", "del", LINK], ["netns", "del", NAMESPACE]):
        subprocess.run(["ip", *removed], stderr=subprocess.DEVNULL)


def _nodes(lab: SlurmLab) -> str:
    lines = (lab.path / "etc" / "hosts").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if " node" in line)


def _run(lab: SlurmLab, command: Sequence[str]) -> int:
    user, home = pwd.getpwnam(USER), lab.folder()
    os.chown(home, user.pw_uid, user.pw_gid)
    operator = lab.path / "run" / "operator.socket"
    own = {
        "HOME": str(home),
        "USER": USER,
        "LOGNAME": USER,
        VARIABLE: str(operator),
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{home}/.hypothesis",
        "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} -o cache_dir={home}/.pytest_cache".strip(),
    }
    with serving(operator, user.pw_uid, os.environ | lab.env):
        process = subprocess.Popen(command, env=os.environ | own)
        while True:
            with suppress(KeyboardInterrupt):  # the command receives Ctrl-C, too, and ends by itself
                return process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
