"""Where ranks run: on this machine, on nodes over ssh, or in a job of torchrun or SLURM, or on nodes of Ray."""
