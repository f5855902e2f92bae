"""Measures the step time of plans: live workers, launches, emulated links, the probe and interleaved rounds."""
