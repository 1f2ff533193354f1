"""The pages of docs/reference that are generated from the code: `python -m tests.docs.generated` writes them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.docs import cli_page, environment_page, schema_tables

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
GENERATED: dict[str, Callable[[str], str]] = {
    "cli.md": lambda _: cli_page.made(),
    "experiment-file.md": lambda page: schema_tables.filled(page, "experiment"),
    "cluster-profile.md": lambda page: schema_tables.filled(page, "profile"),
    "environment-variables.md": lambda _: environment_page.made(),
}
"""By the name of the page: a function from the page as it is to the page as the code has it now."""


def main() -> None:
    for name, generate in GENERATED.items():
        page = REFERENCE / name
        page.write_text(generate(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
