"""Draw what a command prints as a terminal window: `python docs/make_picture.py OUT.svg TITLE < text`.

`docs/images/run.svg` is made with: make run 2>&1 | python docs/make_picture.py docs/images/run.svg "make run"
"""

from __future__ import annotations

import sys
import textwrap
from html import escape
from pathlib import Path

COLUMNS, LINE, CHARACTER, MARGIN = 92, 19, 8.05, 18


def draw(title: str, text: str) -> str:
    """An SVG of a terminal that shows `$ title` and the text under it."""
    lines = [("prompt", f"$ {title}")]
    for line in text.rstrip("\n").splitlines():
        kind = "step" if line.startswith("==>") else "stats" if "tokens/s" in line else "text"
        lines += [(kind, part) for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]]
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN + 26
    body = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + 38 + row * LINE}" class="{kind}" xml:space="preserve">{escape(line)}</text>'
        for row, (kind, line) in enumerate(lines)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 13.4px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d7dce4; }}
.prompt {{ fill: #8bd49c; font-weight: 600; }} .step {{ fill: #7aa2d6; }} .stats {{ fill: #8a93a3; }}
</style>
<rect width="{width}" height="{height}" rx="9" fill="#171b22"/>
<circle cx="20" cy="18" r="5.5" fill="#e0635c"/><circle cx="38" cy="18" r="5.5" fill="#e3b04b"/>
<circle cx="56" cy="18" r="5.5" fill="#6dbb63"/>
{body}
</svg>
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(sys.argv[2], sys.stdin.read()))
