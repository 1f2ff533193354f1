"""Elements of SVG. Whatever a text holds, it stays text."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape


def element(name: str, *children: str, **attributes: object) -> Markup:
    """`class_` and `data_t` are class and data-t; None is left out. Children that are no Markup are text."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, children))}</{name}>")


def _short(value: object) -> object:
    """A tenth of a pixel is as good as any."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def picture(width: float, height: float, said: str, parts: Iterable[str], class_: str = "picture") -> Markup:
    """`said`: what it shows, for who cannot see it."""
    inside = (element("title", said), *parts)
    return element("svg", *inside, viewBox=f"0 0 {width:g} {height:g}", role="img", class_=class_)


def text(x: float, y: float, words: str, class_: str | None = None, anchor: str | None = None) -> Markup:
    return element("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("path", d=f"M{_short(x1)},{_short(y1)}L{_short(x2)},{_short(y2)}", class_=class_)


def of_trial(trial: int, *children: str, name: str = "g", class_: str = "", **attributes: object) -> Markup:
    """What belongs to a trial: it is highlighted with everything else that does."""
    return element(name, *children, class_=f"t {class_}".rstrip(), data_t=trial, **attributes)


def place(x: float, y: float) -> str:
    """A point of a path."""
    return f"{_short(float(x))},{_short(float(y))}"
