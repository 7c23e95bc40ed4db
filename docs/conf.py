"""The documentation: Markdown (MyST), one page per question, and the reference made of the docstrings."""

from __future__ import annotations

import re

project = "hybridflow"
author = "the hybridflow authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "hybridflow"
smartquotes = False
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"undoc-members": True}
autodoc_typehints = "signature"
python_use_unqualified_type_names = True

_ITEM = re.compile(r"^`?[\w, ]{1,40}`?: ")
_CODE = re.compile(r"`+([^`\n]+)`+")
_SPECIAL = re.compile(r"([*|\\]|_(?=\W|$))")


def as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: lines that are indented go on with the one before, `name: text` lines make a list."""
    joined: list[str] = []
    for line in lines:
        if line.startswith((" ", "\t")) and joined and joined[-1]:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    lines[:] = []
    item = False
    for line in joined:
        starts = bool(_ITEM.match(line)) and (
            item or len([one for one in joined if _ITEM.match(one)]) > 1
        )
        if starts and not item and lines and lines[-1]:
            lines.append("")
        if not line:
            item = False
        elif starts:
            item = True
        lines.append(("* " if starts else "  " if item else "") + _escaped(line))


def _escaped(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(
        f"``{part}``" if i % 2 else _SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts)
    )


def setup(app) -> None:
    app.connect("autodoc-process-docstring", as_rst)
