"""Live trials: a study of plans on workers that stay alive, and the best of them beside builders and DDP."""
