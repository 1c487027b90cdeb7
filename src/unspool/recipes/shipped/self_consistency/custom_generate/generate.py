"""Self-consistency (Wang et al., 2022): several drawn answers, and the one that most of them agree on."""

import copy
import re
from collections import Counter

import torch

import unspool


def generate(model, input_ids, generation_config, n=8, extract=r"-?\d+(?:\.\d+)?", tokenizer=None, **kwargs):
    """Draw `n` continuations of every prompt, and return for each prompt the first whose answer most of them have."""
    if tokenizer is None:
        raise ValueError("self_consistency compares answers in texts: pass tokenizer")
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of 1 or more, not {n}")
    config = copy.copy(generation_config)
    config.update(do_sample=True, num_return_sequences=n, return_dict_in_generate=False)
    sequences = unspool.generate(model, input_ids, generation_config=config, tokenizer=tokenizer, **kwargs)
    texts = tokenizer.batch_decode(sequences[:, input_ids.shape[1] :], skip_special_tokens=True)
    find = extract if callable(extract) else lambda text: (re.findall(extract, text) or [None])[-1]
    chosen = []
    for first in range(0, len(texts), n):
        answers = [find(text) for text in texts[first : first + n]]
        votes = Counter(answer for answer in answers if answer is not None)
        winner = votes.most_common(1)[0][0] if votes else answers[0]
        chosen.append(first + answers.index(winner))
    return sequences[torch.tensor(chosen, device=sequences.device)]
