"""A hook of mkdocs: the site shows console blocks without the marks that tests read.

The words after ```` ```console ```` (tests/docs/page.py) are part of the pages for tests alone. mkdocs' superfences
would not recognise a block with such words, and would render it as text.
"""

from __future__ import annotations

import re
from typing import Any

_MARKED = re.compile(r"^(```console) .+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with plain console blocks (mkdocs.org/user-guide/configuration/#hooks)."""
    return _MARKED.sub(r"\1", markdown)
