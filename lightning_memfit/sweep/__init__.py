"""A Hydra sweep that forecasts its jobs, leaves out what cannot fit, and goes on where it was stopped."""
