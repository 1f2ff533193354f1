"""Runs a module of hpc_det with a copy of the Python environment on this node's local disk.

    python3 -m hpc_det.launch.staged ARCHIVE SCRATCH MODULE ARGS...

The copy is made from ARCHIVE (hpc_det.node.environment_archive) by one process, unless the node has it from a former
job, in the first of these folders that is suitable: SCRATCH, the cluster's scratch folder, if not empty; the one that
SLURM_TMPDIR names; and the folder for temporary files, $TMPDIR or /tmp. A tar file is unpacked, an image is copied and
mounted. If that is impossible, one line says why, and the module runs in the environment on the shared file system.

    hpc-det-stage-UID/             belongs to the user, mode 0700
        ENVIRONMENT.lock           locked while a copy is made or chosen
        ENVIRONMENT-DIGEST/        a copy; complete, because it gets its name at last; locked by agents that use it
            .hpc-det-origin        the path of the environment
            env/, env-scripts/     the environment, and its scripts that start its interpreter
            image, mount-KEY/      instead of env/: the image, and where the agent KEY has mounted it
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_det.launch.mounted_image import detach, last_line, mount, until_the_end
from hpc_det.node import mounts
from hpc_det.node.environment_archive import (
    ORIGIN,
    Archive,
    NotStaged,
    digest_of,
    files_of,
    insist_on_installed,
    read_archive,
)
from hpc_det.node.process import STOP_SIGNALS, ends_with_parent

LIMIT_S = 240.0
"""Seconds for making a copy; less than other nodes wait for this one (hpc_det.node.network.WAIT_S)."""
_POLL_S = 0.05
_SCRIPT = b"""#!/bin/sh
'''exec' "%s" "$0" "$@"
' '''
"""


def staged(archive_path: str, scratch: str, key: str) -> str:
    """Return the path of the local copy of this Python environment, which is made if necessary. Raises NotStaged.

    `key`: identifies the agent on this node. The copy is locked until this process ends, also after exec.
    """
    archive = read_archive(archive_path)
    if archive.prefix != sys.prefix:
        raise NotStaged(f"{archive_path} is of {archive.prefix}; `hpc-det environment stage` writes a new one")
    insist_on_installed(archive)
    why = []
    for base in folders(scratch):
        try:
            return _Copies(base, archive_path, archive).use(key)
        except NotStaged as error:
            why.append(str(error))
        except OSError as error:
            why.append(f"{error.filename or base}: {error.strerror}")
    raise NotStaged("; ".join(why))


def folders(scratch: str) -> list[str]:
    """Return the folders in which a copy may be made, in the order of preference."""
    named = [os.path.expandvars(scratch), os.environ.get("SLURM_TMPDIR", ""), tempfile.gettempdir()]
    return [*dict.fromkeys(filter(None, named))]


def why_unsuitable(base: str, needed_bytes: int) -> str | None:
    """Return why a copy cannot be made in this folder, and what helps; None if it can."""
    remedy = "name another folder on the node's local disk as `scratch` in the cluster profile"
    if not os.path.isdir(base):
        return f"{base} is not a folder; {remedy}"
    kind = mounts.file_system(Path(base), mounts.MOUNTS.read_text())
    if kind not in mounts.MEMORY + mounts.DISKS:
        return f"{base} is not on a local disk, but on {kind}; {remedy}"
    found = os.statvfs(base)
    if found.f_flag & os.ST_NOEXEC:
        return f"{base} is mounted noexec; {remedy}"
    free = found.f_bavail * found.f_frsize
    if free < needed_bytes:
        return f"{base} has {free / 1e9:.1f} GB free, and {needed_bytes / 1e9:.1f} GB are needed; {remedy}"
    return None


class _Copies:
    """The copies of an environment in a folder of this node."""

    def __init__(self, base: str, archive_path: str, archive: Archive) -> None:
        self._base = base
        self._archive_path = archive_path
        self._archive = archive
        self._home = Path(base, f"hpc-det-stage-{os.geteuid()}")
        self._environment = hashlib.sha256(archive.prefix.encode()).hexdigest()[:8]
        self._folder = self._home / f"{self._environment}-{archive.digest}{'-image' * archive.is_image}"
        self._end = time.monotonic() + LIMIT_S

    def use(self, key: str) -> str:
        """Return the path of the environment. Raises NotStaged, OSError."""
        self._insist(0)
        self._home.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(self._home)  # anyone can create this name in /tmp
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise NotStaged(f"{self._home} is not a private folder of yours; remove it")
        with self._locked():
            if not self._is_whole():
                self._remove_unused()
                self._make()
            # This lock also keeps systemd from removing old files in /tmp (tmpfiles.d(5)).
            lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            os.set_inheritable(lock, True)
        if not self._archive.is_image:
            return str(self._folder / "env")
        env = str(self._folder / f"mount-{key}")
        mount(str(self._folder / "image"), env, lambda: self._wait("mounting the image"))
        _write_scripts(env, env)
        return env

    def _insist(self, needed_bytes: int) -> None:
        if why := why_unsuitable(self._base, needed_bytes):
            raise NotStaged(why)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the lock of this environment's copies within the block."""
        lock = os.open(self._home / f"{self._environment}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                self._wait(f"another job of yours is making a copy in {self._home}")
            yield
        finally:
            os.close(lock)

    def _wait(self, doing: str) -> None:
        """Wait a moment. Raises NotStaged if the job is to stop, or LIMIT_S is over."""
        if signal.sigpending() & set(STOP_SIGNALS):
            raise NotStaged(f"the job received a stop signal, while {doing}")
        if time.monotonic() > self._end:
            raise NotStaged(f"{LIMIT_S:.0f} s were not enough, while {doing}")
        time.sleep(_POLL_S)

    def _is_whole(self) -> bool:
        """Return whether the copy exists, and has all its files: sites remove old ones in /tmp."""
        try:
            os.stat(self._folder / ORIGIN)
            if self._archive.is_image:
                return os.stat(self._folder / "image").st_size == self._archive.size_bytes
            return digest_of(files_of(str(self._folder / "env"))) == self._archive.digest
        except OSError:
            return False

    def _remove_unused(self) -> None:
        """Remove the copies of this environment that no agent uses. Raises NotStaged if this one is in use."""
        for folder in [*self._home.glob(f"{self._environment}-*"), *self._home.glob(f".{self._environment}-*")]:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if folder == self._folder:
                    raise NotStaged(f"files in {folder} were changed, and another job uses it") from None
                continue
            finally:
                os.close(lock)
            for mounted in folder.glob("mount-*"):
                detach(str(mounted))
            shutil.rmtree(folder)

    def _make(self) -> None:
        """Make the copy."""
        self._insist(2 * self._archive.size_bytes)  # the ranks need space, too
        began, part = time.monotonic(), self._folder.with_name(f".{self._folder.name}")
        env = part / "env"
        try:
            part.mkdir(mode=0o700)
            if self._archive.is_image:
                self._run("cp", self._archive_path, str(part / "image"))
            else:
                env.mkdir()
                self._run("tar", "--extract", "--no-same-owner", f"--file={self._archive_path}", f"--directory={env}")
                if digest_of(files_of(str(env))) != self._archive.digest:
                    raise NotStaged(f"{self._archive_path} is damaged; `hpc-det environment stage` writes a new one")
                _write_scripts(str(env), str(self._folder / "env"))
            (part / ORIGIN).write_text(self._archive.prefix)
            part.rename(self._folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _say(f"copied {self._archive.prefix} to {self._folder} in {time.monotonic() - began:.1f} s")

    def _run(self, *command: str) -> None:
        """Run a command. Raises NotStaged if it fails."""
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, preexec_fn=ends_with_parent
                )
            except FileNotFoundError:
                raise NotStaged(f"{command[0]} is not installed on this node") from None
            try:
                while process.poll() is None:
                    self._wait(f"{command[0]} was running")
            finally:
                process.kill()
                process.wait()
            if process.returncode:
                raise NotStaged(f"{command[0]} failed: {last_line(said)}")


def _write_scripts(env: str, place: str) -> None:
    """Write the scripts in `env`/bin that start its interpreter with the path that it will have below `place`."""
    scripts = f"{env}-scripts"
    os.makedirs(scripts, mode=0o700, exist_ok=True)
    begin = f"#!{sys.prefix}/bin/python".encode()
    with os.scandir(os.path.join(env, "bin")) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                with open(entry.path, "rb") as file:
                    if file.read(len(begin)) == begin:
                        version, script = file.readline().strip(), Path(scripts, entry.name)
                        python = os.fsencode(f"{place}/bin/python") + version
                        # Written as by pip, because older kernels read only 127 bytes of the first line (execve(2)).
                        script.write_bytes(_SCRIPT % python + file.read())
                        script.chmod(0o700)


def _say(text: str) -> None:
    print(f"hpc-det: {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _insist_on_start(python: str, env: str) -> None:
    """Raise NotStaged unless this interpreter runs in the environment `env`."""
    check = "import os, sys; sys.exit(not os.path.samefile(sys.prefix, sys.argv[1]))"
    try:
        ended = subprocess.run([python, "-c", check, env], stdin=subprocess.DEVNULL, capture_output=True)
    except OSError as error:
        raise NotStaged(f"{python}: {error.strerror}") from None
    if ended.returncode:
        raise NotStaged(f"{python} does not start in {env}: {ended.stderr[-300:].decode(errors='replace')}")


def main(argv: list[str]) -> None:
    """Become the module, with the interpreter of the local copy or this one."""
    archive, scratch, module, *arguments = argv
    # The module handles the stop signals that arrive until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    python = sys.executable
    key = hashlib.sha256(repr((arguments[:1], arguments[-1:])).encode()).hexdigest()[:8]
    try:
        env = staged(archive, scratch, key)
        copied = env + python.removeprefix(sys.prefix)
        _insist_on_start(copied, env)
        python = copied
        os.environ["PATH"] = os.pathsep.join([f"{env}-scripts", os.path.dirname(python), os.environ.get("PATH", "")])
    except Exception as why:  # the module runs without a copy, too
        with until_the_end():
            _say(f"note: processes use {sys.prefix} on the shared file system: {why}")
    os.execv(python, [python, "-m", module, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
