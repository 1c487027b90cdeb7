"""The table of docs/processors.md, made from the order that is applied: `python -m unspool.logits.order_table`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from unspool.logits.entry import ProcessorEntry, Stage
from unspool.logits.order import PROCESSORS
from unspool.registry import find_name

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_STAGES: dict[Stage, str] = {
    "control": "whatever the strategy",
    "sampling": "when sampling",
    "last": "last",
}


def make_table(entries: Sequence[ProcessorEntry] = PROCESSORS.built_in) -> str:
    """A Markdown table with a line for each processor, in the order of application; of the built-in ones by default."""
    lines = ["| # | processor | setting | off at | one per row | also reads |", "|---|---|---|---|---|---|"]
    number = 0
    for stage, title in _STAGES.items():
        lines.append(f"| | **{title}** | | | | |")
        for entry in entries:
            if entry.stage == stage:
                number += 1
                lines.append(f"| {number} {_describe(entry)}")
        if stage == "control":
            number += 1
            lines.append(f"| {number} | *your own processors* | `logits_processor=[…]` | | yours to say | |")
    return "\n".join(lines) + "\n"


def _describe(entry: ProcessorEntry) -> str:
    values = dict.fromkeys(("None", *(_spell(value) for value in entry.off)))
    rows = "yes" if any(parameter.may_be_per_row for parameter in entry.parameters[:1]) else ""
    also = ", ".join(f"`{name}`" for name in entry.reads)
    if entry.parameters and entry.parameters[0].yields_to:
        also = f"not read beside `{entry.parameters[0].yields_to}`"
    if entry.unless:
        also = f"replaced where `{entry.unless}` is set"
    return f"| `{find_name(entry.processor)}` | `{entry.setting}` | {', '.join(values)} | {rows} | {also} |"


def _spell(value: object) -> str:
    return "[]" if value in ([], ()) else str(value)


def put_table(page: str) -> str:
    """The page with the table between its two marks made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_table()}{END}{after}"


def main(path: str = "docs/processors.md") -> None:
    """Write the table into a page."""
    page = Path(path)
    page.write_text(put_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:2])
