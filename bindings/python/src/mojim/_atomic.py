"""Atomic blocks: what ``with volume.atomic():`` does.

Invariant: whatever interrupts a block, and wherever, its stores are committed or undone, and
the volume's lock is free afterwards. KeyboardInterrupt may be raised after any call, and so at
the first step of ``__exit__``. Hence what ``with`` holds as its exit is an object that nothing
else refers to, neither the block nor a frame of a traceback: it dies when the ``with`` is left,
in whatever way, and ends the block if that has not ended (`_Exit`).
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ._library import Error, ffi, once
from ._ranges import commit, span

if TYPE_CHECKING:
    from ._volume import Volume

_from_buffer, _buffer, _ALL = ffi.from_buffer, ffi.buffer, slice(None)


class Block:
    """One run of an atomic block."""

    def __init__(self, volume: Volume, arrays: tuple[Any, ...]):
        self.volume = volume
        self.arrays = arrays
        self.thread = threading.get_ident()
        self.parent: Block | None = None
        # Not empty once this block, an outermost one, has the volume's lock.
        self.locked: list[Any] = []
        # Its first step gives the lock back. (It ends at None, which `release` returns: it
        # takes that step once, however often it is asked.)
        self.unlock: Iterator[None] = iter(volume._lock.release, None)
        # What the arrays held, in the order in which they were given.
        self.undo: list[tuple[Any, Any, Any]] = []
        self.ranges: list[tuple[Any, int]] = []
        self.everything = not arrays
        # An inner block without arrays has failed: only a rollback of everything undoes it.
        self.doomed = False
        # What the commit's call returned, and its errno.
        self.results: list[Any] = []
        self.begun = False
        self.exit: weakref.ref[_Exit] | None = None
        # What made this block for an exit that was asked for, but may be called without `begin`.
        self.atomic: weakref.ref[Atomic] | None = None

    def begin(self) -> None:
        self.begun = True
        volume = self.volume
        volume._alive()
        around = volume._block
        if around is not None and around.thread == self.thread:
            self.parent = around
        else:
            once(self.locked, volume._lock.acquire, True)
            if volume._torn:
                # Before this is the volume's block: if that fails, there is nothing to undo.
                volume._mend()
        volume._block = self
        for array in self.arrays:
            self.remember(array)

    def remember(self, array: Any) -> None:
        """Notes where an array lies, and what it holds."""
        target: Any
        key: Any
        try:
            data = _from_buffer(array, require_writable=True)
            target, key, length = _buffer(data), _ALL, len(data)
        except (BufferError, ValueError):
            # It has gaps, or a type that has no buffer.
            if not array.flags.writeable:
                raise
            data, length = span(array)
            target, key = array, ...
        self.ranges.append((data, length))
        self.undo.append((target, key, target[key] if key is _ALL else array.copy()))

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        """The exit of ``with``."""
        if not self.begun:
            # `atomic.__exit__` was looked up and called by hand.
            atomic = None if self.atomic is None else self.atomic()
            if atomic is None:
                raise RuntimeError("this atomic block was not entered")
            atomic._leave(kind, value, traceback)
            return
        try:
            if kind is None:
                self.commit()
        finally:
            self.end()
            if self.exit is not None:
                # An interrupt in __del__ would be lost. (The exit is in no variable here, which
                # a traceback would keep.)
                setattr(self.exit(), "__class__", _Ended)

    def commit(self) -> None:
        self.volume._alive()
        parent = self.parent
        if parent is not None:
            parent.undo += self.undo
            parent.ranges += self.ranges
            parent.everything |= self.everything
            parent.doomed |= self.doomed
            self.results.append(0)
            return
        if self.doomed:
            text = "rolled back: an exception has left an inner block without arrays"
            raise Error(errno.ECANCELED, text)
        ranges = self.volume._ranges() if self.everything else self.ranges
        commit(ranges, self.results)

    def stays(self) -> bool:
        """Whether the stores are to stay: committed, or in doubt (they count as changed)."""
        results = self.results
        return bool(results) and (results[0] == 0 or results[1] == errno.ETIMEDOUT)

    def end(self, last: bool = False) -> None:
        """Undoes what is not committed, and lets others in. Done again if it was
        interrupted, and then for the ``last`` time."""
        volume = self.volume
        try:
            if volume._block is self and not self.stays():
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

    def put_back(self) -> None:
        """Undoes what was stored. Can be done again."""
        if self.everything or self.doomed:
            if self.parent is not None:
                self.parent.doomed = True
            elif self.volume._handle is not None:
                # The copies are not put back: they may hold what an outer block had stored.
                self.volume.rollback()
            return
        for target, key, saved in reversed(self.undo):
            target[key] = saved


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
        atomic._next = run = Block(atomic._volume, atomic._arrays)
        run.atomic = weakref.ref(atomic)
        exit = _Exit(Block.leave, run)
        run.exit = weakref.ref(exit)
        return exit


class Atomic:
    """See :meth:`Volume.atomic`. For one thread at a time."""

    __exit__: Any = _Exits()

    def __init__(self, volume: Volume, arrays: tuple[Any, ...]):
        self._volume = volume
        self._arrays = arrays
        self._next: Block | None = None
        # The runs that nobody has an exit of; and the last that somebody has.
        self._without: list[Block] = []
        self._last: weakref.ref[Block] | None = None

    def __enter__(self) -> None:
        run, self._next = self._next, None
        if run is None or run.exit is None or run.exit() is None:
            # Not by `with`, but its exit may have been looked at before.
            run = Block(self._volume, self._arrays)
            self._without.append(run)
        else:
            self._last = weakref.ref(run)
        run.begin()

    def _leave(self, kind: Any, value: Any, traceback: Any) -> None:
        run = None
        if self._without:
            run = self._without.pop()
        elif self._last is not None:
            run, self._last = self._last(), None
        if run is None:
            raise RuntimeError("this atomic block was not entered")
        try:
            run.leave(kind, value, traceback)
        finally:
            run.end(last=True)
