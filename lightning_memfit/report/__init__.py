"""What the user reads: the plan and the measurement as tables, and as a file."""
