"""Greedy decoding in the reference's manner, with pad tokens before the prompt."""

import torch


def generate(model, input_ids, generation_config, left_padding=None, **kwargs):
    """Continue the prompts greedily, without a cache; `left_padding` pad tokens are put before them."""
    end = input_ids.shape[1] + generation_config.max_new_tokens if generation_config.max_new_tokens else None
    if left_padding is not None:
        if not isinstance(left_padding, int) or left_padding < 0:
            raise ValueError(f"left_padding must be a whole number of 0 or more, not {left_padding}")
        pad = (
            generation_config.pad_token_id if generation_config.pad_token_id is not None else model.config.pad_token_id
        )
        if pad is None:
            raise ValueError("left_padding needs a pad token: pass pad_token_id")
        padding = torch.full((input_ids.shape[0], left_padding), pad, device=input_ids.device)
        input_ids = torch.cat((padding, input_ids), dim=1)
        end = None if end is None else end + left_padding
    end = generation_config.max_length if end is None else end
    while input_ids.shape[1] < end:
        chosen = model(input_ids).logits[:, -1].argmax(dim=-1)
        input_ids = torch.cat((input_ids, chosen[:, None]), dim=1)
    return input_ids
