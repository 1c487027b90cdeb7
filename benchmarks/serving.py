"""Streams over HTTP: tokens per second, time to the first token and between tokens, beside the bare engine.

    python benchmarks/serving.py --model smollm2-135m --streams 1 2 4 8 16          # our server, and the engine alone
    python benchmarks/serving.py --peer llama-server=http://127.0.0.1:8080          # and others with OpenAI's routes
    python benchmarks/serving.py --model FOLDER --quantize none --peer vllm=http://127.0.0.1:8000#FOLDER  # by its name
    python benchmarks/serving.py --draw results.json more.json docs/images/serving.svg   # what --json wrote, as a chart

Every stream sends one completion after the other until the round is over. All servers are asked the same by the same
client: prompts of different words, so that no cache helps, a fixed number of new tokens, the likeliest token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_WORDS = ("river", "stone", "lantern", "winter", "market", "garden", "silver", "harbour", "engine", "letter", "copper")


@dataclass
class Measured:
    """What the streams of one round saw."""

    seconds: float = 0.0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, float]:
        return {
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "first_p50_ms": round(1e3 * statistics.median(self.firsts), 1),
            "first_p95_ms": round(1e3 * _find_high(self.firsts), 1),
            "between_p50_ms": round(1e3 * statistics.median(self.between), 2),
            "between_p95_ms": round(1e3 * _find_high(self.between), 2),
        }


def _find_high(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def make_prompt(place: int, num_words: int) -> str:
    """A prompt that no other begins like."""
    words = (_WORDS[(place * 7 + step * step) % len(_WORDS)] for step in range(num_words))
    return f"{place} " + " ".join(words)


Ask = Callable[[str, int], Coroutine[Any, Any, list[float]]]
"""Send a prompt for so many tokens; the times at which pieces came."""


async def run_round(ask: Ask, streams: int, requests: int, words: int, new_tokens: int, start: int) -> Measured:
    """So many requests over so many streams."""
    made, may_end = Measured(), getattr(ask, "may_end", False)
    places = iter(range(start, start + requests))

    async def stream() -> None:
        for place in places:
            began = time.perf_counter()
            times = await ask(make_prompt(place, words), new_tokens)
            made.tokens += min(new_tokens, len(times)) if may_end else new_tokens
            made.firsts.append(times[0] - began)
            made.between += [after - before for before, after in itertools.pairwise(times)]

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    made.seconds = time.perf_counter() - began
    return made


def ask_server(address: str, model: str, *, may_end: bool = False) -> Ask:
    """A raw client, which costs as little as it can. A server that knows no `ignore_eos` may end a text: its pieces are
    counted then."""
    parts = urlsplit(address)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80

    async def ask(prompt: str, new_tokens: int) -> list[float]:
        body = json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": new_tokens,
                "temperature": 0,
                "stream": True,
                **({} if may_end else {"ignore_eos": True}),
            }
        ).encode()
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        head = "\r\n".join(lines) + "\r\n\r\n"
        writer.write(head.encode() + body)
        times: list[float] = []
        status = await reader.readline()
        if b"200" not in status:
            raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
        while True:
            line = await reader.readline()
            if not line or line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
        writer.close()
        return times

    ask.may_end = may_end
    return ask


def ask_engine(engine: Any) -> Ask:
    """The same without HTTP."""

    async def ask(prompt: str, new_tokens: int) -> list[float]:
        request = engine.submit(prompt, max_new_tokens=new_tokens, eos_token_id=None)
        return [time.perf_counter() async for _ in request]

    return ask


def measure(asks: dict[str, Ask], arguments: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """All counts of streams; rounds of all that is measured take turns, and the best round of each counts."""
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in asks}
    for ask in asks.values():
        asyncio.run(run_round(ask, 1, 1, arguments.words, 4, 10_000))  # what is made once
    place = 0
    for streams in arguments.streams:
        rounds: dict[str, list[Measured]] = {name: [] for name in asks}
        for _ in range(arguments.rounds):
            requests = max(arguments.requests, streams)
            for name, ask in asks.items():
                time.sleep(arguments.pause)
                made = run_round(ask, streams, requests, arguments.words, arguments.new_tokens, place)
                rounds[name].append(asyncio.run(made))
            place += requests
        for name, measured in rounds.items():
            best = max(measured, key=lambda one: one.tokens / one.seconds)
            found[name][streams] = best.describe()
            print(f"{name:<14} {streams:>3} streams  {json.dumps(found[name][streams])}", flush=True)
    return found


def start_server(model: str, rows: int, quantize: str) -> tuple[subprocess.Popen[bytes], str]:
    """`unspool serve` as a process of its own."""
    ready = Path(tempfile.mkdtemp()) / "ready"
    command = [sys.executable, "-m", "unspool", "serve", "--port", "0", "--ready-file", str(ready), "--log", "none"]
    command += ["--max-rows", str(rows), "--quantize", quantize, f"measured={model}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (ready.exists() and ready.read_text().endswith("\n")):
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(0.05)
    return process, ready.read_text().strip()


def draw_chart(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Tokens per second of every server, one panel per number of streams, as SVG."""
    from unspool.bench.chart import draw_style

    counts = list(dict.fromkeys(count for rounds in found.values() for count in rounds))
    parts, y = [], 40.0
    for count in counts:
        parts.append(f'<text class="title" x="24" y="{y}">{count} stream{"s" if int(count) > 1 else ""}</text>')
        rates = {name: rounds[count]["tokens_per_second"] for name, rounds in found.items() if count in rounds}
        for name, rate in rates.items():
            y += 22
            width, kind = 380 * rate / max(rates.values()), "own" if name.startswith("unspool") else "peer"
            parts.append(f'<text class="name" x="170" y="{y}">{escape(name)}</text>')
            parts.append(f'<rect class="{kind}" x="180" y="{y - 12}" width="{width:.1f}" height="15" rx="3"/>')
            parts.append(f'<text class="soft" x="{188 + width:.1f}" y="{y}">{rate:,.0f} tokens/s</text>')
        y += 36
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bench" width="680" height="{y:.0f}" viewBox="0 0 680 {y:.0f}" '
        f'role="img" aria-label="tokens per second by server and number of streams">{draw_style()}'
        f'<rect class="back" width="680" height="{y:.0f}" rx="12"/>' + "".join(parts) + "</svg>\n"
    )


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peer", nargs="*", default=[], metavar="NAME=URL", help="Servers that run already.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=16, help="Of each round.")
    parser.add_argument("--words", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--pause", type=float, default=3.0, help="Seconds between rounds: threads of the one before may go on spinning."
    )
    parser.add_argument("--may-end", nargs="*", default=[], metavar="NAME", help="Peers that know no `ignore_eos`.")
    parser.add_argument("--no-engine", action="store_true", help="Measure servers alone.")
    parser.add_argument(
        "--quantize", default="auto", help="Of our own weights: int8, int4 or none. [as the file has them]"
    )
    parser.add_argument("--json", type=Path, help="Write what was measured to this file.")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE", help="Draw files of --json; the last is the picture."
    )
    arguments = parser.parse_args()
    if arguments.draw:
        *files, picture = arguments.draw
        drawn: dict[str, dict[str, dict[str, float]]] = {}
        for file in files:
            drawn |= json.loads(file.read_text())
        picture.write_text(draw_chart(drawn))
        return
    asks = {}
    for name, _, address in (one.partition("=") for one in arguments.peer):
        url, _, model = address.partition("#")
        asks[name] = ask_server(url, model or "measured", may_end=name in arguments.may_end)
    rows = max(arguments.streams)
    with contextlib.ExitStack() as stack:
        if not arguments.no_engine:
            import unspool

            quantize = None if arguments.quantize == "none" else arguments.quantize
            lm = unspool.load(arguments.model, quantize=quantize)
            asks["engine"] = ask_engine(stack.enter_context(unspool.Engine(lm, max_rows=rows)))
        process, address = start_server(arguments.model, rows, arguments.quantize)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        asks["server"] = ask_server(address, "measured")
        found = measure(asks, arguments)
    if arguments.json:
        kept = {{"server": f"unspool {arguments.quantize}"}.get(name, name): rounds for name, rounds in found.items()}
        arguments.json.write_text(json.dumps(kept, indent=1))
    for name in [name for name in asks if name != "server"]:
        for streams in arguments.streams:
            ratio = found["server"][streams]["tokens_per_second"] / found[name][streams]["tokens_per_second"]
            print(f"{streams} streams: the server has {ratio:.2f} times the tokens of {name}")


if __name__ == "__main__":
    main()
