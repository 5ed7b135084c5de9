"""Networks that people use, and small data of their shapes: for zoo.py and split_balance.py."""
