"""The page as one file without a server: modules joined into one script, its policy made of hashes.

The browser asks for it, puts its runs where `PLACE` stands, and saves it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from unspool.page_policy import build_policy
from unspool.studio.files import read_assets

PLACE: Final = "{{runs}}"
_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?function\*?|const|class) (\w+)", re.MULTILINE)


@cache
def build_single_page() -> str:
    """The HTML text, with `PLACE` once, in an element that is not run."""
    script = join_modules("main.js")
    style = "\n".join(read_assets()[name].content.decode() for name in list_styles())
    policy = build_policy(scripts=[script], styles=[style], images="data:")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>unspool studio: kept runs</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="app"></div>\n<script id="kept" type="application/json">{PLACE}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def list_styles() -> list[str]:
    """The style sheets, in the order in which the page has them."""
    index = read_assets()["index.html"].content.decode()
    return re.findall(r'<link rel="stylesheet" href="studio/([\w.-]+)">', index)


def join_modules(entry: str) -> str:
    """A module and those that it imports as one script: each is a function that returns what it exports."""
    parts: list[str] = []
    done: dict[str, str] = {}
    _add_module(entry, parts, done, ())
    return "\n".join(parts)


def _add_module(name: str, parts: list[str], done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules import each other in a circle: {' → '.join((*above, name))}")
    if name in done:
        return
    source = read_assets()[name].content.decode()
    for found in _IMPORT.finditer(source):
        _add_module(found[2], parts, done, (*above, name))
    done[name] = f"module{len(done)}"
    body = _IMPORT.sub(lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = {done[found[2]]};\n", source)
    exported = [found[2] for found in _EXPORT.finditer(body)]
    body = _EXPORT.sub(r"\1 \2", body)
    if re.search(r"^(import|export)\b", body, re.MULTILINE) or "</script" in body.lower():
        raise ValueError(f"{name} has an import, an export or a text that can't be joined")
    parts.append(f"const {done[name]} = (() => {{\n{body}return {{ {', '.join(exported)} }};\n}})();")
