"""All programs of the zoo, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.zoo import (
    batch_programs,
    data_programs,
    library_programs,
    lifecycle_programs,
    loss_programs,
    optimization_programs,
    transfer_programs,
)
from tests.zoo.program import Program

_ALL = (
    data_programs,
    transfer_programs,
    batch_programs,
    loss_programs,
    optimization_programs,
    library_programs,
    lifecycle_programs,
)

PROGRAMS: Mapping[str, Program] = {program.name: program for programs in _ALL for program in programs.PROGRAMS}
