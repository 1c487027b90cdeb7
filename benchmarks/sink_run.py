"""A long text from a SinkCache: how fluent it stays, as the perplexity of the model's own output in windows.

python benchmarks/sink_run.py                      # 20,000 tokens with the default model
python benchmarks/sink_run.py --tokens 200 --window 64   # a smoke run
"""

from __future__ import annotations

import argparse
import math
import time

import unspool

PROMPT = "Once upon a time, in a small town by the sea, there lived an old clockmaker. This is the story of his life:"


def main() -> None:
    """Generate, and print a line for every window of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024, help="positions that the cache keeps")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--report", type=int, default=1000, help="tokens a line of the table stands for")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--dry", type=float, default=0.8, help="what a repeated run of tokens loses (DRY)")
    parser.add_argument("--show", action="store_true", help="print how each window ends")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lm = unspool.load(arguments.model) if arguments.model else unspool.load()
    cache = unspool.SinkCache(arguments.window, arguments.sinks)
    ids = lm.encode(PROMPT)[0]
    print(f"{lm.name}, context {lm.model.info.max_context}, window {arguments.window}, {arguments.sinks} sinks")
    print(f"{'tokens':>8} {'perplexity':>11} {'distinct words':>15} {'tokens/s':>9} {'cache MiB':>10}")
    logs: list[float] = []
    tokens: list[int] = []
    started = time.perf_counter()
    answer = lm.start(
        [ids],
        max_new_tokens=arguments.tokens,
        past_key_values=cache,
        do_sample=True,
        top_p=arguments.top_p,
        dry_multiplier=arguments.dry,  # without it so small a model soon says one line for ever, with any cache
        dry_allowed_length=4,
        seed=arguments.seed,
        logprobs=0,
        eos_token_id=None,
    )
    for piece in answer.pieces():
        logs += [told.logprob for told in piece.logprobs]
        tokens += piece.token_ids
        if len(logs) >= arguments.report:
            _tell(lm, logs, tokens, started, cache, arguments.show)
            logs, tokens, started = [], [], time.perf_counter()
    if logs:
        _tell(lm, logs, tokens, started, cache, arguments.show)
    print("the last words:", repr(answer.result().text[-300:]))


def _tell(
    lm: unspool.LanguageModel,
    logs: list[float],
    tokens: list[int],
    started: float,
    cache: unspool.SinkCache,
    shows: bool,
) -> None:
    assert lm.tokenizer is not None
    words = lm.tokenizer.decode(tokens).lower().split()
    perplexity = math.exp(-sum(logs) / len(logs))
    rate = len(logs) / (time.perf_counter() - started)
    distinct = len(set(words)) / max(1, len(words))
    size = cache.nbytes / 2**20
    print(f"{cache.seen_tokens:>8} {perplexity:>11.2f} {distinct:>15.2f} {rate:>9.1f} {size:>10.1f}", flush=True)
    if shows:
        print("   …", repr(lm.tokenizer.decode(tokens[-40:])), flush=True)


if __name__ == "__main__":
    main()
