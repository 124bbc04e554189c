"""How long the variants of a recorded step take, without going through their operators one by one.

An operator's time depends on nothing but itself, so that those that cost the same are predicted once per size.
"""

from __future__ import annotations

from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.predict.step_time import predict_step_seconds
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.trace.timeline import Event, ModuleCall, Timeline


class VariantSeconds:
    """Predicts seconds of whole optimizer steps, as :func:`predict_step_seconds` does from their timelines.

    Args:
        variants: what runs in each variant.
        rates: how fast the device is.
    """

    def __init__(self, variants: StepVariants, rates: DeviceRates) -> None:
        self._variants, self._rates = variants, rates
        self._known: dict[tuple[int, int], float] = {}
        repeated = ModuleCall("", 0, 0, 0, (), recomputed=True)
        self._per_repeated_call = predict_step_seconds(_timeline(calls=(repeated,)), rates)

    def of(self, variant: Variant) -> float:
        """Seconds of everything but the optimizer's own step.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        operators = sum(each.times * self._one(each.kind, each.samples) for each in self._variants.times(variant))
        return operators + self._variants.repeated_calls(variant) * self._per_repeated_call

    def _one(self, kind: int, samples: int) -> float:
        key = kind, samples
        if key not in self._known:
            operation = self._variants.operation(kind, samples)._replace(micro_step=0)
            self._known[key] = predict_step_seconds(_timeline(events=(operation,)), self._rates)
        return self._known[key]


def _timeline(*, events: tuple[Event, ...] = (), calls: tuple[ModuleCall, ...] = ()) -> Timeline:
    return Timeline(
        residents=(), events=events, categories={}, signatures=(), num_parameters=0, num_operations=len(events),
        flops=0, recomputed_flops=0, calls=calls,
    )  # fmt: skip
