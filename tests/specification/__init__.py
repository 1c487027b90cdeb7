"""What the reference documents promise, and the tests that show it; `docs/specification.md` is made of it."""
