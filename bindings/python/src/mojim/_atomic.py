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

from ._library import MS_INVALIDATE, Error, TimedOut, ffi, last_error, lib, once
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
        # [0] once the stores are to stay.
        self.results: list[Any] = []
        self.exit: weakref.ref[_Exit] | None = None

    def begin(self) -> None:
        volume = self.volume
        volume._alive()
        around = volume._block
        if around is not None and around.thread == self.thread:
            self.parent = around
        else:
            once(self.locked, volume._lock.acquire, True)
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
        try:
            commit(ranges, self.results)
        except TimedOut:
            # In doubt. The memory stays, and counts as changed.
            self.results[:] = [0]
            raise

    def end(self, last: bool = False) -> None:
        """Undoes what is not committed, and lets others in. Done again if it was
        interrupted, and then for the ``last`` time."""
        volume = self.volume
        try:
            if volume._block is self and self.results != [0]:
                self.put_back()
            last = True
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
                return
            for address, length in self.volume._ranges():
                if lib.mojim_msync(address, length, MS_INVALIDATE) != 0:
                    raise last_error()
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
        self._without: list[Block] = []

    def __enter__(self) -> None:
        run, self._next = self._next, None
        if run is None:
            run = Block(self._volume, self._arrays)
            self._without.append(run)
        run.begin()

    def _leave(self, kind: Any, value: Any, traceback: Any) -> None:
        run = self._without.pop()
        try:
            run.leave(kind, value, traceback)
        finally:
            run.end(last=True)
