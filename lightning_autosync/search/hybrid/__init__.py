"""Plans that split operators, found by prediction and judged by live trials."""
