"""`qmgr -c`: list settings, and, for a manager, change those that tests need to change."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from tests.labs.pbs import client
from tests.labs.pbs.commands import MANAGER
from tests.labs.pbs.qstat import server_attributes
from tests.labs.pbs.site import SERVER, Site

UNAUTHORIZED = 159
SETTABLE = {"preempt_order", "preempt_queue_prio", "job_sort_formula", "job_history_enable", "node_fail_requeue"}
SETTABLE |= {"kill_delay", "priority"}


def qmgr(site: Site, arguments: list[str]) -> int:
    if arguments[:1] != ["-c"] or len(arguments) != 2:
        print("usage: qmgr -c command", file=sys.stderr)
        return 1
    words = arguments[1].replace("=", " = ").split()
    if words[0] in ("set", "s", "unset"):
        return _set(site, words)
    known = client.ask(site.server_socket, do="site")
    verb, kind = words[0], words[1] if len(words) > 1 else ""
    if verb.startswith("l") and kind.startswith("sched"):
        print(_sched(known["settings"]))
    elif verb.startswith("p") and kind.startswith("s"):
        print(_print_server(known))
    elif verb.startswith("l") and kind.startswith("q"):
        _list_queues(known, words[2:])
    return 0


def _list_queues(known: dict[str, Any], names: list[str]) -> None:
    for name, queue in known["queues"].items():
        if not names or name in names:
            print("\n".join([f"Queue {name}", *(f"    {key} = {value}" for key, value in queue.items()), ""]))


def _sched(settings: dict[str, Any]) -> str:
    return f"""Sched default
    sched_host = {SERVER}
    sched_cycle_length = 00:20:00
    throughput_mode = True
    job_run_wait = runjob_hook
    partition = pbs-default
    sched_priv = /var/spool/pbs/sched_priv
    sched_log = /var/spool/pbs/sched_logs
    scheduling = True
    scheduler_iteration = 20
    state = idle
    preempt_queue_prio = {settings["preempt_queue_prio"]}
    preempt_prio = express_queue, normal_jobs
    preempt_order = {settings["preempt_order"]}
    preempt_sort = min_time_since_start
    log_events = 2047
    server_dyn_res_alarm = 30
"""


def _print_server(known: dict[str, Any]) -> str:
    lines = ["#", "# Create resources and set their properties.", "#", "create resource ngpus"]
    lines += ["set resource ngpus type = long", "set resource ngpus flag = hn"]
    for name, queue in known["settings"]["queues"].items():
        lines += ["#", f"# Create and define queue {name}", "#", f"create queue {name}"]
        lines.append(f"set queue {name} queue_type = Execution")
        shown = {"Priority": queue["priority"], "kill_delay": queue["kill_delay"], "enabled": True, "started": True}
        lines += [f"set queue {name} {key} = {value}" for key, value in shown.items() if value is not None]
    lines += ["#", "# Set server attributes.", "#"]
    for key, value in server_attributes(known).items():
        if isinstance(value, dict) and key != "resources_assigned":
            lines += [f"set server {key}.{one} = {text}" for one, text in value.items()]
        elif key not in ("server_state", "server_host", "total_jobs", "state_count", "license_count", "pbs_version"):
            lines.append(f"set server {key} = {value}")
    return "\n".join(line for line in lines if "resources_assigned" not in line)


def _set(site: Site, words: list[str]) -> int:
    """Execute `set queue low kill_delay = 5`, `set sched preempt_order = S`, `unset queue low kill_delay`."""
    match = re.fullmatch(r"(set|s|unset) (queue|server|sched) (?:(\S+) )?(\w+)(?: = (.*))?", " ".join(words))
    name = match[4].lower() if match else ""
    if not match or name not in SETTABLE:
        print(f"qmgr: the lab cannot {' '.join(words)}; it sets {', '.join(sorted(SETTABLE))}", file=sys.stderr)
        return 1
    asked = {"queue": match[3] if match[2] == "queue" else "", "name": name, "value": _value(match[5])}
    answer = client.ask(site.server_socket, do="change", manager=bool(os.environ.get(MANAGER)), **asked)
    if answer["code"] == UNAUTHORIZED:
        print(f"qmgr obj={match[3] or ''} svr=default: Unauthorized Request ", file=sys.stderr)
        print("qmgr: Error (15007) returned from server", file=sys.stderr)
    code: int = answer["code"]
    return code


def _value(text: str | None) -> object:
    if text in ("True", "False"):
        return text == "True"
    return text if text is None or not re.fullmatch(r"\d+", text) else int(text)
