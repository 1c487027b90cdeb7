"""Best of n: several drawn continuations of every prompt, of which a scorer chooses one."""

import copy

import torch

import unspool


def generate(model, input_ids, generation_config, n=4, scorer=None, tokenizer=None, **kwargs):
    """The continuation with the highest score per prompt; without a scorer the mean log-probability counts."""
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of 1 or more, not {n}")
    config = copy.copy(generation_config)
    config.update(do_sample=True, num_return_sequences=n, return_dict_in_generate=True, output_logits=scorer is None)
    output = unspool.generate(model, input_ids, generation_config=config, tokenizer=tokenizer, **kwargs)
    new = output.sequences[:, input_ids.shape[1] :]  # (prompts * n, new)
    if scorer is None:
        scores = _mean_logprobs(new, torch.stack(output.logits, dim=1), config.eos_token_id)
    else:
        texts = new.tolist() if tokenizer is None else tokenizer.batch_decode(new, skip_special_tokens=True)
        scores = torch.tensor([float(scorer(text)) for text in texts])
    best = scores.view(-1, n).argmax(dim=1)
    return output.sequences.view(-1, n, output.sequences.shape[1])[torch.arange(len(best)), best.to(new.device)]


def _mean_logprobs(new, logits, ends):
    """The mean log-probability of each row's tokens, up to its end token."""
    chosen = logits.float().log_softmax(dim=-1).gather(2, new[:, :, None])[:, :, 0]
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    has_ended = torch.isin(new, torch.tensor(ends, device=new.device, dtype=new.dtype)).long()
    is_real = (has_ended.cumsum(dim=1) - has_ended) == 0
    return (chosen * is_real).sum(dim=1) / is_real.sum(dim=1)
