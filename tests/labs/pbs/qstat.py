"""`qstat` and `qselect`: print jobs, queues and the server in the forms for programs and for people."""

from __future__ import annotations

import getopt
import json
import sys
import time
from typing import Any

from tests.labs.pbs import client
from tests.labs.pbs.client import ServerDown
from tests.labs.pbs.environment import user
from tests.labs.pbs.qsub import full_id
from tests.labs.pbs.resources import Refused
from tests.labs.pbs.site import SERVER, VERSION, Site

STATES = "BEFHMQRSTUWX"


def qstat(site: Site, arguments: list[str]) -> int:
    options, ids = getopt.gnu_getopt(arguments, "fF:xtpQBHEawu:n1s")
    given = dict(options)
    form = given.get("-F", "text")
    try:
        return _qstat(site, given, form, ids)
    except ServerDown:
        if form == "json":
            print_json({})
        raise


def _qstat(site: Site, given: dict[str, str], form: str, ids: list[str]) -> int:
    if "-Q" in given or "-B" in given:
        return _site(site, given, form, ids)
    history = "-x" in given or "-H" in given
    if "-E" in given and not all(one[:1].isdigit() for one in ids):
        raise Refused(1, "Express option can only be used with job ids")
    ids = _in_order([full_id(one) for one in ids], "-E" in given)
    errors = [(1, f"illegally formed job identifier: {one}") for one in ids if _is_elsewhere(one)]
    answers = [_asked(site, together, history, "-t" in given) for together in _requests(ids, "-E" in given)]
    errors += [error for answer in answers for error in answer["errors"]]
    if form == "json":  # there is one object "Jobs", with the jobs of the first answer only
        answers = [answer for answer in answers if answer["jobs"]][:1]
    jobs = {name: job for answer in answers for name, job in answer["jobs"].items()}
    if form == "json":
        print_json({"Jobs": {name: typed_job(job) for name, job in jobs.items()}} if jobs else {})
    elif "-f" in given:
        for name, job in jobs.items():
            print(_dsv(name, job) if form == "dsv" else long_text(f"Job Id: {name}", job))
    else:
        _table(jobs)
    for _, text in errors:
        print(f"qstat: {text}", file=sys.stderr)
    return errors[-1][0] if errors else 0


def _in_order(ids: list[str], express: bool) -> list[str]:
    return sorted(ids, key=_by_server_and_number) if express else ids


def _by_server_and_number(job_id: str) -> tuple[str, int]:
    number, _, server = job_id.partition(".")
    return server, int(number.partition("[")[0])


def _is_elsewhere(job_id: str) -> bool:
    """Return whether the ID names an unknown server."""
    return job_id[:1].isdecimal() and not job_id.endswith(f".{SERVER}")


def _requests(ids: list[str], express: bool) -> list[list[str]]:
    """Return the requests: one for each ID, or with -E one for all IDs, sent after the last has been read. If the last
    ID is malformed, that request is never sent.
    """
    own = [one for one in ids if not _is_elsewhere(one)]
    if not ids:
        return [[]]
    if express:
        return [] if _is_elsewhere(ids[-1]) else [own]
    return [[one] for one in own]


def _asked(site: Site, ids: list[str], history: bool, subjobs: bool) -> dict[str, Any]:
    """Ask for jobs. If the server knows one of several IDs, it reports no error for the others; otherwise only for the
    last.
    """
    answer = client.ask(site.server_socket, do="status", ids=ids, history=history, subjobs=subjobs)
    return {**answer, "errors": [] if answer["jobs"] else answer["errors"][-1:]}


def print_json(content: dict[str, Any]) -> None:
    head = {"timestamp": int(time.time()), "pbs_version": VERSION, "pbs_server": SERVER}
    print(json.dumps(head | content, indent="\t", separators=(",", ":\t"), ensure_ascii=False))


def typed_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes as in PBS' JSON."""
    return job | {"Variable_List": {name: typed(value) for name, value in job["Variable_List"].items()}}


def typed(value: str) -> Any:
    """Convert as PBS does, which writes everything that looks like a number or a boolean as one: 007 becomes 7."""
    if value in ("true", "false"):
        return value == "true"
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else number


def flat(attributes: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, value in attributes.items():
        if name == "Variable_List":
            lines.append((name, ",".join(f"{one}={text}" for one, text in value.items())))
        elif isinstance(value, dict):
            lines += [(f"{name}.{one}", str(text)) for one, text in value.items()]
        else:
            lines.append((name, str(value)))
    return lines


def long_text(title: str, attributes: dict[str, Any]) -> str:
    lines = [_wrapped(f"    {name} = {value}") for name, value in flat(attributes)]
    return "\n".join([title, *lines, ""])


def _wrapped(line: str) -> str:
    """Wrap at commas, or at the 79th character if there is none."""
    rows = [""]
    for piece in line.replace(",", ",\0").split("\0"):
        width = len(rows[-1]) + len(piece)
        if rows[-1].strip() and width > 79 and "=" not in rows[-1].rstrip(" =")[-1:]:
            rows.append("\t")
        rows[-1] += piece
        while len(rows[-1]) > 79:
            rows[-1:] = [rows[-1][:79], "\t" + rows[-1][79:]]
    return "\n".join(rows)


def _dsv(name: str, job: dict[str, Any]) -> str:
    return "|".join([f"Job Id: {name}", *(f"{one}={value}" for one, value in flat(job))])


def _table(jobs: dict[str, Any]) -> None:
    if jobs:
        print("Job id            Name             User              Time Use S Queue")
        print("----------------  ---------------- ----------------  -------- - -----")
    for name, job in jobs.items():
        used = job.get("resources_used", {}).get("cput", "0")
        owner = job["Job_Owner"].split("@")[0]
        print(f"{name:<17.17} {job['Job_Name']:<16.16} {owner:<17.17} {used:>8} {job['job_state']} {job['queue']:<16}")


def _site(site: Site, given: dict[str, str], form: str, names: list[str]) -> int:
    answer = client.ask(site.server_socket, do="site")
    if "-B" in given:
        title, content = "Server", {SERVER: server_attributes(answer)}
    else:
        title, content = "Queue", _queues(answer, names)
    if form == "json":
        print_json({title: content})
    else:
        for name, attributes in content.items():
            print(long_text(f"{title}: {name}", attributes))
    return 0


def _queues(answer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    known: dict[str, Any] = answer["queues"]
    for name in names:
        if name not in known:
            raise Refused(170, f"Unknown queue {name}")
    return {name: known[name] for name in names or known}


def server_attributes(answer: dict[str, Any]) -> dict[str, Any]:
    settings, counts = answer["settings"], answer["server"]
    return {
        "server_state": "Active",
        "server_host": SERVER,
        "scheduling": "True",
        "total_jobs": counts["total_jobs"],
        "state_count": counts["state_count"],
        "acl_roots": "root@*",
        "managers": "root@*",
        "operators": "root@*",
        "default_queue": "workq",
        "log_events": 511,
        "mailer": "/usr/sbin/sendmail",
        "mail_from": "adm",
        "query_other_jobs": "True",
        "resources_default": {"ncpus": 1},
        "default_chunk": {"ncpus": 1},
        "resources_assigned": counts["resources_assigned"],
        **({"job_sort_formula": formula} if (formula := settings["job_sort_formula"]) else {}),
        "scheduler_iteration": 20,
        "flatuid": "True",
        "resv_enable": "True",
        "node_fail_requeue": settings["node_fail_requeue"],
        "max_array_size": 10000,
        "resend_term_delay": 5,
        "pbs_license_min": 0,
        "pbs_license_max": 2147483647,
        "pbs_license_linger_time": 31536000,
        "license_count": "Avail_Global:1000000 Avail_Local:1000000 Used:0 High_Use:0",
        "pbs_version": VERSION,
        "eligible_time_enable": "False",
        "job_history_enable": str(settings["job_history_enable"]),
        "job_history_duration": "24:00:00",
        "max_concurrent_provision": 5,
        "clear_topjob_estimates_enable": "False",
        "max_job_sequence_id": 9999999,
    }


def qselect(site: Site, arguments: list[str]) -> int:
    options, _ = getopt.gnu_getopt(arguments, "s:u:N:q:xHJTl:")
    given = dict(options)
    if set(given.get("-s", "")) - set(STATES):
        raise Refused(2, "illegal -s value")
    history = "-x" in given or "-H" in given
    answer = client.ask(site.server_socket, do="status", ids=[], history=history, subjobs="-T" in given)
    for name, job in answer["jobs"].items():
        if _is_selected(job, given):
            print(name)
    for _, text in answer["errors"]:
        print(f"qselect: {text.strip()}", file=sys.stderr)
    return 0


def _is_selected(job: dict[str, Any], given: dict[str, str]) -> bool:
    return (
        job["job_state"] in given.get("-s", job["job_state"])
        and given.get("-N", job["Job_Name"]) == job["Job_Name"]
        and given.get("-q", job["queue"]) == job["queue"]
        and given.get("-u", user()).split("@")[0] in job["Job_Owner"].split("@")[0]
        and ("-H" not in given or job["job_state"] == "F")
    )
