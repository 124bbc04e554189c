"""Forms the budget: how many bytes of the torch allocator a plan may use on a device."""

from __future__ import annotations

from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Budget, PlanRequest
from lightning_memfit.units import MIB, format_bytes

_LEAST_HEADROOM_BYTES = 256 * MIB
_HEADROOM_PERCENT = 5


def form_budget(device: DeviceSpec, request: PlanRequest, *, resident_bytes: int) -> Budget:
    """Form the budget and say how.

    1. ``non_torch_bytes`` on a host is ``process_bytes - resident_bytes``, at least 0; on a GPU it is the most that the
       context may take, 0 where that is not known.
    2. ``headroom_bytes`` is the one asked for; else 0 where the budget is given, and otherwise 5 % of the capacity,
       at least 256 MiB.
    3. ``budget_bytes`` is the given budget less a headroom that was asked for; without a given budget it is
       ``capacity_bytes - non_torch_bytes - headroom_bytes``.

    A given budget beyond what the device can hold is accepted, and the reason says so.

    Args:
        device: the device as it is now.
        request: what the user asks for; ``budget`` and ``headroom`` in bytes.
        resident_bytes: bytes of the torch allocator that the process holds already for this model and batch.

    Raises:
        ConfigurationError: if the headroom asked for leaves nothing.
        NoFeasiblePlanError: if the device leaves nothing.

    Ignores: on a GPU, what this process holds in torch's allocator beside this model and batch.
    """
    non_torch = _non_torch_bytes(device, resident_bytes)
    could_hold = device.capacity_bytes - non_torch
    if request.budget is not None:
        return _given_budget(request.budget, request.headroom or 0, device, non_torch, could_hold)
    headroom = request.headroom
    if headroom is None:
        headroom = max(_LEAST_HEADROOM_BYTES, device.capacity_bytes * _HEADROOM_PERCENT // 100)
    budget = could_hold - headroom
    if budget <= 0:
        raise _nothing_left(device, request, non_torch, could_hold, headroom, resident_bytes)
    choice = "as asked" if request.headroom is not None else _default_headroom_words(headroom)
    return Budget(
        budget_bytes=budget,
        capacity_bytes=device.capacity_bytes,
        headroom_bytes=headroom,
        non_torch_bytes=non_torch,
        reason=(
            f"{format_bytes(device.capacity_bytes)} {_capacity_words(device)} - {_non_torch_words(device, non_torch)} "
            f"- {format_bytes(headroom)} headroom ({choice})"
        ),
    )


def host_budget(host: DeviceSpec) -> int:
    """Bytes that a run on GPUs may keep in the memory of one host: what is available now, less a headroom.

    Ignores: what its processes give back when their models move to the GPUs.

    Args:
        host: as it is now.
    """
    return max(0, host.available_bytes - max(_LEAST_HEADROOM_BYTES, host.capacity_bytes * _HEADROOM_PERCENT // 100))


def _given_budget(given: int, headroom: int, device: DeviceSpec, non_torch: int, could_hold: int) -> Budget:
    if headroom >= given:
        raise ConfigurationError(
            f"headroom={format_bytes(headroom)} leaves nothing of budget={format_bytes(given)}. "
            "Ask for less headroom or a larger budget."
        )
    reason = "as given"
    if headroom:
        reason = f"{format_bytes(given)} as given - {format_bytes(headroom)} headroom (as asked)"
    if given > could_hold:
        reason += (
            f"; more than the device can hold: {format_bytes(device.capacity_bytes)} {_capacity_words(device)} - "
            f"{format_bytes(non_torch)} {'held outside the model' if device.kind == 'cpu' else 'for the context'}"
        )
    return Budget(
        budget_bytes=given - headroom,
        capacity_bytes=device.capacity_bytes,
        headroom_bytes=headroom,
        non_torch_bytes=non_torch,
        reason=reason,
    )


def _nothing_left(
    device: DeviceSpec, request: PlanRequest, non_torch: int, could_hold: int, headroom: int, resident_bytes: int
) -> ConfigurationError | NoFeasiblePlanError:
    sum_up = (
        f"{format_bytes(device.capacity_bytes)} {_capacity_words(device)} - {_non_torch_words(device, non_torch)} "
        f"leave {format_bytes(could_hold)}"
    )
    if request.headroom is not None and could_hold > 0:
        return ConfigurationError(
            f"headroom={format_bytes(headroom)} leaves nothing on {device.name}: {sum_up}. "
            f"Ask for less than {format_bytes(could_hold)} of headroom."
        )
    return NoFeasiblePlanError(
        f"budget='auto' leaves nothing on {device.name}: {sum_up}, less {format_bytes(headroom)} of headroom. "
        f"{_way_out(device)}, or set headroom= lower.",
        budget_bytes=could_hold - headroom,
        best_peak_bytes=resident_bytes,
    )


def _non_torch_bytes(device: DeviceSpec, resident_bytes: int) -> int:
    if device.kind == "cpu":
        return max(0, device.process_bytes - resident_bytes)
    return device.context_high_bytes or 0


def _capacity_words(device: DeviceSpec) -> str:
    if not device.is_present:
        words = "in all, as torch reports such a GPU"
        if "total" in device.unknowns:
            words = "in all, the least that torch may report for such a GPU"
        return f"{words} (assumed: nothing else runs on it)"
    if device.kind == "cuda":
        return "free or held by this process" + _limit_words(device)
    words = "available or held by this process"
    if device.limit_bytes is not None:
        words += f" (cgroup limit {format_bytes(device.limit_bytes)} in {device.limit_source})"
    return words


def _limit_words(device: DeviceSpec) -> str:
    if device.memory_fraction is None or device.total_bytes is None:
        return ""
    return f" (torch may reserve {device.memory_fraction:g} of {format_bytes(device.total_bytes)})"


def _non_torch_words(device: DeviceSpec, non_torch: int) -> str:
    if device.kind == "cpu":
        return f"{format_bytes(non_torch)} held outside the model (interpreter, libraries, data)"
    low, high = device.context_low_bytes, device.context_high_bytes
    if low is None or high is None:
        return f"{format_bytes(non_torch)} for the context, which is not known"
    words = f"{format_bytes(non_torch)} for the CUDA context and libraries"
    if low < high:
        words += f" (from {format_bytes(low)})"
    return f"{words}, assumed" if "context" in device.unknowns else words


def _way_out(device: DeviceSpec) -> str:
    if device.kind == "cpu":
        return "End other processes, raise the memory limit, load less data before training"
    if not device.is_present:
        return "Plan for a larger GPU"
    held = [each for each in device.neighbours or () if each.held_bytes]
    if not held:
        return "End other processes on the GPU"
    largest = max(held, key=lambda each: each.held_bytes or 0)
    return f"End other processes on the GPU (process {largest.pid} holds {format_bytes(largest.held_bytes or 0)})"


def _default_headroom_words(headroom: int) -> str:
    return "the least" if headroom == _LEAST_HEADROOM_BYTES else f"{_HEADROOM_PERCENT} %"
