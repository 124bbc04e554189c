"""Learning-rate schedules that stand still while steps are run that are no part of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_memfit.undo import set_instance_attribute


@contextmanager
def schedules_at_rest(schedules: Iterable[Any]) -> Iterator[None]:
    """Within this context the ``step`` of a schedule does nothing, whoever calls it.

    Under manual optimization ``training_step`` itself steps its schedules. One that knows the number of its steps, such
    as ``OneCycleLR``, raises where it is stepped beyond; and no peak depends on a learning rate.
    """
    with ExitStack() as undone:
        for schedule in schedules:
            if hasattr(schedule, "__dict__"):
                undone.callback(set_instance_attribute(schedule, "step", _stand_still))
        yield


def _stand_still(*args: Any, **kwargs: Any) -> None:
    return None
