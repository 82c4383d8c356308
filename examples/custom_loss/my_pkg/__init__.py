"""A user's package: a loss and a reward of its own, and an experiment that uses them."""
