"""Special tokens: where the model writes one, its answer is put behind it, and the text goes on."""

import copy

import torch

import unspool


def generate(model, input_ids, generation_config, answers, most=8, attention_mask=None, **kwargs):
    """Generate each row; behind every token of `answers` come its ids, or those that its function returns."""
    answers = {int(token): answer for token, answer in answers.items()}
    if not answers:
        raise ValueError("special_tokens needs answers={token_id: [ids] or a function}")
    ends = generation_config.eos_token_id
    ends = [end for end in ([ends] if isinstance(ends, int) else ends or ()) if end >= 0]
    pad = next((one for one in (generation_config.pad_token_id, *ends) if one is not None), 0)
    rows = []
    for index in range(input_ids.shape[0]):
        row = input_ids[index : index + 1]
        if attention_mask is not None:
            row = row[:, attention_mask[index].bool()]
        written = _write(model, row, copy.copy(generation_config), answers, most, ends, kwargs)
        rows.append(torch.cat((input_ids[index], written)))
    width = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=pad) for row in rows])


def _write(model, ids, config, answers, most, ends, kwargs):
    """The new tokens of one row, answers among them."""
    start = ids.shape[1]
    end = start + config.max_new_tokens if config.max_new_tokens else config.max_length
    config.update(max_length=None, return_dict_in_generate=False)
    while ids.shape[1] < end:
        config.max_new_tokens = end - ids.shape[1]
        config.eos_token_id = [*ends, *(answers if most > 0 else ())] or None
        ids = unspool.generate(model, ids, generation_config=config, **kwargs)
        last = int(ids[0, -1])
        if last in ends or last not in answers or most <= 0:
            break
        most -= 1
        answer = answers[last]
        found = answer(ids[0].tolist()) if callable(answer) else answer
        ids = torch.cat((ids, torch.tensor([list(found)], dtype=ids.dtype, device=ids.device)), dim=1)
    return ids[0, start:end]
