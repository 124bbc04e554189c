"""What CUDA operators take from torch's allocator inside, where a trace cannot see it, for a GPU that is not there.

The formulas are read from upstream's sources; each names file and function, and the versions that it was read from. A
formula is exact, or an interval whose ends say what is known: where a library alone decides (cuDNN), the upper end is
an assumption of ours and says so. Sizes count whole blocks of 512 bytes, as torch's allocator does.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_memfit.predict.cuda_temporaries import attention, indexing, libraries, normalisation, reductions
from lightning_memfit.predict.cuda_temporaries.libraries import Workspace, library_workspaces
from lightning_memfit.predict.cuda_temporaries.rule import CudaArchitecture, HiddenBytes, Rule
from lightning_memfit.trace.timeline import Signature

__all__ = [
    "CudaArchitecture",
    "FormulaRow",
    "HiddenBytes",
    "Workspace",
    "describe_formulas",
    "hidden_bytes",
    "library_workspaces",
]

_RULES: tuple[Rule, ...] = (
    *attention.RULES,
    *normalisation.RULES,
    *reductions.RULES,
    *indexing.RULES,
    *libraries.RULES,
)
_RULE_OF = {name: rule for rule in _RULES for name in rule.operators}


class FormulaRow(NamedTuple):
    """One row of the table of formulas for the documentation."""

    operators: tuple[str, ...]
    """Names without namespace and overload."""
    formula: str
    """The formula in words."""
    kind: str
    """``"exact"``, ``"interval"``, or ``"exact or interval"`` where it depends on the call."""
    source: str
    """Upstream file and function."""
    versions: str
    """Versions that it was read from, and those that it holds for as far as known."""


def hidden_bytes(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Bytes that an operator takes inside and gives back before it returns, at their peak, beyond its outputs.

    Args:
        signature: the operator and the shapes of its arguments.
        architecture: the GPU and torch's version.

    Returns:
        Exact bytes or an interval; ``None`` if nothing is known to be hidden (elementwise operators, views), or if the
        call is not of a form that the formula covers.

    Ignores: what other streams and custom kernels take.
    """
    parts = signature.op.split(".")
    rule = _RULE_OF.get(parts[1] if len(parts) > 1 else parts[0])
    return None if rule is None else rule.compute(signature, architecture)


def describe_formulas() -> tuple[FormulaRow, ...]:
    """Describe every formula, in the order in which they are looked up."""
    return tuple(FormulaRow(rule.operators, rule.formula, rule.kind, rule.source, rule.versions) for rule in _RULES)
