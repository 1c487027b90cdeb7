"""`python -m unspool` is the program `unspool`, which begins here.

Importing the program takes a moment, in which Ctrl-C ends it as it does later: without a traceback.
"""

import os
import signal


def main() -> int:
    """Run the program and return its exit code."""
    usual = signal.getsignal(signal.SIGINT)
    is_usual = usual is signal.default_int_handler  # a shell's background job ignores the signal
    if is_usual:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing is open yet
    from unspool.cli.main import main as run

    try:
        if is_usual:
            signal.signal(signal.SIGINT, usual)
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
