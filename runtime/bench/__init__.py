"""Benchmarks: links, the modules of a chain, and a whole chain compared with plain backprop."""
