"""Looking ahead into data that cannot be rewound: what was seen is handed on, and random numbers move as in training.

A :class:`Stream` remembers the items that were looked at. :func:`hand_on` makes the object they came from yield them
first the next time somebody iterates it, then go on with the very same iterator; after that the object is as it was.
The object itself stays the same one: only its class is exchanged for a subclass until then, so that every
``isinstance`` check, attribute and identity holds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_STREAM = "_handed_on_stream"


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


class Stream:
    """An iterator that remembers what was looked at, until one consumer claims it."""

    def __init__(
        self,
        start: Callable[[], Iterator[Any]],
        sources: RandomSources,
        *,
        starts: int = 1,
        redraw: Callable[[], None] | None = None,
        on_claim: Callable[[Iterator[Any]], None] | None = None,
    ) -> None:
        """Prepare; nothing is iterated yet.

        Args:
            start: makes the iterator.
            sources: generators whose moves belong to the items.
            starts: how often the consumer will ask for an iterator before it takes the first item. As many are made,
                and the last one is used, so that an object that counts them is where a plain run would have it.
            redraw: draws what a start draws, for a consumer that finds the generators elsewhere.
            on_claim: called with the iterator when the consumer takes the first item.
        """
        self.claimed = False
        self._start, self._starts, self._sources = start, starts, sources
        self._redraw, self._on_claim = redraw, on_claim
        self._iterator: Iterator[Any] | None = None
        self._start_moves: deque[Move] = deque()
        self._items: deque[tuple[Any, Move]] = deque()

    def open(self) -> None:
        """Make the iterator, once."""
        if self._iterator is not None:
            return
        for _ in range(self._starts):
            self._iterator, move = self._sources.record(self._start)
            self._start_moves.append(move)

    def look_ahead(self) -> Iterator[Any]:
        """Yield the items from the first one on, using none of them up; may be called repeatedly."""
        self.open()
        assert self._iterator is not None
        position = 0
        while True:
            if position < len(self._items):
                item, move = self._items[position]
                move.replay()
            else:
                try:
                    item, move = self._sources.record(self._iterator.__next__)
                except StopIteration:
                    return
                self._items.append((item, move))
            yield item
            position += 1

    def start_again(self) -> None:
        """The consumer asks for an iterator: draw what that draws."""
        replayed = self._start_moves.popleft().replay() if self._start_moves else False
        if not replayed and self._redraw is not None:
            self._redraw()

    def claim(self) -> tuple[deque[tuple[Any, Move]], Iterator[Any]] | None:
        """The items looked at and the iterator that goes on after them; ``None`` if they were claimed before."""
        if self.claimed or self._iterator is None:
            return None
        self.claimed = True
        items, iterator, on_claim = self._items, self._iterator, self._on_claim
        self._let_go()
        if on_claim is not None:
            on_claim(iterator)
        return items, iterator

    def drop(self) -> None:
        """Let the iterator and the items go; workers that belong to it end with it."""
        self.claimed = True
        self._let_go()

    def _let_go(self) -> None:
        # The callables refer to the object that is iterated; it must not live longer because it was looked at.
        self._items, self._iterator = deque(), None
        self._start, self._redraw, self._on_claim = _start_nothing, None, None


class HandedOnIterator:
    """Yields what was looked at, then goes on with the same iterator; starts afresh if someone else claimed it."""

    def __init__(self, stream: Stream, release: Callable[[], None], fresh: Callable[[], Iterator[Any]]) -> None:
        """Decide nothing yet: an iterator that is made and thrown away must not use the stream up."""
        self._stream, self._release, self._fresh = stream, release, fresh
        self._items: deque[tuple[Any, Move]] = deque()
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> HandedOnIterator:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            claimed = self._stream.claim()
            self._release()
            self._items, self._iterator = claimed if claimed is not None else (deque(), self._fresh())
            del self._stream, self._release, self._fresh
        if self._items:
            item, move = self._items.popleft()
            move.replay()
            return item
        return next(self._iterator)

    def __reduce__(self) -> Any:
        # A copy is exhausted: positions in data do not travel, as with the iterators of a DataLoader.
        return iter, ((),)


class HandedOn:
    """Stands for an iterable whose class cannot be exchanged (a generator, a ``map``); passes everything on to it."""

    def __init__(self, iterable: Any, stream: Stream) -> None:
        """Wrap the iterable and what was looked at."""
        self._handed_on_iterable, self._handed_on_stream = iterable, stream

    def __iter__(self) -> Iterator[Any]:
        iterable, stream = self._handed_on_iterable, self._handed_on_stream
        if stream.claimed:
            return iter(iterable)
        stream.start_again()
        return HandedOnIterator(stream, lambda: None, lambda: iter(iterable))

    def __len__(self) -> int:
        return len(self._handed_on_iterable)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_handed_on_iterable"], name)


def stream_of(owner: object) -> Stream | None:
    """What was looked at in ``owner`` and waits to be handed on."""
    stream = getattr(owner, _STREAM, None)
    return stream if isinstance(stream, Stream) and not stream.claimed else None


def own_class(owner: object) -> type:
    """The class of ``owner``, also while something waits to be handed on."""
    cls = type(owner)
    return cls.__mro__[1] if _STREAM in cls.__dict__ else cls


def can_hand_on(owner: object) -> bool:
    """Whether the class of ``owner`` can be exchanged for a while."""
    if _STREAM in type(owner).__dict__:
        return True
    cls: Any = type(owner)
    try:
        object.__setattr__(owner, "__class__", type(cls)(cls.__name__, (cls,), {"__slots__": ()}))
        object.__setattr__(owner, "__class__", cls)
    except TypeError:
        return False
    return True


def hand_on(owner: object, stream: Stream) -> None:
    """Make the next iteration of ``owner`` yield what was looked at first, then go on with the same iterator."""
    base, owners = own_class(owner), [owner]

    def release(this: object) -> None:
        for holder in (*owners, this):
            if _STREAM in type(holder).__dict__:
                object.__setattr__(holder, "__class__", base)
        owners.clear()

    def __iter__(self: Any) -> Iterator[Any]:
        if stream.claimed:
            release(self)
            return iter(self)
        stream.start_again()
        return HandedOnIterator(stream, lambda: release(self), lambda: iter(self))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # A copy, also one in a worker process, is a plain object without what was looked at.
        waiting = type(self)
        object.__setattr__(self, "__class__", base)
        try:
            return self.__reduce_ex__(protocol)
        finally:
            object.__setattr__(self, "__class__", waiting)

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A loader that is sent to another position no longer continues from what was looked at.
        stream.drop()
        release(self)
        return self.load_state_dict(*args, **kwargs)

    namespace: dict[str, Any] = {
        "__slots__": (),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__iter__": __iter__,
        "__reduce_ex__": __reduce_ex__,
        _STREAM: stream,
    }
    if hasattr(base, "load_state_dict"):
        namespace["load_state_dict"] = load_state_dict
    object.__setattr__(owner, "__class__", type(base)(base.__name__, (base,), namespace))


def stop_handing_on(owner: object) -> None:
    """Give ``owner`` its class back and let what was looked at go."""
    stream = stream_of(owner)
    if stream is not None:
        stream.drop()
    if _STREAM in type(owner).__dict__:
        object.__setattr__(owner, "__class__", own_class(owner))


def is_generator(value: object) -> bool:
    """Whether ``value`` is a random generator that :class:`RandomSources` can read and write."""
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def _start_nothing() -> Iterator[Any]:
    return iter(())


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
