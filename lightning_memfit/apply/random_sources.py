"""Random generators read, written back and compared, and what one call did to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

NUM_GLOBAL = 3
"""The generators that every :class:`RandomSources` begins with: torch's (host), numpy's and Python's."""


class RandomSources:
    """The global generators of torch (host), numpy and Python, and further ones: read, written back, compared."""

    def __init__(self, *generators: object) -> None:
        """Take the further ones that :func:`is_generator` knows; anything else is left out."""
        self._further = list({id(generator): generator for generator in generators if is_generator(generator)}.values())

    def read(self) -> list[Any]:
        """The state of every generator."""
        fixed: list[Any] = [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()]
        return fixed + [_state(generator) for generator in self._further]

    def write(self, states: list[Any], *, only: Callable[[int], bool] = lambda index: True) -> None:
        """Set the states as :meth:`read` gave them; ``only`` chooses by position."""
        fixed = (torch.set_rng_state, np.random.set_state, random.setstate)
        for index, state in enumerate(states):
            if not only(index):
                continue
            if index < len(fixed):
                fixed[index](state)
            else:
                _set_state(self._further[index - len(fixed)], state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give every generator its state back at the end, also after an exception."""
        states = self.read()
        try:
            yield
        finally:
            self.write(states)

    def record(self, call: Callable[[], Any]) -> tuple[Any, Move]:
        """Call, and note which generators the call moved from where to where."""
        before = self.read()
        result = call()
        return result, Move(self, before, self.read())


class Move:
    """What one call did to the random generators."""

    def __init__(self, sources: RandomSources, before: list[Any], after: list[Any]) -> None:
        """Keep the states of the generators that moved."""
        self._sources = sources
        self._moved = {
            index: (old, new) for index, (old, new) in enumerate(zip(before, after, strict=True)) if not _same(old, new)
        }

    def replay(self) -> bool:
        """Move the generators as the call did, those that stand where it found them; whether that was all of them.

        One that stands elsewhere was used in between, so that a plain run would have drawn other numbers as well.
        """
        if not self._moved:
            return True
        now = self._sources.read()
        found = {index for index, (old, _) in self._moved.items() if _same(now[index], old)}
        target = [self._moved[index][1] if index in found else state for index, state in enumerate(now)]
        self._sources.write(target, only=found.__contains__)
        return len(found) == len(self._moved)

    @property
    def of_global_generators(self) -> bool:
        """Whether a generator moved that training draws from as well."""
        return any(index < NUM_GLOBAL for index in self._moved)


def is_generator(value: object) -> bool:
    """Whether ``value`` is a random generator that :class:`RandomSources` can read and write."""
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)
