"""`unspool speak`: a text in, its sound out as a WAV file."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from unspool.cli.console import DIM, say
from unspool.cli.parser import Parser, UsageError
from unspool.cli.settings import add_settings, collect_settings, imply_sampling, refuse_tensors
from unspool.errors import InputError


def build_parser() -> Parser:
    """The options of `unspool speak`."""
    parser = Parser(
        "speak",
        "TEXT -o FILE.wav --model MODEL [options]",
        "Write the sound of a text: speech or music, as the model does. TEXT may come on standard input.",
        (
            'unspool speak "Hello, world." -o hello.wav --model ./mms-tts-eng',
            'unspool speak "80s pop with bassy drums" -o pop.wav --model ./musicgen-small --max-new-tokens 256',
            'unspool speak "Hello." -o hello.wav --model ./speecht5_tts --vocoder ./speecht5_hifigan --voice voice.npy',
        ),
    )
    parser.general.add_argument("text", metavar="TEXT", nargs="?", help=argparse.SUPPRESS)
    sound = parser.add_argument_group("sound")
    sound.add_argument("-o", "--output", metavar="FILE", required=True, help="The WAV file to write.")
    sound.add_argument("-m", "--model", metavar="MODEL", required=True, help="A folder or a hub id.")
    sound.add_argument("--vocoder", metavar="FOLDER", help="Makes sound of spectrograms (SpeechT5).")
    sound.add_argument("--voice", metavar="FILE", help="A .npy file of a speaker's numbers (SpeechT5).")
    sound.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [the GPU if there is one]")
    sound.add_argument("--dtype", metavar="DTYPE", help="float32, float16 or bfloat16. [float32 on a CPU]")
    add_settings(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Load, speak, write the file."""
    settings = imply_sampling(collect_settings(arguments))
    refuse_tensors(settings)
    text = sys.stdin.read(1 << 20) if arguments.text is None else arguments.text
    if not text.strip():
        raise UsageError("there is nothing to say: give a text, or send it on standard input")
    output = Path(arguments.output)
    if output.suffix.lower() != ".wav" or not output.absolute().parent.is_dir():
        raise UsageError(f"-o names a .wav file in a folder that is there, not {arguments.output[:80]!r}")
    from unspool.pretrained.voices import AutoModelForTextToWaveform, Speaker
    from unspool.speech.wav import encode_wav

    placed = {name: getattr(arguments, name) for name in ("device", "dtype") if getattr(arguments, name) is not None}
    say(f"loading {arguments.model}", DIM)
    model = AutoModelForTextToWaveform.from_pretrained(arguments.model, **placed)
    speaker = Speaker(model, arguments.model, arguments.vocoder)
    voice = {} if arguments.voice is None else {"speaker_embeddings": _read_voice(Path(arguments.voice))}
    say(f"speaking {len(text)} characters", DIM)
    begun = time.perf_counter()
    sound = speaker.speak(text, **settings, **voice)
    output.write_bytes(encode_wav(sound.samples, sound.rate))
    say(f"{output}: {sound.seconds:.1f} s of sound in {time.perf_counter() - begun:.1f} s", DIM)
    return 0


def _read_voice(path: Path) -> Any:
    """A speaker's numbers, of a file without code."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)[:200]!r} is no .npy file of numbers: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or not 0 < found.size <= 1 << 16:
        raise InputError(f"{str(path)[:200]!r} holds no speaker's numbers (1, numbers)")
    if not np.isfinite(found).all():
        raise InputError(f"{str(path)[:200]!r} holds NaN or infinite numbers")
    return found.reshape(1, -1)
