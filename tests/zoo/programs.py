"""All programs of the zoo, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.zoo import batch_programs, data_programs, transfer_programs
from tests.zoo.program import Program

PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for program in (*data_programs.PROGRAMS, *transfer_programs.PROGRAMS, *batch_programs.PROGRAMS)
}
