"""Hydra finds the sweeper of MemFit here: ``hydra/sweeper=memfit``."""
