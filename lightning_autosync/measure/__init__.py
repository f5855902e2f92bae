"""What the step time of a plan is: live workers, launches, emulated links, the probe, interleaved rounds."""
