"""``python -m lightning_memfit.cli``."""

import sys

from lightning_memfit.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
