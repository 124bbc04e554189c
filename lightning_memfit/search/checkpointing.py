"""Which modules can be recomputed instead of saved: repeated blocks, or modules the user names.

Pure: reads the module tree and changes nothing. Two private marks of torch are read by
:func:`reason_not_checkpointable`: classes defined under ``torch._dynamo`` (what ``torch.compile(module)`` returns) and
the attribute ``Module._compiled_call_impl`` (set by ``module.compile()``).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError

Signature = tuple[Any, ...]


def find_repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Qualified names of the members of equal structure in ``ModuleList`` and ``Sequential``, in module order.

    Two members are equal if their trees of classes and the names, shapes and dtypes of their parameters and buffers
    are. Within one container the members are grouped by that, other members may stand between them, and every group of
    two or more is taken. The outermost repetition wins: inside a taken block nothing more is looked for. Containers
    that are never called themselves (a ``ModuleList`` of ``ModuleList``) are seen through: their members count as
    members of the outer one. A member listed more than once (shared weights) is repeated, and named once.

    Left out are members without parameters, members that torch.nn computes in a single step (a lone ``Linear``: there
    is nothing between its input and its output to recompute; an ``nn.LSTM`` is kept, its gates are what fills memory),
    compiled and scripted ones, and those that recompute their activations already, or parts of theirs.

    >>> find_repeated_blocks(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))))
    ('0', '1')
    """
    return without_recomputing(module, _repeated_blocks(module))


@dataclass(frozen=True, kw_only=True)
class Recomputable:
    """What checkpointing may choose from. Qualified names."""

    blocks: tuple[str, ...]
    """Repeated blocks."""
    matched: tuple[str, ...]
    """Modules that the user's patterns match."""
    anyway: tuple[str, ...]
    """Repeated blocks and matched modules that the model recomputes by itself; they are in neither of the others."""


def recomputable(module: nn.Module, asked: str | tuple[str, ...], seen: Collection[str] = ()) -> Recomputable:
    """What may be recomputed, without what is recomputed anyway.

    Args:
        module: the root of the qualified names.
        asked: a word, or the user's patterns.
        seen: qualified names of modules that a step without MemFit was seen to recompute.

    Raises:
        ConfigurationError: if a pattern matches no module, or only containers that are never called.
    """
    repeated = _repeated_blocks(module)
    matched = match_modules(module, asked) if isinstance(asked, tuple) else ()
    free = without_recomputing(module, tuple(dict.fromkeys((*repeated, *matched))), seen)
    named = dict(module.named_modules(remove_duplicate=False))
    taken = [name for name in dict.fromkeys((*repeated, *matched)) if name not in free]
    return Recomputable(
        blocks=tuple(name for name in repeated if name in free),
        matched=tuple(name for name in matched if name in free),
        # Of layers with a switch of their own, the model may have been told to recompute every n-th.
        anyway=tuple(name for name in taken if getattr(named[name], "gradient_checkpointing", None) is not False),
    )


def without_recomputing(module: nn.Module, names: Sequence[str], seen: Collection[str] = ()) -> tuple[str, ...]:
    """Those of some modules that nobody recomputes yet: neither whole, nor in part, nor as part of another.

    Args:
        module: the root of the qualified names.
        names: qualified names of modules.
        seen: qualified names of modules that a step without MemFit was seen to recompute.
    """
    named = dict(module.named_modules(remove_duplicate=False))

    def is_recomputed(name: str) -> bool:
        around = (module, *(named[outer] for outer in _ancestors(name)))
        if any(recomputes_already(part) for part in (*around, *named[name].modules())):
            return True
        return any(part == name or part.startswith(f"{name}.") for part in seen)

    return tuple(name for name in names if not is_recomputed(name))


def match_modules(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Qualified names of the modules that match a pattern, in module order; what lies inside a matched one is dropped.

    Args:
        module: the root; its own name is ``""`` and is never matched.
        patterns: as in ``fnmatch`` on qualified names, such as ``"encoder.layer.*"`` (``*`` also matches dots).

    Raises:
        ConfigurationError: if a pattern matches no module, or only containers that are never called.
    """
    named = {name: child for name, child in module.named_modules() if name}
    wanted: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern) if pattern else []
        callable_matches = [name for name in matches if _is_called(named[name])]
        if not callable_matches:
            raise ConfigurationError(_no_match_message(pattern, matches, named))
        wanted.update(callable_matches)
    return tuple(name for name in named if name in wanted and not any(outer in wanted for outer in _ancestors(name)))


def closest_names(name: str, module: nn.Module) -> tuple[str, ...]:
    """Up to three qualified names of modules that look most like ``name``."""
    names = [qualified for qualified, _ in module.named_modules() if qualified]
    return tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.4))


def reason_not_checkpointable(block: nn.Module) -> str | None:
    """Why recomputing ``block`` cannot be switched on: it holds compiled or scripted code. ``None`` if it can."""
    for name, inner in block.named_modules():
        where = f"its submodule {name!r} is" if name else "it is"
        if isinstance(inner, torch.jit.ScriptModule):
            return f"{where} a ScriptModule, which may save other tensors when it runs a second time"
        if is_compiled(inner):
            return f"{where} compiled (torch.compile), and was compiled without recomputation"
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is the result of ``torch.compile(module)``, or had ``module.compile()`` called on it."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return any(base.__module__.startswith("torch._dynamo") for base in type(module).__mro__)


def recomputes_already(module: nn.Module) -> bool:
    """Whether ``module`` recomputes activations without MemFit.

    Recognised are ``gradient_checkpointing = True`` (transformers and diffusers, on a block or on the model around it)
    and torch's ``CheckpointWrapper``. A ``forward`` that calls ``torch.utils.checkpoint`` itself cannot be seen from
    outside; a trace of the step sees it.
    """
    return getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper"


def _repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    taken: dict[int, str] = {}
    _collect(module, "", taken, set())
    order = [name for name, _ in module.named_modules(remove_duplicate=False)]
    return tuple(sorted(taken.values(), key=order.index))


def _collect(module: nn.Module, prefix: str, taken: dict[int, str], visited: set[int]) -> None:
    """Add the repeated blocks below ``module`` to ``taken`` (name by identity), outermost first."""
    if id(module) in visited or id(module) in taken or is_compiled(module):
        return
    visited.add(id(module))
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for group in _groups(module, prefix):
            # A shared module can have been reached before on another path, and blocks inside it taken there.
            if len(group) >= 2 and not any(id(inner) in taken for _, member in group for inner in member.modules()):
                for name, member in group:
                    taken.setdefault(id(member), name)
    for name, child in module.named_children():
        _collect(child, _join(prefix, name), taken, visited)


def _groups(container: nn.Module, prefix: str) -> list[list[tuple[str, nn.Module]]]:
    """Members that are blocks, with their names, grouped by structure."""
    groups: dict[Signature, list[tuple[str, nn.Module]]] = {}
    for name, member in _members(container, prefix):
        if _is_block(member):
            groups.setdefault(_signature(member), []).append((name, member))
    return list(groups.values())


def _members(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Members with their names, repeated ones as often as they are listed, looking through uncalled containers."""
    for name, member in container._modules.items():
        if member is None:
            continue
        if _is_called(member):
            yield _join(prefix, name), member
        else:
            yield from _members(member, _join(prefix, name))


def _is_block(member: nn.Module) -> bool:
    if next(member.parameters(), None) is None or _is_single_step(member):
        return False
    return reason_not_checkpointable(member) is None


def _is_single_step(member: nn.Module) -> bool:
    has_children = next(member.children(), None) is not None
    of_torch = str(getattr(type(member).forward, "__module__", "")).startswith("torch.nn.modules.")
    return of_torch and not has_children and not isinstance(member, nn.RNNBase)


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own; ``ModuleList`` and ``ModuleDict`` have none."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _signature(module: nn.Module) -> Signature:
    """Structure of a module: classes, and names, shapes and dtypes of parameters and buffers; no values."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    own = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    return type(module), own, tuple((name, _signature(child)) for name, child in module.named_children())


def _no_match_message(pattern: str, matches: Sequence[str], named: dict[str, nn.Module]) -> str:
    setting = f"activation_checkpointing pattern {pattern!r}"
    if matches:
        kind = type(named[matches[0]]).__name__
        return (
            f"{setting} matches only {matches[0]!r}, a {kind}: its members are called, never it, so that nothing would "
            f"be recomputed. Use '{matches[0]}.*'."
        )
    close = difflib.get_close_matches(pattern, list(named), n=3, cutoff=0.4)
    hint = f"Close names: {', '.join(map(repr, close))}. " if close else ""
    return (
        f"{setting} matches none of the {len(named)} modules of the model. {hint}"
        "Patterns are those of fnmatch on qualified names, such as 'blocks.*'."
    )


def _ancestors(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
