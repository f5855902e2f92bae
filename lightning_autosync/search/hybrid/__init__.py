"""Search for plans that split operators: found by prediction, judged by live trials."""
