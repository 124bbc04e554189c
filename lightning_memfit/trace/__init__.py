"""One training step followed without running it, and the operators' hidden temporaries found by running each once."""
