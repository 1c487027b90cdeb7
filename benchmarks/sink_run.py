"""A conversation without end over a SinkCache: how fluent it stays, as the perplexity of the model's own answers.

python benchmarks/sink_run.py                            # 20,000 answered tokens with the default model
python benchmarks/sink_run.py --tokens 6000 --dynamic    # the same with every key, for comparison
python benchmarks/sink_run.py --tokens 200 --window 64   # a smoke run

Questions follow each other over one cache, which keeps the first tokens and the last ones; nothing is read again.
Mirostat keeps the surprise of a token where it is asked to be: with top-p alone a model of this size falls into saying
one line for ever, with any cache.
"""

from __future__ import annotations

import argparse
import math
import time

import unspool

ASKED = (
    "Explain in a few paragraphs how {} works.",
    "Tell me a short story about {}.",
    "Give me some practical advice about {}.",
)
SUBJECTS = (
    "a lighthouse", "baking bread", "the water cycle", "a bicycle", "learning a language", "growing tomatoes",
    "a library", "the tides", "making cheese", "a telescope", "keeping bees", "a small harbour", "writing letters",
    "the seasons", "a wooden boat", "teaching children to read", "a steam engine", "a good night's sleep", "clouds",
    "repairing clocks", "a village market", "playing the violin", "a compass", "walking in the mountains", "glass",
    "cooking for friends", "a weather forecast", "drawing maps", "an old theatre", "saving money",
)  # fmt: skip
LONGEST_ANSWER = 160  # tokens


def main() -> None:
    """Ask, answer, and print a line for every so many tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024, help="positions that the cache keeps")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--report", type=int, default=2000, help="tokens a line of the table stands for")
    parser.add_argument("--dynamic", action="store_true", help="every key instead, as far as the context goes")
    parser.add_argument("--surprise", type=float, default=3.0, help="bits a token that Mirostat keeps to")
    arguments = parser.parse_args()
    lm = unspool.load(arguments.model) if arguments.model else unspool.load()
    cache = unspool.DynamicCache() if arguments.dynamic else unspool.SinkCache(arguments.window, arguments.sinks)
    kept = "every key" if arguments.dynamic else f"window {arguments.window}, {arguments.sinks} sinks"
    print(f"{lm.name}, context {lm.model.info.max_context}, {kept}")
    print(f"{'answered':>9} {'read':>7} {'perplexity':>11} {'distinct words':>15} {'tokens/s':>9} {'cache MiB':>10}")
    history: list[int] = []
    logs: list[float] = []
    words: list[str] = []
    num_answered, turn, text, started = 0, 0, "", time.perf_counter()
    while num_answered < arguments.tokens:
        question = ASKED[turn % len(ASKED)].format(SUBJECTS[turn // len(ASKED) * 7 % len(SUBJECTS)])
        history += _ask(lm, question, is_first=turn == 0)
        answer = lm.generate(
            history,
            max_new_tokens=min(LONGEST_ANSWER, arguments.tokens - num_answered),
            past_key_values=cache,
            do_sample=True,
            mirostat_tau=arguments.surprise,
            seed=turn,
            logprobs=0,
        )
        assert answer.logprobs is not None
        history += answer.token_ids[0]
        logs += [token.logprob for token in answer.logprobs[0]]
        num_answered, turn, text = num_answered + len(answer.token_ids[0]), turn + 1, answer.text
        words += text.lower().split()
        if len(logs) >= arguments.report or num_answered >= arguments.tokens:
            rate, distinct = len(logs) / (time.perf_counter() - started), len(set(words)) / max(1, len(words))
            print(
                f"{num_answered:>9} {len(history):>7} {math.exp(-sum(logs) / len(logs)):>11.2f} {distinct:>15.2f} "
                f"{rate:>9.1f} {cache.nbytes / 2**20:>10.1f}",
                flush=True,
            )
            logs, words, started = [], [], time.perf_counter()
    print(f"turn {turn}: {question}\n{text}")


def _ask(lm: unspool.LanguageModel, question: str, *, is_first: bool) -> list[int]:
    """The tokens of a question; after the first, without what stands before a conversation."""
    ids = lm.encode([{"role": "user", "content": question}], chat=True)[0]
    if is_first:
        return ids
    begins = [place for place, token in enumerate(ids) if token == ids[0]]  # of the parts of a conversation
    return ids[begins[-2] :]


if __name__ == "__main__":
    main()
