"""Networks that others wrote, and small data sets of their shapes, for split_networks.py."""
