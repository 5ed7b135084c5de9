"""Measurements for users: links between hosts, and the cost of each module."""
