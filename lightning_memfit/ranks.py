"""What the processes of one run tell each other beside training: one plan, one verdict, one error, and no deadlock.

Adapter for ``torch.distributed``: a group of its own over gloo, so that nothing mixes with the engine's collectives;
``distributed_c10d._get_default_store`` for what a failing rank leaves there (``rank_notes.py``).

Every exchange carries a value or an error, pickled, with every tensor on the host: one on an accelerator would be
unpickled on the device of the rank that sends it. Work that may fail on one rank alone is run in :meth:`Ranks.each`,
which ends on all ranks alike.

Where the engine's own collectives run, a rank that fails cannot tell the others through them: it leaves a note
(:meth:`Ranks.failing`), and its end breaks the connections on which the others wait. It goes on after an error only
where all of them had it at the same place (:meth:`Ranks.alike`).
"""

from __future__ import annotations

import datetime
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from lightning_memfit.errors import MemFitError, RankFailedError, first_line
from lightning_memfit.rank_notes import ALIKE_WITHIN, RankNotes
from lightning_memfit.units import format_seconds

T = TypeVar("T")

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
"""How long a rank waits for the others where the strategy says nothing; torch's own default for gloo and NCCL."""
_BROKEN = ("gloo/transport", "gloo::", "nccl error", "connection closed by peer", "connection reset by peer")
_groups = itertools.count()  # every rank forms them in the same order, so that their numbers agree


Together = Mapping[str, Callable[[Any], Any]]
"""By name, what every rank does when the leader asks for it."""
_NOTHING: Together = {}


class Ranks(Protocol):
    """The processes of a run, one for each device."""

    index: int
    """Which of them this is; 0 leads."""
    count: int
    """How many there are."""

    @property
    def is_leader(self) -> bool:
        """Whether this one plans for all."""

    @property
    def is_alone(self) -> bool:
        """Whether it waits for no other rank now."""

    def each(self, work: Callable[[], T], *, doing: str, tell: Callable[[T], Any] = ...) -> Told[T]:
        """Run ``work`` on every rank; an error of one ends it on all."""

    def led(self, work: Callable[[], T], *, doing: str, together: Together = ...) -> T:
        """Run ``work`` on the leader; every rank gets its result or its error."""

    def call(self, name: str, argument: Any) -> Any:
        """Within work that is led, let every rank do one of the things that all do together."""

    def share(self, value: T | None = None, *, together: Together = ...) -> T:
        """The leader's value; the others do before what it lets all do together."""

    def leading(self, together: Together) -> Any:
        """Within it the leader may :meth:`call`, while the others wait for what it shares."""

    def from_rank(self, rank: int, value: T) -> T:
        """The value that one of them has."""

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""

    def largest(self, value: int) -> int:
        """The largest of a whole number over the ranks."""

    def alone(self) -> Any:
        """Within it no rank waits for another: means are those of this rank."""

    def failing(self, doing: str) -> Any:
        """Within it the engine's collectives run: an error of one rank is told to those that wait for it."""

    def alike(self, error: Exception, place: str, *, doing: str) -> None:
        """Return if every rank failed at the same place, so that all may go on; else raise the error."""

    def knows(self, error: BaseException) -> bool:
        """Whether the other ranks have been told of an error."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True, kw_only=True)
class Told(Generic[T]):
    """What came of work that every rank did."""

    own: T
    """This rank's result."""
    all: list[Any]
    """What every rank tells of its result, in their order."""


def _itself(value: Any) -> Any:
    return value


class OneRank:
    """A run on one device: nobody to wait for."""

    index = 0
    count = 1
    is_leader = True
    is_alone = True

    def __init__(self) -> None:
        """There is nobody to find."""
        self._together: Together = _NOTHING

    def each(self, work: Callable[[], T], *, doing: str, tell: Callable[[T], Any] = _itself) -> Told[T]:
        """Run it."""
        own = work()
        return Told(own=own, all=[tell(own)])

    def led(self, work: Callable[[], T], *, doing: str, together: Together = _NOTHING) -> T:
        """Run it."""
        with self.leading(together):
            return work()

    @contextmanager
    def leading(self, together: Together) -> Iterator[None]:
        """Within it there may be calls."""
        before, self._together = self._together, together
        try:
            yield
        finally:
            self._together = before

    def call(self, name: str, argument: Any) -> Any:
        """Do it."""
        return self._together[name](argument)

    def share(self, value: T | None = None, *, together: Together = _NOTHING) -> T:
        """The value itself."""
        return value  # type: ignore[return-value]  # the leader always has one

    def from_rank(self, rank: int, value: T) -> T:
        """The value itself."""
        return value

    def mean(self, value: float) -> float:
        """The number itself."""
        return value

    def largest(self, value: int) -> int:
        """The number itself."""
        return value

    @contextmanager
    def alone(self) -> Iterator[None]:
        """As ever."""
        yield

    @contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        """As ever."""
        yield

    def alike(self, error: Exception, place: str, *, doing: str) -> None:
        """All one of them."""

    def knows(self, error: BaseException) -> bool:
        """There is nobody to be told."""
        return True

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class _Call:
    """Something that all ranks do together, as it is asked for."""

    name: str
    argument: Any


@dataclass(frozen=True)
class _Failure:
    """How a rank failed, as it is sent."""

    words: str
    error: bytes | None
    """One of MemFit's own errors, which every rank raises alike; ``None`` for others, which stay where they are."""


class SeveralRanks:
    """A run on several devices, once its processes have found each other.

    Attributes:
        index: which of them this is.
        count: how many there are.
    """

    def __init__(self, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
        """Form a group of all ranks; every rank does so at the same point.

        Args:
            timeout: how long a rank waits for another.
        """
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._notes = RankNotes(_store, number=next(_groups), index=self.index, count=self.count)
        self._unlike: Exception | None = None
        self._together: Together = _NOTHING
        self._is_alone = False
        self._known: list[BaseException] = []

    @property
    def is_leader(self) -> bool:
        """Rank 0 plans."""
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        """Whether it is within :meth:`alone`."""
        return self._is_alone

    def each(self, work: Callable[[], T], *, doing: str, tell: Callable[[T], Any] = _itself) -> Told[T]:
        """Run ``work`` on every rank and wait for all of them.

        Args:
            work: must not need another rank: where it fails on one, that one does not come to a meeting.
            doing: what it is, for the message, such as ``"looking at the data"``.
            tell: what the others are told of the result; pickled.

        Raises:
            RankFailedError: if it failed on another rank; where it failed on this one, its own error passes through.
        """
        own: T | None = None
        failure: Exception | None = None
        try:
            own = work()
            told: Any = tell(own)
        except Exception as error:
            failure, told = error, _failure_of(error)
        outcomes = self._gather(told, doing)
        failed = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)]
        if not failed:
            assert failure is None
            return Told(own=own, all=outcomes)  # type: ignore[arg-type]  # set where nothing failed
        first = outcomes[failed[0]]
        said_by_another = failed[0] != self.index and failure is not None and first.words == _failure_of(failure).words
        if failure is not None and not said_by_another:
            self._known.append(failure)
            raise failure
        # The same on several ranks is said in full by the first of them alone.
        told_of = RankFailedError(_failed_words(failed, self.count, doing, first.words), rank=failed[0])
        self._known.append(told_of)
        raise told_of from failure

    def led(self, work: Callable[[], T], *, doing: str, together: Together = _NOTHING) -> T:
        """Run ``work`` on the leader.

        Args:
            work: as in :meth:`each`.
            doing: likewise.
            together: by name, what every rank does when the work asks for it by :meth:`call`.

        Raises:
            RankFailedError: on the others, if it failed there; one of MemFit's own errors is raised on every rank.
        """
        outcome: Any = None
        failure: Exception | None = None
        if self.is_leader:
            try:
                with self.leading(together):
                    outcome = work()
            except Exception as error:
                if self.knows(error):
                    raise
                failure, outcome = error, _failure_of(error)
        outcome = self._told(outcome, together, doing)
        if not isinstance(outcome, _Failure):
            result: T = outcome
            return result
        raised = failure or _received(outcome, doing)
        self._known.append(raised)
        raise raised

    @contextmanager
    def leading(self, together: Together) -> Iterator[None]:
        """Within it the leader may :meth:`call`, while the others wait for what it shares.

        Args:
            together: as the others give it to :meth:`share`.
        """
        before, self._together = self._together, together
        try:
            yield
        finally:
            self._together = before

    def call(self, name: str, argument: Any) -> Any:
        """Within work that is led, let every rank do one of the things that all do together.

        Args:
            name: which.
            argument: what it is given on every rank; pickled.
        """
        self._broadcast(_Call(name, argument), "waiting for rank 0")
        return self._together[name](argument)

    def share(self, value: T | None = None, *, together: Together = _NOTHING) -> T:
        """The leader's value; the others' is not looked at.

        Args:
            value: the leader's.
            together: by name, what the others do before, where the leader asks for it by :meth:`call`.
        """
        shared: T = self._told(value, together, "waiting for rank 0")
        return shared

    def from_rank(self, rank: int, value: T) -> T:
        """The value that one of them has, its tensors on the host; the others' is not looked at."""
        shared: T = self._broadcast(value, f"waiting for rank {rank}", source=rank)
        return shared

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks, in float64."""
        if self._is_alone:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        with self._named("adding up the weights of a step"):
            dist.all_reduce(total, group=self._group)
        return float(total) / self.count

    def largest(self, value: int) -> int:
        """The largest of a whole number over the ranks."""
        if self._is_alone:
            return value
        found = torch.tensor(value)
        with self._named("comparing the batches of a step"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no rank waits for another: :meth:`mean` is that of this rank."""
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before

    @contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        """Within it the engine's collectives run: an error of one rank is told to those that wait for it.

        Args:
            doing: what is being done, for the message.

        Raises:
            RankFailedError: if a collective broke because of another rank.
        """
        if self._is_alone:  # nobody waits; what is caught further out must leave no note
            yield
            return
        try:
            yield
        except RankFailedError:
            raise
        except Exception as error:
            note = self._notes.read()
            if is_broken_collective(error):
                rank, why = note or (None, "it ended, or did not answer in time, and its own message says why")
                who = "another rank" if rank is None else f"rank {rank}"
                told = RankFailedError(f"{who} failed while {doing}: {why}", rank=rank)
                self._known.append(told)
                raise told from error
            if note is None:
                self._notes.leave(_failure_of(error).words)
            self._known.append(error)
            raise

    def alike(self, error: Exception, place: str, *, doing: str) -> None:
        """Return if every rank failed at the same place, so that all may go on; else raise the error.

        A rank that failed alone cannot go on: the others wait in a collective that it has left, and come to no meeting.
        So it says where it failed, and waits for them to do so (``rank_notes.ALIKE_WITHIN``). What was told of an error
        that all got over is no longer told of the next.

        Args:
            error: what was caught, within :meth:`failing`, by which the others are told where it is raised again, or
                behind it.
            place: where, in words: equal on ranks that took part in the same collectives before, and on no others.
            doing: what was being done, for the message.

        Raises:
            Exception: ``error``, with a note that names this rank; without one where another rank broke a collective.
        """
        if self._is_alone:
            return
        if error is self._unlike or is_broken_collective(error):
            raise error
        if self._notes.all_failed_at(place, within=min(ALIKE_WITHIN, self._timeout / 2)):
            self._known = [known for known in self._known if known is not error]
            return
        self._unlike = error
        error.add_note(
            f"Rank {self.index} of {self.count} failed so while {doing}, and not all others did at the same place. "
            "They wait for it in an exchange of the engine, so that the run ends."
        )
        raise error

    def knows(self, error: BaseException) -> bool:
        """Whether the other ranks have been told of an error, or cannot be told any more."""
        return any(error is known for known in self._known)

    def close(self) -> None:
        """Let go of the group. Calling it twice is harmless."""
        group, self._group = self._group, None
        self._known.clear()
        self._unlike = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _gather(self, value: Any, doing: str) -> list[Any]:
        outcomes: list[Any] = [None] * self.count
        with self._named(doing):
            dist.all_gather_object(outcomes, _packed(value), group=self._group)
        return [pickle.loads(outcome) for outcome in outcomes]

    def _told(self, value: Any, together: Together, doing: str) -> Any:
        while isinstance(told := self._broadcast(value, doing), _Call):
            together[told.name](told.argument)
        return told

    def _broadcast(self, value: Any, doing: str, *, source: int = 0) -> Any:
        box = [_packed(value) if self.index == source else b""]
        with self._named(doing):
            dist.broadcast_object_list(box, src=source, group=self._group)
        return value if self.index == source else pickle.loads(box[0])

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """A meeting to which another rank does not come is told as such."""
        try:
            yield
        except RuntimeError as error:
            if not is_broken_collective(error):
                raise
            note = self._notes.read()
            who, why = ("another rank", "") if note is None else (f"rank {note[0]}", f": {note[1]}")
            failed = RankFailedError(
                f"{who} did not come to an exchange of MemFit while {doing}{why}. It ended, or did not answer within "
                f"{format_seconds(self._timeout.total_seconds())}: its own message says why. A longer time is "
                "the strategy's timeout=, such as DDPStrategy(timeout=timedelta(hours=1)).",
                rank=None if note is None else note[0],
            )
            self._known.append(failed)
            raise failed from error


class _HostPickler(pickle.Pickler):
    """Pickles tensors of an accelerator as they are on the host, wherever in an object they are."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return _itself, (value.detach().cpu().requires_grad_(value.requires_grad),)
        return NotImplemented


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    _HostPickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error says that another rank ended or did not answer; as gloo, NCCL and torch's store say it."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _BROKEN)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _failure_of(error: Exception) -> _Failure:
    sent = None
    if isinstance(error, MemFitError):
        try:
            sent = pickle.dumps(error)
        except Exception:  # it holds something of the user's; its words are told all the same
            sent = None
    return _Failure(words=f"{type(error).__name__}: {first_line(error)}", error=sent)


def _received(failure: _Failure, doing: str) -> Exception:
    if failure.error is not None:
        own: Exception = pickle.loads(failure.error)
        return own
    return RankFailedError(f"rank 0 failed while {doing}: {failure.words}", rank=0)


def _failed_words(failed: list[int], count: int, doing: str, words: str) -> str:
    who = f"rank {failed[0]}" if len(failed) == 1 else f"{len(failed)} of {count} ranks, rank {failed[0]} among them,"
    return f"{who} failed while {doing}: {words.rstrip('.')}. The message of rank {failed[0]} says all of it."
