"""The parts of ``scripts/experiments/bench_peers.py``."""
