"""A self-contained HTML page, which needs no server and no network: a template with page.css and page.js inlined.

A Content-Security-Policy with the hashes of the inline script and styles allows nothing else to run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hpc_det.errors import count, length_in_words
from hpc_det.view.formatting import date_and_time, duration, number, percent

HERE = Path(__file__).parent


def document(template: str, context: dict[str, Any], refresh_s: float | None) -> str:
    """Return the text of an HTML file. `refresh_s`: seconds between two reloads by the page's script; None: none."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "duration": duration, "percent": percent}
    environment.filters |= {"count": count, "length_in": length_in_words}
    environment.filters |= {"moment": date_and_time, "json": json.dumps}
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return environment.get_template(template).render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        refresh_s=refresh_s,
        **context,
    )


def _hash(text: str) -> str:
    """Return the hash of an inline script or style, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
