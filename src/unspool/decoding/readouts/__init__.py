"""How a forward pass becomes logits: plainly, by DoLa, or guided."""
