"""A verifiable task and three tiny models, small enough that every method runs to its end on one CPU core."""
