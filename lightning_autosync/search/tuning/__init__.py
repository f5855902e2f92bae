"""Live trials: a study of plans on live workers, and a comparison of the best plans with builders and DDP."""
