"""`unspool chat`: talk with a model, turn by turn."""

from __future__ import annotations

import argparse
import sys

from unspool.cli.chat_commands import Quit, execute_line
from unspool.cli.console import BOLD, DIM, is_debugging_asked, paint, say, say_bug, say_error, say_parts
from unspool.cli.detect import add_watermark_options, read_watermark
from unspool.cli.lines import Lines
from unspool.cli.model import add_model_options, load_text_model
from unspool.cli.parser import Parser
from unspool.cli.reading import check_text
from unspool.cli.session import Session
from unspool.cli.settings import add_settings, collect_settings, imply_sampling, refuse_tensors
from unspool.errors import UnspoolError


def build_parser() -> Parser:
    """The options of `unspool chat`."""
    parser = Parser(
        "chat",
        "[options]",
        "Talk with a model; /help within lists the commands there.\n"
        "Lines from a pipe are turns as well: the answers go to standard output, all else to standard error.",
        (
            "unspool chat",
            "unspool chat --do-sample --temperature 0.7 --system 'You answer in rhymes.'",
            "unspool chat < questions.txt > answers.txt",
        ),
    )
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="The system message.")
    group.add_argument("--stats", action="store_true", help="Print the speed after every answer.")
    add_model_options(parser)
    add_watermark_options(parser, is_required=False)
    add_settings(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Load, then take turns until the end of the input."""
    settings = imply_sampling(collect_settings(arguments))
    refuse_tensors(settings)
    mark = read_watermark(arguments)
    system = None if arguments.system is None else check_text(arguments.system, "--system")
    lm = load_text_model(arguments, chats=True)
    with Lines() as lines:
        session = Session(lm, system, settings, is_interactive=lines.is_interactive, mark=mark)
        session.shows_stats = arguments.stats
        if not lines.is_interactive:
            return _follow(session, lines)
        from unspool.models.counting import describe_weights  # it brings torch, which --help needs not

        name = paint(lm.name, BOLD, stream=sys.stderr)
        say_parts(name, f" on {lm.device}, {describe_weights(lm.model)}. /help lists the commands, ctrl-d leaves.\n")
        return _converse(session, lines, is_debugging=arguments.debug or is_debugging_asked())


def _converse(session: Session, lines: Lines, *, is_debugging: bool) -> int:
    """Take turns with a person until they leave; errors don't end it."""
    num_interrupts = 0
    while True:
        try:
            line = lines.read()
            num_interrupts = 0
            if line is None:
                say("")
                return 0
            _take_turn(session, line)
        except Quit:
            return 0
        except KeyboardInterrupt:
            num_interrupts += 1
            say("")
            if num_interrupts > 1:
                return 130
            say("(ctrl-c again leaves, and so does ctrl-d)", DIM)
        except UnspoolError as error:
            say_error(error)
            say("")
        except BrokenPipeError:
            raise
        except Exception as error:  # such as a GPU out of memory: the conversation is worth more than an exit code
            say_bug(error, is_debugging=is_debugging)
            say("")


def _follow(session: Session, lines: Lines) -> int:
    """Take turns with a pipe: all of its lines are tried, and the exit code is 2 if one failed."""
    code = 0
    while True:
        line = lines.read()
        if line is None:
            return code
        try:
            _take_turn(session, line)
        except Quit:
            return code
        except UnspoolError as error:
            say_error(error)
            code = 2


def _take_turn(session: Session, line: str) -> None:
    if not line.strip():
        return
    if line.startswith("/") and not line.startswith("//"):
        execute_line(session, line)
    else:
        session.answer(check_text(line.removeprefix("/") if line.startswith("//") else line, "the message"))
    if session.is_interactive:
        say("")
