"""Fit the context: something before every prompt, and none too long for its answer."""

import torch

import unspool


def generate(
    model, input_ids, generation_config, before=(), context=None, keep_first=None, attention_mask=None, **kwargs
):
    """Generate after prompts with `before` in front, that lose their middle if prompt and answer exceed `context`."""
    context = context or getattr(model.config, "max_position_embeddings", None)
    new = generation_config.max_new_tokens
    room = None if context is None or not new else context - new - len(before)
    if room is not None and room < 1:
        raise ValueError(f"{new} new tokens and {len(before)} before the prompt leave no room in {context}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = []
    for ids, real in zip(input_ids.tolist(), mask.bool().tolist(), strict=True):
        tokens = [token for token, is_real in zip(ids, real, strict=True) if is_real]
        rows.append([*before, *_cut(tokens, room, keep_first)])
    width = max(map(len, rows))
    pad = generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=input_ids.device)
    kept = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=input_ids.device)
    return unspool.generate(model, ids, generation_config=generation_config, attention_mask=kept, **kwargs)


def _cut(tokens, room, keep_first):
    """The tokens, without so many in the middle that the rest fits."""
    if room is None or len(tokens) <= room:
        return tokens
    first = min(room // 4 if keep_first is None else keep_first, room - 1)
    return tokens[:first] + tokens[len(tokens) - (room - first) :]
