"""hpc-det doctor: check what hpc_det needs of this machine and its cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator

import click

from hpc_det.cli.output import Output, output_options
from hpc_det.doctor import Finding
from hpc_det.doctor.examination import asking, examine
from hpc_det.errors import count, printable

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
_WIDTH = max(map(len, _COLORS))


@click.command()
@click.option("--cluster", metavar="NAME", help="Check only this profile; default: all of yours and the site's.")
@output_options
def doctor(cluster: str | None, output: Output) -> int:
    """Check what hpc_det needs of this machine and its cluster.

    Run it on a login node. It only queries and changes nothing. The exit code is 1 if there is a problem. A note is
    information, or reports an optional feature that is missing.

    \b
    Example:
      hpc-det doctor --cluster atlas
    """
    findings = examine(cluster, os.environ, asking(os.environ), shutil.which)
    if output.is_for_people:
        found = list(_shown(findings))
        click.echo(_in_all(found))
    else:
        found = list(findings)
        output.table([finding.as_json() for finding in found], [])  # JSON or CSV, which need no columns
    return int(any(finding.verdict == "problem" for finding in found))


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding as it arrives, below a heading with its subject, and yield it."""
    subject = None
    for finding in findings:
        if finding.subject != subject:
            subject = finding.subject
            click.secho(subject, bold=True)
        verdict = click.style(finding.verdict.ljust(_WIDTH), fg=_COLORS[finding.verdict])
        click.echo(f"  {verdict}  {printable(finding.message)}")
        if finding.remedy:
            click.echo(f"  {'':{_WIDTH}}  -> {printable(finding.remedy)}")
        yield finding


def _in_all(found: Iterable[Finding]) -> str:
    """Return the numbers of problems and notes, such as "1 problem, 2 notes"."""
    verdicts = [finding.verdict for finding in found]
    counts = {name: verdicts.count(name) for name in ("problem", "note")}
    return ", ".join(count(number, name) for name, number in counts.items())
