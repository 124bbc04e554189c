"""Which optimizers mean under ZeRO what they mean without: those that treat every element by itself.

Under ZeRO an optimizer is given one flat ``float32`` tensor for each parameter group, a rank's share of it: it sees no
shapes, no layers and no single tensors. Update rules that look at one element at a time do not notice.

States in 8 bits are refused as MemFit's own lever, and here is why. What makes them harmless is that small tensors and
embeddings keep 32 bits. bitsandbytes decides by tensor (``min_8bit_size``, and overrides by parameter), and here all of
a group is one tensor: embeddings, norms and biases would be quantised with the rest, in blocks of 256 elements that
straddle tensors. An 8-bit optimizer of the user's own is used as it is, and that is said.
"""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_memfit.plan import Offload, OptimizerStates

_BY_ELEMENT = frozenset((
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Lion",
    "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion", "AdEMAMix",
))  # fmt: skip
_BY_TENSOR = {
    "Adafactor": "factors the second moments of matrices",
    "Muon": "orthogonalises matrices",
    "LAMB": "scales each layer by its own norms",
    "FusedLamb": "scales each layer by its own norms",
    "LARS": "scales each layer by its own norms",
    "LBFGS": "needs the closure, which DeepSpeed does not run",
    "SparseAdam": "needs sparse gradients",
    "Shampoo": "preconditions each dimension of a tensor",
    "SOAP": "preconditions each dimension of a tensor",
}
_DECORATIONS = ("Paged", "8bit", "32bit")


def why_not_under_zero(
    optimizer: Optimizer, *, optimizer_states: OptimizerStates = "as-configured", offload: Offload = "never"
) -> str | None:
    """Why an optimizer is not what it is without ZeRO, in words; ``None`` where it is, or where nobody knows.

    Args:
        optimizer: as ``configure_optimizers`` made it.
        optimizer_states: what a plan would make of its states.
        offload: whether a plan would have it step on the host.
    """
    kind = type(optimizer)
    rule = _BY_TENSOR.get(_rule_of(optimizer))
    if rule is not None:
        return (
            f"{kind.__qualname__} {rule}, and under ZeRO it is given one flat tensor. Use an optimizer that treats "
            "every element by itself, such as torch.optim.AdamW, or strategy='ddp'."
        )
    if optimizer_states == "8bit":
        return (
            "optimizer_states='8bit' under ZeRO would quantise embeddings, norms and biases with the rest: they lie in "
            "one flat tensor. Use optimizer_states='as-configured'; ZeRO divides the states by the number of ranks."
        )
    if offload != "never" and _of_bitsandbytes(optimizer):
        return (
            f"{kind.__qualname__} of bitsandbytes with offload={offload!r}: on the host its step takes five times its "
            "share in temporaries. Use torch.optim.AdamW or DeepSpeedCPUAdam, or offload='never'."
        )
    return None


def note_under_zero(optimizer: Optimizer) -> str | None:
    """What should be said of an optimizer that is used under ZeRO; ``None`` where there is nothing.

    Args:
        optimizer: as ``configure_optimizers`` made it.
    """
    kind = type(optimizer)
    if _of_bitsandbytes(optimizer) and _bits_of(optimizer) == 8:
        return (
            f"{kind.__qualname__} steps one flat tensor for each parameter group: all of it is quantised, embeddings, "
            "norms and biases included, and min_8bit_size and overrides by parameter are without effect"
        )
    if _rule_of(optimizer) not in _BY_ELEMENT:
        return (
            f"{kind.__qualname__} is given one flat tensor for each parameter group: it must treat every element by "
            "itself, and MemFit does not know whether it does"
        )
    return None


def _rule_of(optimizer: Optimizer) -> str:
    """Name of the update rule: the class's, or that of a base by which it is known, without decorations."""
    names = []
    for cls in type(optimizer).__mro__:
        name = cls.__name__
        for decoration in _DECORATIONS:
            name = name.replace(decoration, "")
        names.append(name)
    return next((name for name in names if name in _BY_TENSOR or name in _BY_ELEMENT), names[0])


def _of_bitsandbytes(optimizer: Optimizer) -> bool:
    return any(cls.__module__.startswith("bitsandbytes.") for cls in type(optimizer).__mro__)


def _bits_of(optimizer: Optimizer) -> int | None:
    bits: int | None = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return bits
