"""Package data, read with importlib.resources: Apptainer definition templates and example chains."""
