"""The models that contenders train: real modules, and paced modules whose passes use no core."""
