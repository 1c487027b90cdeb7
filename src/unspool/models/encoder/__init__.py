"""Plain encoders: BERT's block, read in both directions, with a head for every token."""
