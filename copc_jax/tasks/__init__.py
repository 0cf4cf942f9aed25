"""Tasks: prompt format, actions and rewards."""
