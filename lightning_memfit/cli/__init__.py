"""The command line: ``memfit plan`` says whether training will fit on a device, ``memfit hardware`` what it is."""

from lightning_memfit.cli.command import main

__all__ = ["main"]
