"""Config groups for Hydra applications: put ``pkg://lightning_memfit.conf`` on ``hydra.searchpath``."""
