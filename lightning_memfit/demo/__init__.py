"""Small real models and real text that run on any machine, written without MemFit in mind."""
