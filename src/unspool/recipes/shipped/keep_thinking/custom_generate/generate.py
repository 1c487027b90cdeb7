"""Keep thinking: a text may not end while the model is uncertain."""

import torch

import unspool


class NoEndInDoubt(unspool.LogitsProcessor):
    """Forbids end tokens where the entropy of the next token is above a threshold."""

    def __init__(self, ends, entropy, start, most):
        self.ends, self.entropy, self.start, self.most = ends, entropy, start, most

    def __call__(self, input_ids, scores):
        """The scores, without end tokens in rows that are uncertain."""
        if input_ids.shape[1] - self.start >= self.most:
            return scores
        logprobs = scores.float().log_softmax(dim=-1)
        entropy = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(dim=-1)
        ends = torch.zeros_like(scores, dtype=torch.bool)
        ends[:, self.ends] = True
        return scores.masked_fill(ends & (entropy > self.entropy)[:, None], -torch.inf)


def generate(model, input_ids, generation_config, entropy=2.0, think_at_most=None, logits_processor=None, **kwargs):
    """Generate as usual, but end only where the next token's entropy (in nats) is at most `entropy`."""
    ends = generation_config.eos_token_id
    ends = model.config.eos_token_id if ends is None else ends
    if ends is None:
        raise ValueError("keep_thinking holds end tokens back, and this model has none: pass eos_token_id")
    ends = [ends] if isinstance(ends, int) else list(ends)
    start = 1 if getattr(model.config, "is_encoder_decoder", False) else input_ids.shape[1]
    guard = NoEndInDoubt(ends, entropy, start, float("inf") if think_at_most is None else think_at_most)
    processors = [*(logits_processor or []), guard]
    return unspool.generate(
        model, input_ids, generation_config=generation_config, logits_processor=processors, **kwargs
    )
