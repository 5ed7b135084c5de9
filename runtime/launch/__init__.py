"""From a checked chain to running workers: plan, backends, supervisor, and the state of runs."""
