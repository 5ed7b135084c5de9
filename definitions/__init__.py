"""Package data (importlib.resources): Apptainer definition templates and example chains."""
