"""Package data: Apptainer definition templates and example chains, read with importlib.resources."""
