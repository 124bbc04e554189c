"""Looking ahead into data that cannot be rewound: what was seen is handed on, and random numbers move as in training.

A :class:`Stream` remembers the items that were looked at. :func:`hand_on` makes the object they came from yield them
first the next time somebody iterates it, then go on with the very same iterator; after that the object is as it was.
The object itself stays the same one: only its class is exchanged for a subclass until then, so that every
``isinstance`` check, attribute and identity holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memfit.apply.random_sources import Move, RandomSources

_STREAM = "_handed_on_stream"


@dataclass(frozen=True, kw_only=True)
class End:
    """How an iterator ended while it was looked at."""

    move: Move
    """What reaching the end did to the random generators."""
    error: Exception | None
    """What it raised; ``None`` if there was simply nothing more."""

    def reach(self) -> None:
        """End in the same way for the one who is handed on.

        Raises:
            Exception: what the iterator raised, if it did.
        """
        self.move.replay()
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one consumer gets."""

    items: deque[tuple[Any, Move]]
    """What was looked at, in order."""
    iterator: Iterator[Any]
    """Goes on after them."""
    end: End | None
    """Set if the iterator has no more."""


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
        self._end: End | None = None

    @property
    def draws(self) -> bool:
        """Whether the latest item drew numbers from generators that training draws from too.

        Looking further would then draw them in another order than a plain run, in which training draws in between.
        """
        return bool(self._items) and self._items[-1][1].of_global_generators

    def open(self) -> None:
        """Make the iterator, once."""
        if self._iterator is not None:
            return
        for _ in range(self._starts):
            self._iterator, move = self._sources.record(self._start)
            self._start_moves.append(move)

    def look_ahead(self) -> Iterator[Any]:
        """Yield the items from the first one on, using none of them up; may be called repeatedly.

        An exception of the iterator passes through, and comes up again where the consumer gets there.
        """
        self.open()
        position = 0
        while position < len(self._items) or self._advance():
            item, move = self._items[position]
            move.replay()
            yield item
            position += 1

    def _advance(self) -> bool:
        """Take one more item from the iterator; whether there was one."""
        assert self._iterator is not None
        if self._end is not None:
            self._end.reach()
            return False
        before = self._sources.read()
        try:
            item = next(self._iterator)
        except Exception as error:
            stopped = isinstance(error, StopIteration)
            self._end = End(move=Move(self._sources, before, self._sources.read()), error=None if stopped else error)
            if not stopped:
                raise
            return False
        self._items.append((item, Move(self._sources, before, self._sources.read())))
        return True

    def start_again(self) -> None:
        """The consumer asks for an iterator: draw what that draws."""
        replayed = self._start_moves.popleft().replay() if self._start_moves else False
        if not replayed and self._redraw is not None:
            self._redraw()

    def claim(self) -> Claim | None:
        """The items looked at and the iterator that goes on after them; ``None`` if they were claimed before."""
        if self.claimed or self._iterator is None:
            return None
        self.claimed = True
        claim, on_claim = Claim(items=self._items, iterator=self._iterator, end=self._end), self._on_claim
        self._let_go()
        if on_claim is not None:
            on_claim(claim.iterator)
        return claim

    def drop(self) -> None:
        """Let the iterator and the items go; workers that belong to it end with it."""
        self.claimed = True
        if self._end is not None and self._end.error is not None:
            # An error of a worker refers to itself by its traceback, and by that to the worker.
            self._end.error.__traceback__ = None
        self._let_go()

    def _let_go(self) -> None:
        # The callables refer to the object that is iterated; it must not live longer because it was looked at.
        self._items, self._iterator, self._end = deque(), None, None
        self._start, self._redraw, self._on_claim = _start_nothing, None, None


class HandedOnIterator:
    """Yields what was looked at, then goes on with the same iterator; starts afresh if someone else claimed it."""

    def __init__(self, stream: Stream, release: Callable[[], None], fresh: Callable[[], Iterator[Any]]) -> None:
        """Decide nothing yet: an iterator that is made and thrown away must not use the stream up."""
        self._stream, self._release, self._fresh = stream, release, fresh
        self._items: deque[tuple[Any, Move]] = deque()
        self._iterator: Iterator[Any] | None = None
        self._end: End | None = None

    def __iter__(self) -> HandedOnIterator:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        if self._items:
            item, move = self._items.popleft()
            move.replay()
            return item
        if self._end is not None:
            end, self._end = self._end, None
            end.reach()
            raise StopIteration
        return next(self._iterator)

    def _begin(self) -> Iterator[Any]:
        claim = self._stream.claim()
        self._release()
        fresh = self._fresh
        del self._stream, self._release, self._fresh
        if claim is None:
            return fresh()
        self._items, self._end = claim.items, claim.end
        return claim.iterator

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


def _start_nothing() -> Iterator[Any]:
    return iter(())
