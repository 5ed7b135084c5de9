"""Running a chain as a Slurm job: placement, batch script, steps, state of the job."""
