"""Where ranks run beside this machine: nodes that ssh reaches, a job that SLURM starts."""
