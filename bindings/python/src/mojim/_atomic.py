"""Atomic blocks: what ``with volume.atomic():`` does.

Invariant: whatever interrupts a block, and wherever, its stores are committed or undone, and
the volume's lock is free afterwards. KeyboardInterrupt may be raised after any call, and so at
the first step of ``__exit__``. Hence what ``with`` holds as its exit is an object that nothing
else refers to, neither the block nor a frame of a traceback: it dies when the ``with`` is left,
in whatever way, and ends the block if that has not ended (`_Exit`).
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ._library import Error, error, ffi, lib
from ._ranges import commit, refusal, runs

if TYPE_CHECKING:
    from ._volume import Volume

_from_buffer, _buffer, _unpack = ffi.from_buffer, ffi.buffer, ffi.unpack
_is_region = lib.mojim_is_region
_CHARS, _TRUE = ffi.typeof("char[]"), (True,)


class _Ended(partial):  # type: ignore[type-arg]
    """The exit of a block that has ended."""


class _Exit(_Ended):
    """The exit of one run of a block; when it dies, the block has ended."""

    def __del__(self) -> None:
        self.args[0].end(last=True)


class _Exits:
    """``Atomic.__exit__``: a new one for each ``with``, which asks for it before it calls
    ``__enter__``."""

    def __get__(self, atomic: Atomic | None, owner: Any = None) -> Any:
        if atomic is None:
            # contextlib.ExitStack asks the class.
            return Atomic._leave
        if atomic.exit is None:
            run, atomic.is_next = atomic, True
        else:
            atomic.next = run = Atomic(atomic.volume, atomic.arrays)
            atomic.is_next, run.atomic = False, weakref.ref(atomic)
        exit = _Exit(_leave, run)
        run.exit = weakref.ref(exit)
        return exit


class Atomic:
    """See :meth:`Volume.atomic`. For one thread at a time.

    It is its own first run; each further one is another object. What a run has not begun to use is
    in the class: a block costs a microsecond or two, and each attribute counts.
    """

    __exit__: Any = _Exits()

    #: Its exit: None if nobody has asked for it, and there is none for a run by hand.
    exit: weakref.ref[_Exit] | None = None
    #: Whether the run that ``__enter__`` begins is this one; or which.
    is_next = False
    next: Atomic | None = None
    #: The runs that nobody has an exit of; and the last that somebody has.
    without: list[Atomic] | None = None
    last: weakref.ref[Atomic] | None = None
    #: Of a further run: what made it. Its exit may be called without ``__enter__``.
    atomic: weakref.ref[Atomic] | None = None

    begun = False
    thread = 0
    #: The block of this thread that this one is in.
    parent: Atomic | None = None
    #: Not empty once this block, an outermost one, has the volume's lock.
    locked: Any = ()
    #: Its first step gives the lock back. (It ends at None, which `release` returns: it takes that
    #: step once, however often it is asked.)
    unlock: Iterator[None] = iter(())
    #: An inner block without arrays has failed: only a rollback of everything undoes it.
    doomed = False
    #: What the commit's call returned, with its errno.
    results: Any = ()

    def __init__(self, volume: Volume, arrays: tuple[Any, ...]):
        self.volume = volume
        self.arrays = arrays

    def __enter__(self) -> None:
        run = self.next
        if run is not None:
            self.next = None
            self.last = weakref.ref(run)
        elif self.is_next:
            self.is_next = False
            self.last, run = None, self
        if run is None or run.exit is None or run.exit() is None:
            # Not by `with`, but its exit may have been looked at before.
            run = Atomic(self.volume, self.arrays)
            if self.without is None:
                self.without = []
            self.without.append(run)
            try:
                run.begin()
            except BaseException:
                # Nobody calls its exit (contextlib.ExitStack does not, either).
                self.without.remove(run)
                run.end(last=True)
                raise
            return
        run.begin()

    def _leave(self, kind: Any, value: Any, traceback: Any) -> None:
        run = None
        if self.without:
            run = self.without.pop()
        elif self.last is not None:
            run, self.last = self.last(), None
        elif self.begun and not self.results:
            run = self
        if run is None:
            raise RuntimeError("this atomic block was not entered")
        try:
            _leave(run, kind, value, traceback)
        finally:
            run.end(last=True)

    def begin(self) -> None:
        self.begun = True
        volume = self.volume
        if volume._handle is None:
            volume._alive()
        self.thread = thread = get_ident()
        self.results = []
        # Of each array (of one with gaps: of each of its runs of bytes), in the order in which they
        # were given: where it lies, what it held, and what holds the memory, if not the first.
        self.saved: list[tuple[tuple[Any, int], Any, Any]] = []
        self.everything = not self.arrays
        around = volume._block
        if around is not None and around.thread == thread:
            self.parent = around
        else:
            if thread in volume._inside:
                text = "a signal handler came on this thread's way into, or out of, an atomic block"
                raise error(errno.EBUSY, text)
            volume._inside[thread] = self
            lock = volume._lock
            self.unlock = iter(lock.release, None)
            self.locked = []
            # One step of C, as in `once`.
            self.locked.extend(map(lock.acquire, _TRUE))
            if volume._torn:
                # Before this is the volume's block: if that fails, there is nothing to undo.
                self.mend()
        volume._block = self
        saved = self.saved
        for array in self.arrays:
            try:
                data = _from_buffer(_CHARS, array, True)
            except (TypeError, BufferError, ValueError) as e:
                # It has gaps, or a type that has no buffer.
                self.refuse(array)
                if isinstance(e, TypeError) or not array.flags.writeable:
                    raise
                saved += [((at, n), _unpack(at, n), array) for at, n in runs(array)]
            else:
                length = len(data)
                if length and not _is_region(data):
                    self.refuse(array)
                saved.append(((data, length), _unpack(data, length), None))

    def refuse(self, array: Any) -> None:
        """Fails if this argument is no memory of a volume."""
        n = next(n for n, a in enumerate(self.arrays, 1) if a is array)
        refused = refusal(array, n)
        if refused is not None:
            raise refused from None

    def mend(self) -> None:
        self.volume._mend()

    def commit(self) -> None:
        volume = self.volume
        if volume._handle is None:
            volume._alive()
        parent = self.parent
        if parent is not None:
            parent.saved += self.saved
            parent.everything |= self.everything
            parent.doomed |= self.doomed
            self.results.append((0, 0))
            return
        if self.doomed:
            text = "rolled back: an exception has left an inner block without arrays"
            raise Error(errno.ECANCELED, text)
        if self.everything:
            commit(volume._ranges(), self.results)
        elif len(self.saved) == 1:
            commit(self.saved[0][:1], self.results)
        else:
            commit([range for range, _, _ in self.saved], self.results)

    def stays(self) -> bool:
        """Whether the stores are to stay: committed, or in doubt (they count as changed)."""
        for result, number in self.results:
            return bool(result == 0 or number == errno.ETIMEDOUT)
        return False

    def end(self, last: bool = False) -> None:
        """Undoes what is not committed, and lets others in. Done again if it was
        interrupted, and then for the ``last`` time."""
        volume = self.volume
        try:
            if volume._block is self:
                results = self.results
                if not (results and results[0][0] == 0) and not self.stays():
                    self.put_back()
            last = True
        except Error:
            # The volume is torn, and its next use rolls back.
            last = True
            raise
        finally:
            if last:
                if volume._block is self:
                    volume._block = self.parent
                if self.locked:
                    next(self.unlock, None)
                if volume._inside.get(self.thread) is self:
                    del volume._inside[self.thread]

    def put_back(self) -> None:
        """Undoes what was stored. Can be done again."""
        if self.everything or self.doomed:
            if self.parent is not None:
                self.parent.doomed = True
            elif self.volume._handle is not None:
                # The copies are not put back: they may hold what an outer block had stored.
                self.volume._roll_back()
            return
        for (data, length), saved, _ in reversed(self.saved):
            _buffer(data, length)[:] = saved


class Turn(Atomic):
    """A turn between the blocks of a volume: its body is in none, nor is any other thread. It
    commits and undoes nothing by itself."""

    def __init__(self, volume: Volume):
        super().__init__(volume, ())

    def begin(self) -> None:
        around = self.volume._block
        if around is not None and around.thread == get_ident():
            raise error(errno.EBUSY, "not within an atomic block: its end commits or undoes it")
        super().begin()

    def mend(self) -> None:
        # The body's sync point does it, and tells of it.
        pass

    def commit(self) -> None:
        self.results.append((0, 0))

    def put_back(self) -> None:
        pass


def _leave(run: Atomic, kind: Any, value: Any, traceback: Any) -> None:
    """The exit of ``with``."""
    if not run.begun:
        # `atomic.__exit__` was looked up and called by hand.
        atomic = run if run.atomic is None else run.atomic()
        if atomic is None:
            raise RuntimeError("this atomic block was not entered")
        atomic._leave(kind, value, traceback)
        return
    try:
        if kind is None:
            run.commit()
    finally:
        run.end()
        if run.exit is not None:
            # An interrupt in __del__ would be lost. (The exit is in no variable here, which
            # a traceback would keep.)
            run.exit().__class__ = _Ended  # type: ignore[assignment]
