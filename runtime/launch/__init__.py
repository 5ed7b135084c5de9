"""Starting and supervising the workers of a chain: plan, backends, supervisor, state of runs."""
