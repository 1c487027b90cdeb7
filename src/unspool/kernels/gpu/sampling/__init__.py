"""The ends of a step: embedding, likeliest token, draws, contests."""
