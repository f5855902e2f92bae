"""Running a hybrid plan: operators on parts of their inputs and parameters, and values that change layout between."""
