"""`python -m unspool` is the program `unspool`."""

from unspool.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
