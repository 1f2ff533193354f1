"""One site: a folder with the commands, the sockets, the spool, the nodes' folders and the settings."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
COMMANDS = (
    *("qsub", "qstat", "qdel", "qsig", "qalter", "qmove", "qorder", "qhold", "qrls", "qrerun", "qselect"),
    *("qmgr", "pbsnodes", "pbsdsh", "pbs_tmrsh"),
)
SERVER = "pbshead"
LOGIN_HOST = "pbslogin"
VERSION = "23.06.06"

# The command runs in isolated mode, so that neither the environment nor the site-packages of a job can affect it, and
# it starts fast.
WRAPPER = """#!{python} -IS
import sys
sys.path.insert(0, {repository!r})
from tests.labs.pbs.main import main
sys.exit(main({name!r}, {site!r}, sys.argv[1:]))
"""

# Undo the settings of /etc/profile: this machine may have a PBS, whose commands come first there.
BASH_PROFILE = """mapfile -d '' -t given </proc/$$/environ
for name in $(compgen -e); do
  case $name in PWD | OLDPWD | SHLVL | _) ;; *) unset "$name" 2>/dev/null ;; esac
done
for variable in "${{given[@]}}"; do export "$variable" 2>/dev/null; done
unset given name variable
export PATH={bin}:/bin:/usr/bin
"""
SH_PROFILE = "export PATH={bin}:/bin:/usr/bin\n"


@dataclass
class QueueSettings:
    priority: int | None = None
    kill_delay: int | None = None
    """Seconds between TERM and KILL; PBS uses 10 if it is not set."""

    @property
    def kill_delay_s(self) -> float:
        return 10 if self.kill_delay is None else self.kill_delay


@dataclass
class Settings:
    """The settings of a site, and its polling delays: a real PBS polls within seconds, up to minutes."""

    nodes: list[str]
    ncpus: int = 4
    ngpus: int = 4
    queues: dict[str, QueueSettings] = field(
        default_factory=lambda: {
            "workq": QueueSettings(),
            "low": QueueSettings(priority=50, kill_delay=20),
            "high": QueueSettings(priority=200, kill_delay=20),
        }
    )
    preempt_order: str = "R"
    job_sort_formula: str = ""
    """Shown, but without effect."""
    preempt_queue_prio: int = 150
    job_history_enable: bool = True
    node_fail_requeue: float = 1
    """Seconds from the loss of a job's first node to its requeue; 310 by default on a real site."""
    sister_lost_s: float = 1
    """Seconds for which a job continues after losing another node; about six minutes on the recorded site."""
    kill_late_s: float = 0.2
    """Seconds after kill_delay at which KILL is sent; 4 to 14 s on the recorded site."""
    session_poll_s: float = 0.2
    """Seconds between checks of a session that was sent TERM: once it is empty, the remaining ranks are killed. 10 s on
    the recorded site, so ranks may have up to 10 s, or no time, after their launcher's end.
    """
    walltime_poll_s: float = 0.2
    exiting_s: float = 0.05
    """Seconds for which an ended job is in state E; 1 to 2 s on the recorded site."""
    own_hosts: bool = False
    """Whether each process sees its node's name as host name, and all names of nodes resolve; needs root."""
    networks: dict[str, str] = field(default_factory=dict)
    """For nodes with separate network namespaces: the namespace's path -> the node's address, in the nodes' order."""


@dataclass(frozen=True)
class Site:
    home: Path

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    @property
    def user_home(self) -> Path:
        """The folder in which jobs start; its profile puts the commands of PBS on the PATH of a login shell."""
        return self.home / "home"

    @property
    def server_socket(self) -> Path:
        return self.home / "server.sock"

    @property
    def mom_socket(self) -> Path:
        """The socket of the moms and of the lab itself, which works while the PBS server is down."""
        return self.home / "mom.sock"

    @property
    def hosts(self) -> Path:
        return self.home / "hosts"

    def folder(self, name: str) -> Path:
        path = self.home / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def make(self, settings: Settings) -> None:
        for name in COMMANDS:
            self._make_command(name)
        self.user_home.mkdir()
        (self.user_home / ".bash_profile").write_text(BASH_PROFILE.format(bin=self.bin))
        (self.user_home / ".profile").write_text(SH_PROFILE.format(bin=self.bin))
        addresses = list(settings.networks.values()) or [f"127.0.1.{n}" for n in range(1, len(settings.nodes) + 1)]
        names = "".join(f"{address} {name}\n" for address, name in zip(addresses, settings.nodes, strict=True))
        self.hosts.write_text(Path("/etc/hosts").read_text() + names)
        (self.home / "settings.json").write_text(json.dumps(asdict(settings)))

    def _make_command(self, name: str) -> None:
        path = self.folder("bin") / name
        text = WRAPPER.format(python=sys.executable, repository=str(REPOSITORY), name=name, site=str(self.home))
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    def settings(self) -> Settings:
        known = json.loads((self.home / "settings.json").read_text())
        queues = {name: QueueSettings(**values) for name, values in known.pop("queues").items()}
        return Settings(queues=queues, **known)
