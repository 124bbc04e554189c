"""Measurements behind the numbers in the documentation; each script says what it measures and how to run it."""
