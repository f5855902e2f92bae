"""Search: an Optuna sampler over plans, studies that say what they are about, live trials, transfer."""
