"""hpc-det doctor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator

import click

from hpc_det.cli.output import Output, output_options
from hpc_det.doctor import Finding
from hpc_det.doctor.examination import asking, examine
from hpc_det.errors import printable
from hpc_det.view.formatting import count

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
_WIDTH = max(map(len, _COLORS))


@click.command()
@click.option("--cluster", metavar="NAME", help="Only this profile; by default, all of yours and the site's.")
@output_options
def doctor(cluster: str | None, output: Output) -> int:
    """Check what of hpc_det this machine and its cluster support.

    Run it on a login node. It asks, and changes nothing. The exit code is 1 where something is a problem; a note is
    good to know, or missing only if you want it.

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
        output.table([finding.as_json() for finding in found], [])
    return int(any(finding.verdict == "problem" for finding in found))


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Each as it comes, below a line with its subject."""
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
    verdicts = [finding.verdict for finding in found]
    counts = {name: verdicts.count(name) for name in ("problem", "note")}
    return ", ".join(count(number, name) for name, number in counts.items())
