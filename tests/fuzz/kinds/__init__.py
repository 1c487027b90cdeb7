"""One file per kind of input: `NAME`, `make(rng)`, `run(given, folder)`, and maybe `SHARE`, `SHORT` and `warm()`."""
