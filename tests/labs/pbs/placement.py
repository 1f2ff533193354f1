"""Find the nodes for a job, and the `comment` when there are none."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.labs.pbs.job import Job, Slot
from tests.labs.pbs.resources import Chunk
from tests.labs.pbs.state import Pbs


@dataclass
class Room:
    """The free resources of one node."""

    ncpus: int
    ngpus: int
    users: int = 0

    def fits(self, chunk: Chunk) -> bool:
        return chunk.ncpus <= self.ncpus and chunk.ngpus <= self.ngpus

    def take(self, chunk: Chunk) -> None:
        self.ncpus, self.ngpus, self.users = self.ncpus - chunk.ncpus, self.ngpus - chunk.ngpus, self.users + 1

    def close(self) -> None:
        self.ncpus = self.ngpus = 0


Rooms = dict[str, Room]


def rooms(pbs: Pbs, without: Collection[Job] = ()) -> Rooms:
    """Return the rooms of the nodes that are up, as if the jobs in `without` had left."""
    found = {name: Room(pbs.settings.ncpus, pbs.settings.ngpus) for name, node in pbs.nodes.items() if node.up}
    for job in pbs.on_nodes():
        if job.state != "S" and job not in without:
            take(found, job, job.slots)
    return found


def take(free: Rooms, job: Job, slots: Collection[Slot]) -> None:
    for slot in slots:
        if slot.node in free:
            free[slot.node].take(slot.chunk)
            if "excl" in job.resources["place"]:
                free[slot.node].close()


def place(job: Job, free: Rooms) -> list[Slot] | None:
    """Return a slot for each chunk, on nodes in order, or None if the job does not fit."""
    rest = {name: Room(room.ncpus, room.ngpus, room.users) for name, room in free.items()}
    names = job.resources["place"]
    if "excl" in names:
        rest = {name: room for name, room in rest.items() if not room.users}
    if names.startswith("pack"):
        tries: Iterator[Rooms] = ({name: room} for name, room in rest.items())
    else:
        tries = iter([rest])
    return next((slots for few in tries if (slots := _fill(job, few, scatter="scatter" in names))), None)


def _fill(job: Job, rest: Rooms, scatter: bool) -> list[Slot] | None:
    slots: list[Slot] = []
    for chunk in job.chunks:
        taken = {slot.node for slot in slots} if scatter else set()
        can = (name for name, room in rest.items() if name not in taken and room.fits(chunk))
        name = next((name for name in can if chunk.host in (None, name)), None)
        if name is None:
            return None
        slots.append(Slot(name, rest[name].users, chunk))
        rest[name].take(chunk)
    return slots


def fits_again(job: Job, free: Rooms) -> bool:
    """Return whether a suspended job fits on its own nodes."""
    rest = {name: Room(room.ncpus, room.ngpus, room.users) for name, room in free.items()}
    for slot in job.slots:
        if slot.node not in rest or not rest[slot.node].fits(slot.chunk):
            return False
        rest[slot.node].take(slot.chunk)
    return True


def why_not(pbs: Pbs, job: Job, free: Rooms) -> str:
    nodes, total = len(pbs.nodes), len(pbs.nodes) * pbs.settings.ncpus
    wanted = int(job.resources["ncpus"])
    available = sum(room.ncpus for room in free.values())
    if "scatter" in job.resources["place"] and len(job.chunks) > nodes:
        return "Can Never Run: Not enough total nodes available"
    amounts = f"Insufficient amount of resource: ncpus (R: {wanted} A: {{}} T: {total})"
    if wanted > total:
        return f"Can Never Run: {amounts.format(total)}"
    with_room = [room for room in free.values() if room.ncpus]
    if not with_room or ("scatter" in job.resources["place"] and len(job.chunks) > len(free)) or wanted <= available:
        return "Not Running: Not enough free nodes available"
    return f"Not Running: {amounts.format(available)}"
