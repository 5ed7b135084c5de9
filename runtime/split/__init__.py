"""A PyTorch network taken apart into modules: costs, the best cuts, and the chain file."""
