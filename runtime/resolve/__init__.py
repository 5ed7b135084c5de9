"""From a chain to its workers' specs, with all checks; never in an image."""
