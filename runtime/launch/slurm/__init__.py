"""Running a chain in a Slurm allocation: placement, batch script, steps, the state of the job."""
