"""MkDocs reads these pages a little differently than GitHub does; mkdocs.yml names this file as a hook."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""In the code of a table's cell GitHub wants ``\|``; MkDocs would show the backslash, and takes ``|`` as it is."""
    return re.sub(
        r"^\|.*$",
        lambda row: re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        markdown,
        flags=re.MULTILINE,
    )
