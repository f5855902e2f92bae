"""Rehearsals compare samplers on simulated step times, with constants and links that the samplers do not know."""
