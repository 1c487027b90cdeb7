"""Reference outputs that must come out token for token."""
