"""The blocks of code of the documents, by document and number, and what runs each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "examples" / "seeds"
COUNTS = {"strategies": 18, "decoding_methods": 17, "first_steps": 6, "utilities": 50, "stopping": 1}
"""How many blocks each document has. Their fences number 186; two of them are inside the last one, in comments."""

# Blocks that another block's script holds, since they go on from it.
WITHIN = {
    ("decoding_methods", 14): 13,
    ("first_steps", 2): 1,
    ("first_steps", 3): 1,
    ("utilities", 1): 0,
}
# Blocks that are no script, and why; a test below `tests/` that shows the same.
OTHERWISE = {
    ("decoding_methods", 15): ("the text of an error", "recipes/test_recipes::requirements"),
    ("decoding_methods", 16): ("a recipe's file", "recipes/test_recipes::a_folder_in_the_references_manner"),
    ("first_steps", 0): ("a shell command: `pip install 'unspool[hub]'`", "cli/test_package::*"),
    ("first_steps", 4): (
        "fetches an image from the web; a chat with one",
        "api/test_pictured::chats_are_answered_as_transformers_does",
    ),
    ("utilities", 2): (
        "MusicGen needs an audio codec: a small random one",
        "pretrained/test_voices::the_documents_example",
    ),
    ("first_steps", 5): ("an import that is not finished, which is no Python", "pretrained/test_auto::speech"),
}
# Scripts that run natively and not over transformers' objects, and why.
NATIVE_ALONE = {
    "AutoProcessor": "the small Whisper hears 0.6 s, and transformers' features are of whole seconds",
    "MambaCache": "the result of transformers' Mamba has its cache under another name than in the document",
}


@dataclass(frozen=True)
class Block:
    """A block, and the script, the test or the reason that goes with it."""

    document: str
    number: int

    @property
    def key(self) -> tuple[str, int]:
        """Its place in the tables above."""
        return self.document, self.number

    @property
    def script(self) -> Path:
        """The script that it is in."""
        return SCRIPTS / f"{self.document}_{WITHIN.get(self.key, self.number):02}.py"

    @property
    def is_run(self) -> bool:
        """Whether it is a script."""
        return self.script.is_file()

    @property
    def native_alone(self) -> str | None:
        """Why it is not run over transformers' objects, if it is not."""
        text = self.script.read_text(encoding="utf-8") if self.is_run else ""
        return next((reason for word, reason in NATIVE_ALONE.items() if word in text), None)


BLOCKS = [Block(document, number) for document, count in COUNTS.items() for number in range(count)]
