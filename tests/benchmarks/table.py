"""Print results as a Markdown table, for docs/reference/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n{title}\n")
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |")
