"""Which settings of the levers are tried, and which of them is taken, decided from forecasts alone."""
