"""Batches and step outputs as trees: how many samples, divide along the batch dimension, join again.

Nothing is copied: a slice of a tensor is a view. What cannot be divided without guessing is an error that names where
it stands in the batch.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_memfit.errors import BatchStructureError

_SAME_FOR_ALL = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_WAY_OUT = "Pass MemFit(split_batch=...), a function (batch, micro_batch_size) -> pairs of (slice, samples)."


def batch_size_of(batch: Any) -> int:
    """Number of samples in a collated batch: the length of its first tensor that has a batch dimension.

    Args:
        batch: nested mappings, lists, tuples, named tuples and dataclasses of tensors ``(batch, ...)``.

    Raises:
        BatchStructureError: if there is no such tensor, or another part of the batch has a different length.

    >>> batch_size_of({"x": torch.zeros(4, 2), "temperature": torch.tensor(0.5)})
    4
    """
    first = next(_tensors(batch, ""), None)
    if first is None:
        raise BatchStructureError(
            f"The batch of type {type(batch).__name__} has no tensor with a batch dimension, so that its number of "
            f"samples is not known. {_WAY_OUT}"
        )
    path, tensor = first
    samples = int(tensor.shape[0])
    if samples == 0:
        raise BatchStructureError(f"{_at(path)} has shape {tuple(tensor.shape)}: a batch of 0 samples. {_WAY_OUT}")
    _divide(batch, [samples], "", f"{_at(path)} of shape {tuple(tensor.shape)}", set())
    return samples


def split_by_sizes(batch: Any, sizes: Sequence[int], *, lists_of_samples: set[str] | None = None) -> list[Any]:
    """Divide a batch into consecutive slices.

    Tensors are narrowed along dimension 0 (views). Mappings, lists, tuples, named tuples and dataclasses keep their
    type. Tensors without dimensions, numbers, text and ``None`` go into every slice. A list or tuple whose parts can
    all be divided is a structure; one with as many entries as there are samples, and no tensor with a batch dimension
    in it, is divided between the samples.

    Args:
        batch: the collated batch, of ``sum(sizes)`` samples.
        sizes: samples in each slice, each at least 1.
        lists_of_samples: where in a batch lists stand that were divided between the samples although they hold tensors
            with a batch dimension; what is found is added. In a small batch such a list may look like a structure (two
            images of two boxes each), and is then divided as it was in batches before.

    Raises:
        BatchStructureError: if a part has another length or a type of which the batch dimension is not known.

    >>> [part["x"].shape[0] for part in split_by_sizes({"x": torch.zeros(5, 2)}, (3, 2))]
    [3, 2]
    """
    known = set() if lists_of_samples is None else lists_of_samples
    return _divide(batch, list(sizes), "", f"a batch of {sum(sizes)} samples", known)


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Join what the slices of one batch returned into what the undivided batch would have returned.

    Tensors ``(slice, ...)`` are concatenated, detached. Floating tensors without dimensions and floats become their
    weighted mean. Lists with one entry per sample are concatenated. Containers are joined part by part, and values
    that are the same in all slices are kept.

    Args:
        outputs: one per slice, of equal structure.
        sizes: samples in each slice.
        weights: weight of each slice's mean, at least 0.

    Raises:
        BatchStructureError: for any other value, naming where it stands.

    >>> join_outputs([{"score": 1.0, "y": torch.ones(3)}, {"score": 4.0, "y": torch.zeros(1)}], (3, 1), (3, 1))
    {'score': 1.75, 'y': tensor([1., 1., 1., 0.])}
    """
    return _join(list(outputs), list(sizes), list(weights), "")


def detach_tensors(value: Any) -> Any:
    """The same tree with every tensor detached from its graph; containers are new, other values the same objects."""
    if isinstance(value, Tensor):
        return value.detach()
    children = _children(value, "")
    if children is None:
        return value
    return _rebuild(value, [detach_tensors(child) for _, child in children])


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with ``function`` of every tensor.

    Of an object of an unknown class the attributes that are tensors, lists, tuples or mappings are looked into, so that
    a batch class of the user's own is seen; such an object inside another is not.
    """
    return _map(batch, function, inside_objects=True)


def _map(batch: Any, function: Callable[[Tensor], Tensor], *, inside_objects: bool) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    children = _children(batch, "")
    if children is not None:
        return _rebuild(batch, [_map(child, function, inside_objects=inside_objects) for _, child in children])
    attributes = _attributes(batch) if inside_objects else {}
    if not attributes:
        return batch
    mapped = copy.copy(batch)
    vars(mapped).update({name: _map(value, function, inside_objects=False) for name, value in attributes.items()})
    return mapped


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor that :func:`map_tensors` would map, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, keep)
    return found


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Mean of tensors of one shape, detached and in their own dtype; without any weight, the plain mean.

    Entries of weight 0 are left out, so that a ``nan`` of an empty slice does not spread. Sums are formed in float64,
    where equal values of float32 come out unchanged.

    >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0), torch.tensor(float("nan"))], [3, 1, 0])
    tensor(1.7500)
    """
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    if not kept:
        kept = [(value, 1.0) for value in values]
    first = kept[0][0].detach()
    if len(kept) == 1:
        return first
    dtype = torch.float32 if first.device.type == "mps" else torch.float64
    total = torch.zeros_like(first, dtype=dtype)
    for value, weight in kept:
        total = total + value.detach().to(dtype) * weight
    result_dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
    return (total / sum(weight for _, weight in kept)).to(result_dtype)


def _divide(node: Any, sizes: list[int], path: str, expected: str, lists_of_samples: set[str]) -> list[Any]:
    """One part per size. ``expected`` says in an error what the length was compared with."""
    if isinstance(node, Tensor):
        return _divide_tensor(node, sizes, path, expected)
    if isinstance(node, _SAME_FOR_ALL):
        return [node for _ in sizes]
    if isinstance(node, PackedSequence):
        raise BatchStructureError(
            f"{_at(path)} is a PackedSequence, which has no batch dimension to divide: pack inside training_step, or "
            f"divide it yourself. {_WAY_OUT}"
        )
    children = _children(node, path)
    if children is None:
        raise BatchStructureError(
            f"{_at(path)} is of type {type(node).__module__}.{type(node).__qualname__}, whose batch dimension is not "
            f"known, while dividing {sum(sizes)} samples. {_WAY_OUT}"
        )
    per_sample = _is_plain_sequence(node) and len(node) == sum(sizes)
    if per_sample and (path in lists_of_samples or next(_tensors(node, path), None) is None):
        return _divide_entries(node, sizes)
    try:
        parts = [_divide(child, sizes, child_path, expected, lists_of_samples) for child_path, child in children]
    except BatchStructureError:
        if not per_sample:
            raise
        lists_of_samples.add(path)
        return _divide_entries(node, sizes)
    return [_rebuild(node, [part[index] for part in parts]) for index in range(len(sizes))]


def _divide_tensor(tensor: Tensor, sizes: list[int], path: str, expected: str) -> list[Any]:
    if tensor.dim() == 0:
        return [tensor for _ in sizes]
    if tensor.is_nested or tensor.layout != torch.strided:
        raise BatchStructureError(
            f"{_at(path)} is a tensor of layout {tensor.layout} that cannot be divided into views of {sizes} samples. "
            f"{_WAY_OUT}"
        )
    if tensor.shape[0] != sum(sizes):
        raise BatchStructureError(
            f"{_at(path)} has shape {tuple(tensor.shape)}, but {expected} means {sum(sizes)} samples: every tensor "
            f"must have the batch as its first dimension. {_WAY_OUT}"
        )
    return list(torch.split(tensor, sizes))


def _divide_entries(node: Any, sizes: list[int]) -> list[Any]:
    parts, start = [], 0
    for size in sizes:
        parts.append(_rebuild(node, list(node[start : start + size])))
        start += size
    return parts


def _join(values: list[Any], sizes: list[int], weights: list[float], path: str) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _join_tensors(values, sizes, weights, path)
    if all(isinstance(value, float) for value in values):
        return first if len(set(values)) == 1 else _mean_of_floats(values, weights)
    if isinstance(first, _SAME_FOR_ALL):
        if all(type(value) is type(first) and value == first for value in values):
            return first
    elif all(value is first for value in values):
        return first
    elif all(type(value) is type(first) for value in values):
        return _join_containers(values, sizes, weights, path)
    kinds = ", ".join(
        repr(value) if isinstance(value, _SAME_FOR_ALL) else type(value).__qualname__ for value in values[:3]
    )
    raise _not_joinable(path, sizes, f"it is different in each slice ({kinds})")


def _join_tensors(values: list[Tensor], sizes: list[int], weights: list[float], path: str) -> Tensor:
    first = values[0]
    batched = all(value.dim() > 0 and value.shape[0] == size for value, size in zip(values, sizes, strict=True))
    if batched and all(value.shape[1:] == first.shape[1:] for value in values):
        return torch.cat([value.detach() for value in values])
    if all(value.dim() == 0 and value.is_floating_point() for value in values):
        return weighted_mean(values, weights)
    if all(value.shape == first.shape and torch.equal(value, first) for value in values):
        return first.detach()
    shapes = ", ".join(str(tuple(value.shape)) for value in values[:3])
    raise _not_joinable(path, sizes, f"its tensors have shapes {shapes} and differ")


def _join_containers(values: list[Any], sizes: list[int], weights: list[float], path: str) -> Any:
    first = values[0]
    children = [_children(value, path) for value in values]
    if any(child is None for child in children):
        raise _not_joinable(path, sizes, f"its type is {type(first).__module__}.{type(first).__qualname__}")
    trees = [child for child in children if child is not None]
    per_sample = _is_plain_sequence(first) and [len(value) for value in values] == sizes
    if per_sample and next(_tensors(first, path), None) is None:
        return _join_entries(values)
    try:
        if any([name for name, _ in tree] != [name for name, _ in trees[0]] for tree in trees):
            raise _not_joinable(path, sizes, "its entries are not the same in each slice")
        joined = [
            _join([tree[index][1] for tree in trees], sizes, weights, name) for index, (name, _) in enumerate(trees[0])
        ]
    except BatchStructureError:
        if not per_sample:
            raise
        return _join_entries(values)
    return _rebuild(first, joined)


def _join_entries(values: list[Any]) -> Any:
    return _rebuild(values[0], [detach_tensors(entry) for value in values for entry in value])


def _not_joinable(path: str, sizes: list[int], why: str) -> BatchStructureError:
    return BatchStructureError(
        f"training_step returned {path or 'a value'} that cannot be joined over slices of {sizes} samples: {why}. "
        "Return tensors with the batch as first dimension or means without dimensions, or use self.log."
    )


def _mean_of_floats(values: list[float], weights: list[float]) -> float:
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    if not kept:
        kept = [(value, 1.0) for value in values]
    return math.fsum(value * weight for value, weight in kept) / math.fsum(weight for _, weight in kept)


def _tensors(node: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors that have dimensions, in order, each with its path."""
    if isinstance(node, Tensor):
        if node.dim() > 0:
            yield path, node
        return
    for child_path, child in _children(node, path) or ():
        yield from _tensors(child, child_path)


def _children(node: Any, path: str) -> list[tuple[str, Any]] | None:
    """Parts of a container, each with its path; ``None`` for a leaf."""
    if isinstance(node, (*_SAME_FOR_ALL, Tensor, PackedSequence)):
        return None
    if isinstance(node, Mapping):
        return [(f"{path}[{key!r}]", node[key]) for key in node]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f"{path}.{name}", getattr(node, name)) for name in node._fields]
    if isinstance(node, (list, tuple)):
        return [(f"{path}[{index}]", child) for index, child in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f"{path}.{spec.name}", getattr(node, spec.name)) for spec in dataclasses.fields(node)]
    return None


def _attributes(node: Any) -> dict[str, Any]:
    """Attributes of a batch class of the user's own that hold tensors; empty for anything else."""
    if isinstance(node, (*_SAME_FOR_ALL, type, torch.nn.Module)) or callable(node):
        return {}
    held = getattr(node, "__dict__", {})
    return {name: value for name, value in held.items() if isinstance(value, (Tensor, list, tuple, Mapping))}


def _rebuild(node: Any, children: list[Any]) -> Any:
    """A container like ``node`` around other children."""
    if isinstance(node, Mapping):
        pairs = dict(zip(node, children, strict=True))
        if type(node) is dict:
            return pairs
        if not hasattr(node, "__setitem__"):
            return type(node)(pairs)  # type: ignore[call-arg]
        rebuilt = copy.copy(node)
        for key, child in pairs.items():
            rebuilt[key] = child
        return rebuilt
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*children)
    if isinstance(node, (list, tuple)):
        return type(node)(children)
    rebuilt = copy.copy(node)
    for spec, child in zip(dataclasses.fields(node), children, strict=True):
        object.__setattr__(rebuilt, spec.name, child)  # a frozen dataclass refuses the ordinary way
    return rebuilt


def _is_plain_sequence(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields")


def _at(path: str) -> str:
    return f"batch{path}"
