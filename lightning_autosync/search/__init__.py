"""Search: an Optuna sampler over plans, self-describing studies, live trials and transfer."""
