"""What a batch is made of: its tensors by name, its structure in words, and what it measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ShapeRange = tuple[tuple[int, int], ...]
"""Of one tensor in several batches: for each dimension its smallest and its largest size."""

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, kw_only=True)
class BatchShapes:
    """What a batch measures, without the batch; it can be sent from a worker."""

    names: tuple[str, ...]
    """Where each tensor stands, such as ``"['labels']"``."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each tensor."""
    elements: tuple[int, ...]
    """The number of elements of each tensor."""
    num_bytes: int
    """Bytes of all tensors together."""
    bytes_per_sample: float
    """Bytes of one sample: of the tensors that are as long as the first one with a dimension, over that length."""


def measure(batch: Any) -> BatchShapes:
    """Measure a batch.

    >>> measure({"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}).num_bytes
    160
    """
    named = list(named_tensors(batch))
    shapes = [shape_of(tensor) for _, tensor in named]
    elements = [_num_elements(tensor) for _, tensor in named]
    sizes = [number * tensor.element_size() for number, (_, tensor) in zip(elements, named, strict=True)]
    samples = next((shape[0] for shape in shapes if shape), 0)
    of_samples = sum(size for size, shape in zip(sizes, shapes, strict=True) if shape[:1] == (samples,))
    return BatchShapes(
        names=tuple(name for name, _ in named),
        shapes=tuple(shapes),
        elements=tuple(elements),
        num_bytes=sum(sizes),
        bytes_per_sample=of_samples / max(1, samples),
    )


def named_tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch and where it stands in it, in order.

    Mappings, lists, tuples, named tuples (packed sequences too) and dataclasses are looked into, and of an object of
    another class the attributes that are one of these or tensors.
    """
    yield from _named(batch, "", inside_objects=True)


def structure_of(batch: Any) -> str:
    """What must be equal for a step to take two batches alike: keys, types, dtypes and numbers of dimensions.

    Lists and tuples count as the same, since collation makes lists of tuples.

    >>> structure_of({"y": [3, 4], "x": (torch.zeros(4, 8), None)})
    "{'x': [float32 2-d, NoneType], 'y': [int, ...]}"
    """
    if isinstance(batch, Tensor):
        return f"{_dtype(batch)} {batch.dim()}-d"
    if isinstance(batch, Mapping):
        entries = ", ".join(f"{key!r}: {structure_of(batch[key])}" for key in sorted(batch, key=str))
        return f"{'' if type(batch) is dict else type(batch).__qualname__}{{{entries}}}"
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return _structure_of_entries(list(batch))
    parts = _parts(batch)
    if not parts:
        return type(batch).__qualname__
    return f"{type(batch).__qualname__}({', '.join(f'{name[1:]}={structure_of(part)}' for name, part in parts)})"


def shapes_in_words(batch: Any, *, shown: int = 3) -> str:
    """Shapes and dtypes of the first tensors.

    >>> shapes_in_words([torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)])
    '(4, 8) float32, (4,) int64'
    """
    tensors = [tensor for _, tensor in named_tensors(batch)]
    words = [f"{shape_of(tensor)} {_dtype(tensor)}" for tensor in tensors[:shown]]
    if not words:
        return f"a {type(batch).__qualname__} without tensors"
    return ", ".join(words) + (f" and {len(tensors) - shown} more" if len(tensors) > shown else "")


def _named(node: Any, path: str, *, inside_objects: bool) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
        return
    is_object = not _is_container(node)
    if is_object and not inside_objects:
        return
    for name, part in _parts(node):
        yield from _named(part, path + name, inside_objects=inside_objects and not is_object)


def _is_container(node: Any) -> bool:
    return isinstance(node, (Mapping, list, tuple)) or (dataclasses.is_dataclass(node) and not isinstance(node, type))


def _parts(node: Any) -> list[tuple[str, Any]]:
    """What a container holds, each with its place; nothing for a leaf."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in node]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", getattr(node, name)) for name in node._fields]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(node)]
    if _is_container(node):
        return [(f".{spec.name}", getattr(node, spec.name)) for spec in dataclasses.fields(node)]
    if isinstance(node, (type, torch.nn.Module)) or callable(node):
        return []
    held = getattr(node, "__dict__", {})
    return [(f".{name}", part) for name, part in held.items() if isinstance(part, (Tensor, list, tuple, Mapping))]


def _structure_of_entries(entries: list[Any]) -> str:
    structures = [structure_of(entry) for entry in entries]
    # As many words as there are samples are no difference; a tensor more is.
    if structures and len(set(structures)) == 1 and next(named_tensors(entries), None) is None:
        return f"[{structures[0]}, ...]"
    return f"[{', '.join(structures)}]"


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape; of a nested tensor, whose samples have shapes of their own, only their number."""
    return (int(tensor.size(0)),) if tensor.is_nested else tuple(tensor.shape)


def _num_elements(tensor: Tensor) -> int:
    if tensor.layout == torch.jagged:
        return int(tensor.values().numel())
    return int(tensor._nnz()) if tensor.layout in _SPARSE else tensor.numel()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
