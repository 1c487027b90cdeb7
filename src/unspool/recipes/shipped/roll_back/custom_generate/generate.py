"""Roll back: where a text begins to repeat itself, it goes back to before the repetition and goes on otherwise."""

import copy

import torch

import unspool


def generate(model, input_ids, generation_config, repeats=3, longest=16, attempts=8, attention_mask=None, **kwargs):
    """Generate each row; a piece of up to `longest` tokens that came `repeats` times in a row is taken back."""
    ends = generation_config.eos_token_id
    pad = next(
        (one for one in (generation_config.pad_token_id, ends if isinstance(ends, int) else None) if one is not None), 0
    )
    rows = []
    for index in range(input_ids.shape[0]):
        row = input_ids[index : index + 1]
        if attention_mask is not None:
            row = row[:, attention_mask[index].bool()]
        done = _write(model, row, copy.copy(generation_config), repeats, longest, attempts, kwargs)
        rows.append(torch.cat((input_ids[index], done)))
    width = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=pad) for row in rows])


def _write(model, prompt, config, repeats, longest, attempts, kwargs):
    """The new tokens of one row."""
    start, banned = prompt.shape[1], {}
    total = config.max_new_tokens if config.max_new_tokens else config.max_length - start
    config.update(max_length=None, return_dict_in_generate=False)

    def stop(seen, scores, **_):
        return _find_loop(seen[0, start:].tolist(), repeats, longest) is not None

    ids = prompt
    while True:
        config.max_new_tokens = start + total - ids.shape[1]

        def ban(seen, scores):
            for token in banned.get(seen.shape[1], ()):
                scores = scores.index_fill(1, torch.tensor([token], device=scores.device), -torch.inf)
            return scores

        ids = unspool.generate(
            model, ids, generation_config=config, logits_processor=[ban], stopping_criteria=[stop], **kwargs
        )
        begin = _find_loop(ids[0, start:].tolist(), repeats, longest)
        if begin is None or attempts == 0:
            return ids[0, start:]
        attempts -= 1
        at = start + begin  # the first token of the second copy
        banned.setdefault(at, set()).add(int(ids[0, at]))
        ids = ids[:, :at]


def _find_loop(tokens, repeats, longest):
    """Where the second copy of a piece begins that the text ends with `repeats` times; None if it does not."""
    for size in range(1, longest + 1):
        if len(tokens) >= size * repeats:
            tail = tokens[-size * repeats :]
            if tail == tail[:size] * repeats:
                return len(tokens) - size * (repeats - 1)
    return None
