"""What to do next: pure functions from a state to a plan."""
