"""Where each worker runs, and how it starts."""
