"""Both ends of a step: embedding, most likely token, draws, contests."""
