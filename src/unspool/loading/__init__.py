"""Loading models: finding their files, reading their weights."""
