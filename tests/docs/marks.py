"""A hook of mkdocs: the site shows console blocks without the marks that tests read.

The words after ```` ```console ```` (tests/docs/page.py) are part of the pages for tests alone. mkdocs' superfences
would not recognise a block with such words, and would render it as text. In these blocks, `$` is the only prompt.
"""

from __future__ import annotations

import re
from typing import Any

from pygments.lexers.shell import BashSessionLexer

_MARKED = re.compile(r"^(```console) .+$", re.MULTILINE)
# Pygments takes a line that begins with # for a command of root; here it is output, such as `#SBATCH --nodes=2`.
BashSessionLexer._ps1rgx = re.compile(r"^(\$ ?)(.*\n?)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with plain console blocks (mkdocs.org/user-guide/configuration/#hooks)."""
    return _MARKED.sub(r"\1", markdown)
