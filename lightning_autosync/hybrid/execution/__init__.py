"""Execution of hybrid plans: operators on parts of their inputs and parameters, and changes of layout between them."""
