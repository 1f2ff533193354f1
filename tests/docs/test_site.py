"""The site, as `make docs` builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a strict build, which fails on a broken link or anchor, and on a page outside the
    navigation.
    """
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.integration
def test_the_site_builds_strictly_with_every_page(site: Path) -> None:
    names = [page.relative_to(REPOSITORY / "docs").with_suffix(".html") for page in PAGES]
    built = [site / (name.with_name("index.html") if name.stem == "README" else name) for name in names]
    assert [file for file in built if not file.is_file()] == []


@pytest.mark.integration
def test_every_fenced_block_is_rendered_as_code(site: Path) -> None:
    """If mkdocs does not recognise a block, the page shows its backquotes, and its comments as headings."""
    rendered = {page: page.read_text() for page in site.rglob("*.html")}
    assert [page for page, html in rendered.items() if "```" in _text(html) or "# file:" in _text(html)] == []


def _text(html: str) -> str:
    """Return a page without its code blocks and scripts."""
    return re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", html)


@pytest.mark.integration
def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)|<link[^>]* rel="stylesheet"[^>]* href="(https?:[^"]+)'
    )
    assert {page: found for page in site.rglob("*.html") if (found := loads.findall(page.read_text()))} == {}
