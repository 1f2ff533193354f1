"""The pages that are generated from the code and the tests: `python -m tests.docs.generated` writes them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conformance import table
from tests.docs import cli_page, environment_page, schema_tables

DOCS = Path(__file__).parents[2] / "docs"
GENERATED: dict[str, Callable[[str], str]] = {
    "reference/cli.md": lambda _: cli_page.made(),
    "reference/experiment-file.md": lambda page: schema_tables.filled(page, "experiment"),
    "reference/cluster-profile.md": lambda page: schema_tables.filled(page, "profile"),
    "reference/environment-variables.md": lambda _: environment_page.made(),
    "how-to/port-from-determined.md": table.filled,
}
"""By the path of the page: a function from the page as it is to the page as the code has it now."""


def main() -> None:
    for name, generate in GENERATED.items():
        page = DOCS / name
        page.write_text(generate(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
