"""Keeps a run alive."""
