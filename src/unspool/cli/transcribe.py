"""`unspool transcribe`: sound files in, text or subtitles out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.console import DIM, ProgressLine, clean, is_terminal, say, say_error, write
from unspool.cli.model import add_assistant_option, add_model_options, load_assistant, load_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.settings import add_settings, collect_settings
from unspool.config.structures import STRUCTURES
from unspool.errors import InputError
from unspool.small_files import make_folder, write_text

if TYPE_CHECKING:
    from unspool.api.language_model import LanguageModel

FORMATS = ("txt", "srt", "vtt", "json")
SPEECH_MODEL = "whisper-tiny.en"
_OPTIONS = (
    "language",
    "task",
    "prompt",
    "condition_on_prev_tokens",
    "batch_size",
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
)


def build_parser() -> Parser:
    """The options of `unspool transcribe`."""
    parser = Parser(
        "transcribe",
        "FILE… [options]",
        "Write what is said in sound files: WAV of any kind; FLAC, Ogg and MP3 with the extra unspool[audio].\n"
        "FILE may be - for standard input, which is read as it arrives (WAV, or raw samples with --raw-rate).",
        (
            "unspool transcribe talk.wav",
            "unspool transcribe -o subtitles --format srt *.flac",
            "unspool transcribe --word-timestamps --format json talk.wav",
            "arecord -f S16_LE -r 16000 -t raw | unspool transcribe - --raw-rate 16000",
        ),
    )
    parser.general.add_argument("files", metavar="FILE", nargs="*", help=argparse.SUPPRESS)
    _add_output_options(parser)
    _add_speech_options(parser)
    add_assistant_option(add_model_options(parser, SPEECH_MODEL))
    add_settings(parser, left_out=("temperature",))
    return parser


def _add_output_options(parser: Parser) -> None:
    shown = parser.add_argument_group("what is written")
    shown.add_argument(
        "-o", "--output", metavar="DIR", help="Write one file for each sound into a folder, which is made if need be."
    )
    shown.add_argument("--format", metavar="KIND", help=f"{', '.join(FORMATS)}. [txt; times are shown on a terminal]")
    shown.add_argument("--word-timestamps", action="store_true", help="Find the times of words too (vtt, json).")
    shown.add_argument("--force", action="store_true", help="Write over files that exist.")
    shown.add_argument("--stats", action="store_true", help="Print the speed on standard error.")


def _add_speech_options(parser: Parser) -> None:
    speech = parser.add_argument_group("speech")
    speech.add_argument("--language", metavar="NAME", help="What is spoken: en, english, … [found from the sound]")
    speech.add_argument("--task", metavar="TASK", help="transcribe, or translate into English. [transcribe]")
    speech.add_argument("--prompt", metavar="TEXT", help="A text that might have come before: names, style.")
    speech.add_argument("--raw-rate", metavar="HZ", type=int, help="Standard input has raw 16-bit mono samples.")
    speech.add_argument(
        "--temperature",
        metavar="T,T,…",
        help="Temperatures to try while a threshold refuses a text. [0,0.2,0.4,0.6,0.8,1]",
    )
    speech.add_argument(
        "--condition-on-prev-tokens", action="store_true", default=None, help="Let a window read the text before it."
    )
    speech.add_argument("--batch-size", metavar="N", type=int, help="Files that are read at the same time. [8]")
    for name, meaning in (
        ("compression-ratio", "A text that repeats itself more is refused. [1.35]"),
        ("logprob", "A less likely text is refused. [-1]"),
        ("no-speech", "Above this probability, a refused text is taken for silence. [0.6]"),
    ):
        speech.add_argument(f"--{name}-threshold", metavar="X", help=f"{meaning} none: off.")


def execute(arguments: argparse.Namespace) -> int:
    """Load, listen, write."""
    settings = collect_settings(arguments)
    # A grammar describes the whole text, without the times that it would be written between.
    stamps = "word" if arguments.word_timestamps else not any(settings.get(name) for name in STRUCTURES)
    settings = {**settings, **_collect_options(arguments), "return_timestamps": stamps}
    kind = _choose_kind(arguments)
    targets = _find_targets(arguments, kind)
    sounds = _open_all(arguments)  # what can't be read is refused before a model is loaded
    lm = load_model(arguments)
    if (assistant := load_assistant(arguments)) is not None:
        settings["assistant_model"] = assistant
    if targets:
        return _write_files(lm, sounds, targets, kind, settings, arguments)
    if len(sounds) == 1 and kind in ("txt", "srt", "vtt"):
        _print_live(lm, sounds[0], kind, settings, arguments)
    else:
        _print_all(lm, sounds, kind, settings, arguments)
    return 0


def _collect_options(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(arguments, name) for name in _OPTIONS}
    found = {name: value for name, value in found.items() if value is not None}
    for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
        if name in found:
            found[name] = None if found[name] == "none" else _read_number(f"--{name.replace('_', '-')}", found[name])
    if arguments.temperature is not None:
        found["temperature"] = tuple(_read_number("--temperature", one) for one in arguments.temperature.split(","))
    return found


def _read_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} {text[:40]!r} is no number") from None


def _choose_kind(arguments: argparse.Namespace) -> str:
    kind = arguments.format or "txt"
    if kind not in FORMATS:
        raise UsageError(f"--format {kind[:40]!r} is not one of {', '.join(FORMATS)}")
    if arguments.word_timestamps and kind not in ("vtt", "json"):
        raise UsageError(f"--word-timestamps are written with --format vtt or json, not with {kind}; add one of them")
    if kind in ("srt", "vtt") and len(arguments.files) > 1 and arguments.output is None:
        raise UsageError(f"a {kind} file has one sound's subtitles, and {len(arguments.files)} are named; add -o DIR")
    return kind


def _find_targets(arguments: argparse.Namespace, kind: str) -> list[Path]:
    """The file of each sound, if a folder was named."""
    if not arguments.files:
        raise UsageError("name a sound file, or - for standard input")
    if arguments.files.count("-") > 1:
        raise UsageError("- names standard input, which can be read once")
    if arguments.raw_rate is not None and "-" not in arguments.files:
        raise UsageError("--raw-rate is for samples from standard input; add -, or leave it out: a file has its rate")
    if arguments.output is None:
        return []
    folder = Path(arguments.output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {str(folder)!r} is a file; name a folder")
    targets = [folder / f"{'stdin' if name == '-' else Path(name).stem}.{kind}" for name in arguments.files]
    for place, path in enumerate(targets):
        if path in targets[:place]:
            raise UsageError(f"two sounds would be written to {str(path)!r}; transcribe them into different folders")
        if path.exists() and not arguments.force:
            raise UsageError(f"{str(path)!r} exists already; --force writes over it")
    return targets


def _open_all(arguments: argparse.Namespace) -> list[Any]:
    from unspool.speech.sound import open_sound, open_stream

    return [
        open_stream(sys.stdin.buffer, arguments.raw_rate, "standard input") if name == "-" else open_sound(name)
        for name in arguments.files
    ]


class _Bar:
    """The progress of all sounds on one line."""

    def __init__(self, line: ProgressLine, names: list[str]) -> None:
        self._line, self._names = line, names
        self.seconds = 0.0  # of sound that was read, of the longest

    def show(self, index: int, done: float, total: float | None) -> None:
        """Draw one sound's progress."""
        self.seconds = max(self.seconds, done)
        label = Path(self._names[index]).name
        if total:
            self._line.show_bar(label, int(done * 100), max(1, int(total * 100)))
        else:
            self._line.show(f"{label}: {done:.0f} s")


def _print_live(
    lm: LanguageModel, sound: Any, kind: str, settings: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Segments as they are written."""
    from unspool.speech.writing import format_srt, format_time, format_vtt

    if kind == "vtt":
        write("WEBVTT\n\n")
    shows_times = kind == "txt" and is_terminal(sys.stdout)
    place, started = 0, time.perf_counter()
    with ProgressLine() as line:
        bar = _Bar(line, arguments.files)
        with closing(lm.stream_segments(sound, progress=bar.show, **settings)) as segments:
            for segment in segments:
                text = segment.text.strip()
                if not text:
                    continue
                place += 1
                line.clear()
                if kind == "srt":
                    write(format_srt(place, segment))
                elif kind == "vtt":
                    write(format_vtt(segment))
                else:
                    times = f"[{format_time(segment.start)} → {format_time(segment.end)}]  " if shows_times else ""
                    write(f"{times}{clean(text)}\n")
    if not place:
        say("no speech was found", DIM)
    _say_stats(bar.seconds, time.perf_counter() - started, arguments)


def _print_all(
    lm: LanguageModel, sounds: list[Any], kind: str, settings: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Whole transcripts, each under its file's name if there are several; JSON as one object per line of files."""
    from unspool.speech.writing import find_writer

    made = _transcribe(lm, sounds, settings, arguments)
    if kind == "json":
        objects = [{"file": name, **one.as_dict()} for name, one in zip(arguments.files, made, strict=True)]
        write(json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False) + "\n")
    else:
        for name, one in zip(arguments.files, made, strict=True):
            write((f"{clean(name)}:\n" if len(made) > 1 else "") + find_writer(kind)(one))
    _say_stats(sum(one.duration for one in made), sum(one.seconds for one in made), arguments)


def _write_files(
    lm: LanguageModel,
    sounds: list[Any],
    targets: list[Path],
    kind: str,
    settings: dict[str, Any],
    arguments: argparse.Namespace,
) -> int:
    """Each file as soon as its sound is whole; 2 if a sound could not be read. The others are written all the same."""
    from unspool.api.transcribe import transcribe_each
    from unspool.speech.writing import find_writer

    started, seconds, code = time.perf_counter(), 0.0, 0
    left = dict(enumerate(sounds))  # those that are not written
    with ProgressLine() as line:

        def write_each(places: list[int]) -> None:
            nonlocal seconds
            bar = _Bar(line, [arguments.files[place] for place in places])
            with closing(transcribe_each(lm, [left[place] for place in places], settings, bar.show)) as made:
                for index, one in made:
                    path = targets[places[index]]
                    make_folder(path.parent)
                    write_text(path, find_writer(kind)(one))
                    line.clear()
                    write(f"{path}\n")
                    del left[places[index]]
                    seconds += one.duration

        try:
            write_each(list(left))
        except InputError:
            if len(left) == 1 or not all(sound.can_repeat for sound in left.values()):
                raise
            for place in list(left):  # one of those that were read together: which, is seen when each is read alone
                try:
                    write_each([place])
                except InputError as error:
                    line.clear()
                    say_error(error)
                    code = 2
    _say_stats(seconds, time.perf_counter() - started, arguments)
    return code


def _transcribe(
    lm: LanguageModel, sounds: list[Any], settings: dict[str, Any], arguments: argparse.Namespace
) -> list[Any]:
    with ProgressLine() as line:
        bar = _Bar(line, arguments.files)
        return list(lm.transcribe(sounds, progress=bar.show, **settings))


def _say_stats(sound: float, work: float, arguments: argparse.Namespace) -> None:
    """The speed, from seconds of sound and of work."""
    if arguments.stats:
        say(f"{sound:.1f} s of sound in {work:.1f} s · real-time factor {work / max(sound, 1e-9):.3f}", DIM)
