"""The parts of `benchmarks/simulate.py`: what arrives, replicas, the clock, what happened, charts."""
