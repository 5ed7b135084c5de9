"""Comparisons, costs, the network's speed, and figures for other programs."""
