"""All programs of the zoo, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.zoo import data_programs, loss_programs, optimization_programs
from tests.zoo.program import Program

PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for programs in (data_programs.PROGRAMS, loss_programs.PROGRAMS, optimization_programs.PROGRAMS)
    for program in programs
}
