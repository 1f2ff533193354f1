"""The resources of a job: `-l select=2:ncpus=4,place=scatter -l walltime=1:00:00`, and the errors of qsub
about them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

NUMBERS_OF_CHUNK = {"ncpus", "ngpus", "mpiprocs", "ompthreads"}
OF_CHUNK = NUMBERS_OF_CHUNK | {"mem", "vmem", "host", "vnode", "arch"}
OF_JOB = {"walltime", "ncpus", "ngpus", "mem", "vmem", "cput", "pmem", "mpiprocs", "ompthreads", "nodect"}
BAD_VALUE, UNKNOWN_RESOURCE, MIXED, BAD_NODES = 166, 187, 5, 241


class Refused(Exception):
    """Ends a command with this exit code, and this text after the command's name."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True)
class Chunk:
    """The resources on one node."""

    ncpus: int = 1
    ngpus: int = 0
    mpiprocs: int | None = None
    ompthreads: int | None = None
    mem: str | None = None
    host: str | None = None

    @property
    def takes(self) -> dict[str, int | str]:
        """Return the resources that a node lacks meanwhile, as `exec_vnode` prints them."""
        counted = {"ncpus": self.ncpus, "ngpus": self.ngpus or None, "mem": self.mem}
        return {name: value for name, value in counted.items() if value is not None}

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def parse_select(text: str) -> list[Chunk]:
    chunks = []
    for part in text.split("+"):
        number, _, _ = part.partition(":")
        count, settings = (int(number), part.split(":")[1:]) if number.isdecimal() else (1, part.split(":"))
        if not count:
            raise Refused(BAD_VALUE, "Illegal attribute or resource value")
        chunks += [_chunk(settings)] * count
    return chunks


def _chunk(settings: list[str]) -> Chunk:
    fields: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in OF_CHUNK:
            raise Refused(UNKNOWN_RESOURCE, f"Unknown resource: {name}")
        if (name in NUMBERS_OF_CHUNK and not value.isdecimal()) or (name in ("mem", "vmem") and not _is_size(value)):
            raise Refused(BAD_VALUE, f"Illegal attribute or resource value select.{name}")
        fields["host" if name == "vnode" else name] = value
    numbers = {name: int(value) for name, value in fields.items() if name in NUMBERS_OF_CHUNK}
    return Chunk(**numbers, mem=fields.get("mem"), host=fields.get("host"))


def _is_size(text: str) -> bool:
    return re.fullmatch(r"\d+([kmgt]?[bw])?", text.lower()) is not None


def parse_walltime(text: str) -> float:
    """Return the seconds of `[[hours:]minutes:]seconds`."""
    if not re.fullmatch(r"\d+(:\d+){0,2}(\.\d+)?", text):
        raise Refused(BAD_VALUE, "Illegal attribute or resource value Resource_List.walltime")
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"


def parse_resources(options: list[str]) -> dict[str, str]:
    """Return all `-l` of a job as one dictionary; the last value of a name is used."""
    asked: dict[str, str] = {}
    for option in options:
        for setting in option.split(","):
            name, _, value = setting.partition("=")
            if name not in OF_JOB | {"select", "place", "nodes"}:
                raise Refused(UNKNOWN_RESOURCE, f"Unknown resource Resource_List.{name}")
            asked[name] = value
    _check(asked)
    return asked


def _check(asked: Mapping[str, str]) -> None:
    mixed = [name for name in asked if name in NUMBERS_OF_CHUNK | {"mem"}]
    if mixed and ("select" in asked or "place" in asked):
        text = f'"-lresource=" cannot be used with "select" or "place", resource is: {mixed[0]}'
        raise Refused(MIXED, text)
    if not re.fullmatch(
        r"(free|pack|scatter|vscatter)?:?(excl|exclhost|shared)?(:?group=\w+)?", asked.get("place", "")
    ):
        raise Refused(BAD_VALUE, "Illegal attribute or resource value Resource_List.place")
    if "walltime" in asked:
        parse_walltime(asked["walltime"])


def resource_list(asked: Mapping[str, str]) -> tuple[dict[str, int | str], list[Chunk]]:
    """Return `Resource_List` as qstat shows it, sorted by name, and the chunks."""
    select, place = _select_and_place(asked)
    chunks = parse_select(select)
    sums = {name: sum(getattr(chunk, name) or 0 for chunk in chunks) for name in ("mpiprocs", "ncpus", "ngpus")}
    listed: dict[str, int | str] = {name: total for name, total in sums.items() if total}
    listed |= {"ncpus": sums["ncpus"], "nodect": len(chunks), "place": place, "select": select}
    if "walltime" in asked:
        listed["walltime"] = clock(parse_walltime(asked["walltime"]))
    return dict(sorted(listed.items())), chunks


def _select_and_place(asked: Mapping[str, str]) -> tuple[str, str]:
    if "select" in asked:
        return asked["select"], asked.get("place", "free")
    if "nodes" in asked:
        return _old_nodes(asked["nodes"]), "scatter"
    counted = [f":{name}={asked[name]}" for name in ("mem", "ngpus") if name in asked]
    return f"1:ncpus={asked.get('ncpus', '1')}" + "".join(counted), asked.get("place", "pack")


def _old_nodes(text: str) -> str:
    match = re.fullmatch(r"(\d+)(?::ppn=(\d+))?", text)
    if not match:
        raise Refused(BAD_NODES, "node(s) specification error")
    per_node = match[2] or "1"
    return f"{match[1]}:ncpus={per_node}:mpiprocs={per_node}"
