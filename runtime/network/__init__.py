"""A user's network: traced, and cut into pieces."""
