"""Ways to start workers: here, by ssh, by mpirun, by Slurm."""
