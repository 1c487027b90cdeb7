"""The parts of the contract that every cache fulfils (`cache/base.py`), one idea each."""
