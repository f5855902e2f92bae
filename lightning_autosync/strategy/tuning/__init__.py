"""Tuning inside a training job: links are found, a plan is chosen by simulation, and others are tried on its steps."""
