"""Gradients told apart by one number per parameter, so that no two sets of them are held at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

RELATIVE_TOLERANCE = 1e-3
"""Share of a parameter's gradient by which rounding may move it, or of a thousandth of all gradients' norm."""
_NOISE_TIMES = 8
_SEED = 20_261


@dataclass(frozen=True, kw_only=True)
class GradientSketch:
    """Gradients of every parameter, each projected onto one fixed random direction.

    The projection is linear, so that sketches add up as gradients do; two different gradients have the same one with
    probability 0. Of a difference ``d`` it is normally distributed with standard deviation ``|d|``.
    """

    projections: Mapping[str, float]
    """By parameter, the inner product of its gradient and its direction."""
    norms: Mapping[str, float]
    """By parameter, the Euclidean norm of its gradient."""


def sketch_gradients(module: nn.Module) -> GradientSketch:
    """Look at the gradients that the parameters have now; those without one are left out."""
    projections, norms = {}, {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "full_tensor"):  # a distributed one: all ranks are here, and look at the same batch
            gradient = gradient.full_tensor()
        values = (gradient.to_dense() if gradient.layout != torch.strided else gradient).detach()
        generator = torch.Generator(device=values.device).manual_seed(_SEED + number)
        direction = torch.randn(values.shape, generator=generator, device=values.device, dtype=torch.float32)
        values = values.to(torch.float32)
        projections[name] = float(torch.sum(values * direction, dtype=torch.float64))
        norms[name] = float(torch.linalg.vector_norm(values))
    return GradientSketch(projections=projections, norms=norms)


def not_finite(sketches: Iterable[GradientSketch]) -> str | None:
    """The first parameter with a gradient that is not finite; ``None`` if there is none.

    Told from projections: of infinite or undefined elements they are neither finite, while a norm may overflow.
    """
    for sketch in sketches:
        for name, projection in sketch.projections.items():
            if not math.isfinite(projection):
                return name
    return None


def differing_gradient(
    whole: GradientSketch,
    again: GradientSketch,
    parts: Sequence[GradientSketch],
    shares: Sequence[float],
    eps: float,
) -> tuple[str, float] | None:
    """The parameter whose gradient differs most from what its parts add up to, and by which share of its norm.

    Args:
        whole: of the undivided batch; finite, as those of ``again`` and ``parts``.
        again: of a repeat, whose difference is noise.
        parts: of the slices.
        shares: what each slice counts.
        eps: of the dtype in which gradients are computed.

    Returns:
        ``None`` if no difference stands out from rounding and noise.
    """
    everything = math.sqrt(math.fsum(norm * norm for norm in whole.norms.values()))
    found: list[tuple[float, str]] = []
    for name in {**whole.projections, **{name: 0 for part in parts for name in part.projections}}:
        reference = whole.projections.get(name, 0.0)
        total = math.fsum(share * part.projections.get(name, 0.0) for share, part in zip(shares, parts, strict=True))
        size = max(whole.norms.get(name, 0.0), RELATIVE_TOLERANCE * everything)
        noise = abs(reference - again.projections.get(name, 0.0))
        allowed = max(RELATIVE_TOLERANCE, 8 * eps) * size + _NOISE_TIMES * noise
        if abs(reference - total) > allowed:
            found.append((abs(reference - total) / size if size else math.inf, name))
    if not found:
        return None
    share, name = max(found)
    return name, share
