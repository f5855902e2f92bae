"""The models that contenders train: real modules, and paced ones whose passes use no core."""
