"""A run's files: its directory, documents, cuts, keys, and who owns it."""
