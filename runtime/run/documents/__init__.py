"""Documents of a run directory: one schema each, which those who write and read it import.

What another version wrote is read as far as it is known: further fields are ignored, missing ones
have defaults.
"""
