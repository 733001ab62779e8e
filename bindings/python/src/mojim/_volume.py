"""Volumes and their regions.

Invariants: a volume has at most one region of a file. A region is unmapped only while nobody
holds its memory: every array and memoryview over it keeps one buffer object alive, which the
region sees by a weak reference. ``Volume._state`` is held while such an object is made and
while a region is looked at and unmapped.
"""

from __future__ import annotations

import errno
import gc
import math
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._atomic import Atomic, Turn
from ._library import ATOMIC, CREATE, MS_ASYNC, MS_INVALIDATE, MS_SYNC, RDONLY, SHARED
from ._library import Busy, Error, NotFound, Stale, TimedOut, Torn
from ._library import error, ffi, last_error, lib, once, public
from ._ranges import call, commit, pieces, refuse_torn, torn

if TYPE_CHECKING:
    import numpy
    from numpy.typing import DTypeLike


MAP_FAILED = ffi.cast("void *", -1)
#: What is compared, and stored, at a time, where a region is mapped anew.
PIECE = 1 << 16


def _plain(dtype: DTypeLike) -> numpy.dtype[Any]:
    """A type whose values mean something in another process."""
    import numpy

    kind: numpy.dtype[Any] = numpy.dtype(dtype)
    if kind.hasobject:
        raise TypeError("Python objects cannot be kept: a dtype of plain data is needed")
    return kind


def _size(kind: numpy.dtype[Any], shape: Any, offset: int) -> int:
    """Where an array of this shape ends in its file."""
    dimensions = [int(n) for n in (shape if isinstance(shape, tuple) else (shape,))]
    if min(dimensions, default=0) < 0:
        text = "a dimension cannot be negative; leave shape out for all of a file that is there"
        raise ValueError(f"shape={shape}: {text}")
    _not_negative("offset", offset)
    return offset + kind.itemsize * math.prod(dimensions)


def _not_negative(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{name}={value}: it cannot be negative")


@public
class Region:
    """A file of a volume in memory: all of it, from its start. Made by :meth:`Volume.map`.

    ``region[2:4]`` loads and stores bytes; :meth:`view` and :meth:`array` give the memory
    itself. Nothing that is stored is kept until a sync point commits it. Any thread may use it.
    """

    def __init__(self, volume: Volume, name: str, size: int, flags: int):
        self.volume = volume
        self.name = name
        self.size = size
        self.read_only = flags & RDONLY != 0
        self._flags = flags
        self._base: Any = None
        self._buffer: Any = None

    def __repr__(self) -> str:
        state = "" if self._base is not None else ", unmapped"
        return f"<mojim.Region {self.name!r}, {self.size} bytes{state}>"

    def __len__(self) -> int:
        return self.size

    def __reduce__(self) -> Any:
        raise TypeError("a mojim.Region belongs to its process: send its name, or a copy of it")

    def _alive(self) -> Any:
        base = self._base
        if base is None or self.volume._handle is None:
            raise ValueError(f"the region {self.name!r} is unmapped")
        return base

    def _export(self) -> memoryview:
        with self.volume._state:
            base = self._alive()
            buffer = self._buffer and self._buffer()
            if buffer is None:
                buffer = ffi.buffer(base, self.size)
                self._buffer = weakref.ref(buffer)
            view = memoryview(buffer)
        return view.toreadonly() if self.read_only else view

    def _is_held(self) -> bool:
        return self._buffer is not None and self._buffer() is not None

    def view(self) -> memoryview:
        """The memory, as bytes, without a copy."""
        return self._export()

    def __getitem__(self, key: int | slice) -> int | bytes:
        with self._export() as view:
            return bytes(view[key]) if isinstance(key, slice) else view[key]

    def __setitem__(self, key: int | slice, value: Any) -> None:
        with self._export() as view:
            view[key] = value

    def array(
        self,
        dtype: DTypeLike = "B",
        shape: int | tuple[int, ...] | None = None,
        offset: int = 0,
        order: Any = "C",
    ) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        """A NumPy array over the memory, without a copy, from byte ``offset`` on; without a
        ``shape`` as long as the region allows. While it, or a view of it, is alive, the
        region stays mapped."""
        return self._array(dtype, shape, offset, order, self.read_only)

    def _array(
        self, dtype: DTypeLike, shape: Any, offset: int, order: Any, read_only: bool
    ) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        import numpy

        kind = _plain(dtype)
        _not_negative("offset", offset)
        if shape is None:
            shape = (self.size - offset) // kind.itemsize
        memory: Any = self._export()
        if read_only:
            # Of a memoryview numpy.ndarray keeps the object behind, which can be stored to: the
            # array could be made writable.
            memory = numpy.frombuffer(memory.toreadonly(), "u1")
        return numpy.ndarray(shape, kind, memory, offset, order=order)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        whole = self.array()
        if copy or (dtype is not None and dtype != whole.dtype):
            if copy is False:
                raise ValueError("another dtype needs a copy: use region.array(dtype)")
            return whole.astype(whole.dtype if dtype is None else dtype)
        return whole

    def _range(self, start: int, stop: int | None) -> tuple[Any, int]:
        if stop is None:
            stop = self.size
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"bytes {start} to {stop} of {self.size}")
        return self._alive() + start, stop - start

    def sync(self, start: int = 0, stop: int | None = None, wait: bool = True) -> None:
        """Commits the bytes ``start`` to ``stop`` (default: all), atomically, and no byte
        beyond them. Up to 16 KiB are sent as they are, of more what was changed. With
        ``wait=False`` it begins to commit only (MS_ASYNC): :func:`mojim.last_lsn` has its
        number for :meth:`Volume.wait`."""
        address, length = self._range(start, stop)
        if torn:
            refuse_torn([(address, length)])
        call([], lib.mojim_msync, address, length, MS_SYNC if wait else MS_ASYNC)

    def rollback(self, start: int = 0, stop: int | None = None) -> None:
        """Puts the bytes back to what was committed last. May take hundreds of milliseconds
        right after sync points."""
        address, length = self._range(start, stop)
        if length and lib.mojim_msync(address, length, MS_INVALIDATE) != 0:
            raise last_error()

    def unmap(self) -> None:
        """Ends the region; what was not committed is thrown away. ``BufferError`` while there
        are arrays or views of it."""
        self.volume._unmap(self)


@public
class Volume:
    """An attached volume. Made by :func:`mojim.attach`; any thread may use it.

    As a context manager it is detached at the end of the outermost ``with``; not if
    :func:`mojim.attach` has returned it again outside of all of them: it is others' then, too, and
    stays attached until :meth:`detach`, or the end of the process. Arrays that are still alive when
    it is detached are copies from then on: they take memory, can be read on, and nothing that
    is stored to them is kept. (A reader's, and those of a volume that another process shares,
    are no copies: they go on following what is committed, and where that cuts the file, what lies
    behind its end cannot be read any more: SIGBUS ends the process.)
    """

    def __init__(self, handle: Any, directory: str, how: str):
        self._handle = handle
        self._how = how
        self._reader = how == "attach_reader"
        #: The directory of the volume's files. Never change them by other means.
        self.directory = directory
        self._state = threading.RLock()
        self._regions: dict[str, Region] = {}
        self._entered = 0
        # Whether somebody was given it again while nobody was in a `with`: no `with` ends it.
        self._kept = False
        # From the beginning of a rollback of everything until it succeeds (`_ranges.torn`).
        self._torn = False
        # Of atomic blocks: one thread at a time, and its innermost block.
        self._lock = threading.Lock()
        self._block: Atomic | None = None
        # By thread: the outermost block that it is in, from before it asks for the lock until it
        # has given it back. (A signal handler must not wait for what it has interrupted.)
        self._inside: dict[int, Atomic] = {}

    def __repr__(self) -> str:
        state = "" if self._handle is not None else ", detached"
        return f"<mojim.Volume {self.directory!r}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a mojim.Volume belongs to its process and cannot be pickled")

    @property
    def attached(self) -> bool:
        """Whether it is attached (and was by this process, if that was forked)."""
        handle = self._handle
        return handle is not None and lib.mojim_usable(handle) == 1

    def _alive(self) -> Any:
        handle = self._handle
        if handle is None:
            raise error(errno.EBADF, f"the volume in {self.directory} is detached")
        return handle

    # ---- regions ----------------------------------------------------------

    def map(
        self,
        file: str | bytes | os.PathLike[Any],
        size: int | None = None,
        create: bool = True,
        shared: bool = False,
    ) -> Region:
        """The region of a file: all of it. The same one again while it is mapped.

        ``size``: bytes; a file that is shorter becomes so long, with zeros (:class:`Busy` where
        it is mapped and there are arrays or views of it). Without it the file has to be there.
        ``create=False``: :class:`NotFound` where it is not there.
        ``shared``: a working copy that other processes of this node can map, too
        (:func:`mojim.join`)."""
        file = os.fsdecode(file)
        _not_negative("size", size)
        with self._state:
            handle = self._alive()
            region = self._regions.get(file)
            if region is not None and region._base is not None:
                if size is not None and size > region.size:
                    self._grow(region, size)
                return region
            name = os.fsencode(file)
            length = lib.mojim_size(handle, name)
            if length < 0:
                missing = last_error()
                if size is None or not create or not isinstance(missing, NotFound):
                    raise missing
            length = max(length, size or 0)
            if length == 0:
                raise error(errno.EINVAL, f"{file!r} is empty: say a size in bytes")
            flags = RDONLY if self._reader else ATOMIC
            flags |= CREATE if create and not self._reader else 0
            flags |= SHARED if shared else 0
            region = Region(self, file, length, flags)
            self._place(region)
            return region

    def _place(self, region: Region) -> None:
        """Maps it."""
        made: list[Any] = []
        name = os.fsencode(region.name)
        try:
            address = once(made, lib.mojim_map, self._alive(), name, region.size, region._flags)
            if address == MAP_FAILED:
                raise last_error()
            region._base = ffi.cast("char *", address)
            self._regions[region.name] = region
        except KeyboardInterrupt:
            # It came while the call ran. Nobody would know the region.
            if made and made[0] != MAP_FAILED and region.name not in self._regions:
                region._base = None
                lib.mojim_unmap(made[0], region.size)
            raise

    def _grow(self, region: Region, size: int) -> None:
        """Maps a region anew, with so many bytes. What was stored, and not committed, stays so."""
        self._require_free(region)
        if self._block is not None:
            raise error(errno.EBUSY, "an atomic block is open")
        length = self.size(region.name)
        if length < size:
            # First: where that fails (a full disk, say), nothing has changed.
            if lib.mojim_truncate(self._alive(), os.fsencode(region.name), size) != 0:
                raise last_error()
        former, had = region._base, region.size
        region.size = max(length, size)
        try:
            self._place(region)
        except Busy:
            region.size = had
            self._move(region, max(length, size))
        except BaseException:
            region.size = had
            raise
        else:
            # A working copy that others share: it lives on, with what they have stored meanwhile.
            if lib.mojim_unmap(former, had) != 0:
                raise last_error()

    def _move(self, region: Region, size: int) -> None:
        """Maps a region anew, whose working copy is this mapping's alone."""
        stored = ffi.buffer(region._base, region.size)[:]
        self._unmap(region)
        region.size = size
        try:
            self._place(region)
        except BaseException:
            region.size = len(stored)
            self._place(region)
            raise
        finally:
            if region._base is not None and not region.read_only:
                memory = ffi.buffer(region._base, len(stored))
                for start in range(0, len(stored), PIECE):
                    part = stored[start : start + PIECE]
                    if memory[start : start + PIECE] != part:
                        memory[start : start + PIECE] = part

    def array(
        self,
        file: str | bytes | os.PathLike[Any],
        dtype: DTypeLike = "B",
        shape: int | tuple[int, ...] | None = None,
        offset: int = 0,
        order: Any = "C",
        create: bool = True,
    ) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        """A file as a NumPy array, without a copy: :meth:`map`, then :meth:`Region.array`.
        With a ``shape`` the file is made, or grows, as needed; what is new is zero."""
        kind = _plain(dtype)
        size = None
        if shape is not None:
            size = _size(kind, shape, offset)
        return self.map(file, size, create).array(kind, shape, offset, order)

    def _unmap(self, region: Region) -> None:
        with self._state:
            if region._base is None:
                return
            self._require_unheld([region])
            if self._block is not None:
                raise error(errno.EBUSY, "an atomic block is open")
            base = region._base
            done: list[Any] = []
            try:
                region._base = None
                if once(done, lib.mojim_unmap, base, region.size) != 0:
                    raise last_error()
            finally:
                if done != [0] and lib.mojim_is_region(base):
                    region._base = base
                else:
                    self._regions.pop(region.name, None)

    def _require_free(self, region: Region) -> None:
        """:class:`Busy` where a file's size cannot change, as its region has to be unmapped."""
        try:
            self._require_unheld([region])
        except BufferError as e:
            text = f"{e}: {region.size} bytes are mapped, and another size needs another mapping"
            raise error(errno.EBUSY, text) from None

    def _held(self, regions: Iterable[Region]) -> list[Region]:
        """Those of which there are arrays or views."""
        held = [r for r in regions if r._is_held()]
        if held:
            # What is unreachable, but in a cycle, holds nothing.
            gc.collect()
            held = [r for r in held if r._is_held()]
        return held

    def _require_unheld(self, regions: Iterable[Region]) -> None:
        held = [r.name for r in self._held(regions)]
        if held:
            text = f"there are arrays or views of {', '.join(held)}"
            raise BufferError(f"{text} (in an interactive session _ may be one)")

    # ---- sync points ------------------------------------------------------

    def _ranges(self) -> list[tuple[Any, int]]:
        with self._state:
            self._alive()
            regions = [(r._base, r.size) for r in self._regions.values() if not r.read_only]
        return [p for r in regions for p in pieces(*r)]

    def atomic(self, *arrays: Any) -> Atomic:
        """A block whose stores are committed together at its end, and undone by an exception.

        >>> accounts = volume.array("accounts", "i8", 4)
        >>> with volume.atomic():
        ...     accounts[0] -= 10
        ...     accounts[1] += 10

        Without arguments it commits what was changed in all regions of the volume, and an
        exception brings all regions back to what was committed last, also what was stored
        before the block (the rollback may take hundreds of milliseconds).

        With arrays (or slices of arrays, or memoryviews) it commits exactly these bytes; they
        are copied at the beginning, and an exception puts the copy back, which is quick for
        small ones. Stores to others are neither committed nor undone.

        Blocks may be nested: the outermost commits all. An exception that leaves an inner block
        undoes what was stored in it, if it was given arrays; otherwise the whole can only be
        rolled back, and the outermost block does that and raises :class:`Error`. One thread at
        a time is in blocks of a volume, others wait; threads that store without a block are
        not kept out. Do not suspend a generator or a coroutine in a block.

        If the commit fails with :class:`TimedOut`, it is in doubt, and the memory stays as it
        is: call :meth:`sync`. After any other error the stores are undone. If the rollback
        itself fails, that is :class:`Torn`, which is no :class:`TimedOut`: a part of the block may
        be in the memory. Until a rollback succeeds nothing can be committed; the next block,
        sync point or flush tries it first. A block goes on then; a sync point raises
        :class:`Error` (``ECANCELED``), as there is nothing left that it could commit.
        """
        return Atomic(self, arrays)

    def sync(self) -> None:
        """Commits what was changed in all regions, atomically together: what threads had stored
        without a block. Waits for the block of another thread; :class:`Busy` within one, as in a
        signal handler that has interrupted one."""
        with Turn(self):
            commit(self._ranges(), [])

    def rollback(self) -> None:
        """Brings all regions back to what was committed last. :class:`Torn` if that fails. Waits
        for the block of another thread; :class:`Busy` within one: an exception undoes it."""
        with Turn(self):
            self._roll_back()

    def _roll_back(self) -> None:
        with self._state:
            ranges = self._ranges()
            # First: it counts, too, if this is interrupted.
            if self not in torn:
                torn.append(self)
            self._torn = True
            for address, length in ranges:
                if lib.mojim_msync(address, length, MS_INVALIDATE) != 0:
                    cause = last_error()
                    if isinstance(cause, Stale):
                        # Nothing can be committed here any more.
                        raise cause
                    text = (
                        f"the rollback failed, so a part of a block may be in the memory of "
                        f"{self.directory}; nothing is committed until a rollback succeeds, "
                        f"which the next sync point tries: {cause.strerror}"
                    )
                    raise Torn(cause.errno, text) from cause
            self._torn = False
            torn.remove(self)

    def _mend(self) -> bool:
        """Rolls back again, if that has failed; whether it had. (Of a rollback that another
        thread is in, it awaits the end.)"""
        with self._state:
            if self._torn and self._handle is not None:
                self._roll_back()
                return True
            return False

    def _has_any(self, ranges: Sequence[tuple[Any, int]]) -> bool:
        """Whether any of these bytes are in this volume's regions."""
        mine = [(int(ffi.cast("uintptr_t", a)), n) for a, n in self._spans()]
        for address, length in ranges:
            at = int(ffi.cast("uintptr_t", address))
            if any(at < start + n and start < at + length for start, n in mine):
                return True
        return False

    def _spans(self) -> list[tuple[Any, int]]:
        with self._state:
            return [(r._base, r.size) for r in self._regions.values() if r._base is not None]

    def wait(self, lsn: int) -> None:
        """Waits until everything up to this number is acknowledged as the mode says; for a
        reader, until it is shown (30 seconds at most)."""
        call([], lib.mojim_wait, self._alive(), lsn)

    def shown(self) -> int:
        """For a reader: the number of what its regions show."""
        lsn = lib.mojim_shown(self._alive())
        if lsn < 0:
            raise last_error()
        return int(lsn)

    # ---- files --------------------------------------------------------------

    def size(self, file: str | bytes | os.PathLike[Any]) -> int:
        """A file's size in bytes."""
        size = lib.mojim_size(self._alive(), os.fsencode(file))
        if size < 0:
            raise last_error()
        return int(size)

    def __contains__(self, file: str | bytes | os.PathLike[Any]) -> bool:
        try:
            self.size(file)
        except NotFound:
            return False
        return True

    def remove(self, file: str | bytes | os.PathLike[Any]) -> None:
        """Removes a file; :class:`Busy` while it is mapped. Committed at once."""
        if lib.mojim_remove(self._alive(), os.fsencode(file)) != 0:
            raise last_error()

    def rename(
        self, old: str | bytes | os.PathLike[Any], new: str | bytes | os.PathLike[Any]
    ) -> None:
        """Gives a file another name, in place of a file of that name. Committed at once."""
        old, new = os.fsdecode(old), os.fsdecode(new)
        with self._state:
            if lib.mojim_rename(self._alive(), os.fsencode(old), os.fsencode(new)) != 0:
                raise last_error()
            region = self._regions.pop(old, None)
            if region is not None:
                region.name = new
                self._regions[new] = region

    # ---- the end --------------------------------------------------------------

    def detach(self) -> None:
        """Ends the attachment; what was not committed is thrown away. ``BufferError`` while
        there are arrays or views of its regions, :class:`Busy` while a block is open, in whatever
        thread. Of a volume that is detached: nothing. After another error (a full disk, say)
        :attr:`attached` tells whether it can be called again; if not, the regions are gone, and
        what was committed is kept."""
        with self._state:
            if self._handle is not None:
                if self.attached:
                    self._require_unheld(self._regions.values())
                self._end(lib.mojim_detach)

    def _end(self, how: Any) -> None:
        with self._state:
            if self._block is not None:
                raise error(errno.EBUSY, "an atomic block is open")
            handle = self._handle
            done: list[Any] = []
            try:
                # Nobody uses the handle while it goes, or if this is interrupted behind it.
                self._handle = None
                # A child made by fork has nothing to end.
                if lib.mojim_usable(handle) == 1:
                    call(done, how, handle)
                else:
                    done.append((0, 0))
            finally:
                # Where it fails, the regions may be gone, or some of them; then there is
                # nothing behind their addresses.
                failed = not done or done[0][0] != 0
                for name, region in list(self._regions.items()):
                    if not failed or not lib.mojim_is_region(region._base):
                        region._base = None
                        self._regions.pop(name, None)
                if failed and (self._regions or lib.mojim_usable(handle) == 1):
                    self._handle = handle
                else:
                    _forget(self)
                    if self in torn:
                        torn.remove(self)

    def __enter__(self) -> Volume:
        self._alive()
        self._entered += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._state:
            self._entered -= 1
            if self._entered > 0 or self._kept or self._handle is None:
                return
            # The memory stays for those who hold it.
            held = self._held(self._regions.values()) if self.attached else []
            left = [lib.mojim_leave_memory(r._base) for r in held]
            try:
                # Where another process commits, there are no copies.
                self._end(lib.mojim_finish if any(left) else lib.mojim_detach)
            except TimedOut:
                # The same once more says nothing.
                told = isinstance(value, TimedOut) or isinstance(
                    getattr(value, "__cause__", None), TimedOut
                )
                if not told or self._handle is not None:
                    raise


# ---- which volumes this process has attached -------------------------------------

_attaching = threading.RLock()
_volumes: dict[str, Volume] = {}


def _forget(volume: Volume) -> None:
    for directory, v in list(_volumes.items()):
        if v is volume:
            _volumes.pop(directory, None)


def _in_child() -> None:
    global _attaching
    _attaching = threading.RLock()
    for volume in _volumes.values():
        volume._state = threading.RLock()
        volume._lock = threading.Lock()
        volume._block = None
        volume._inside = {}
        volume._torn = False
    _volumes.clear()
    torn.clear()


os.register_at_fork(after_in_child=_in_child)


def _attach(how: str, config: Any, node: str, volume: str | None) -> Volume:
    function = getattr(lib, f"mojim_{how}")
    given = (os.fsencode(config), node.encode(), ffi.NULL if volume is None else volume.encode())
    path = ffi.new("char[]", 4096)
    if lib.mojim_directory(*given, path, 4096) < 0:
        wrong = last_error()
        text = str(wrong.strerror)
        missing = (f"`node.{node}`: there is no such", f"`volume.{volume}`: there is no such")
        if any(m in text for m in (*missing, os.strerror(errno.ENOENT) + " (os error 2)")):
            raise error(errno.ENOENT, text)
        raise wrong
    directory = os.fsdecode(ffi.string(path))
    with _attaching:
        there = _volumes.get(directory)
        if there is not None:
            with there._state:
                if there._handle is not None:
                    if there._how != how:
                        by = f"by mojim.{there._how}"
                        text = f"the volume in {directory} is attached already, {by}"
                        raise error(errno.EBUSY, text)
                    there._kept |= there._entered == 0
                    return there
        made: list[Any] = []
        try:
            handle = once(made, function, *given)
            if handle == ffi.NULL:
                wrong = last_error()
                if how == "attach_reader" and wrong.errno in (errno.ENOENT, errno.ECONNREFUSED):
                    text = f"{wrong.strerror}: is `mojim node` running, for node {node}?"
                    raise error(wrong.errno, text)
                raise wrong
            there = Volume(handle, directory, how)
            _volumes[directory] = there
            return there
        except KeyboardInterrupt:
            # It came while the call ran. Nobody would know the handle.
            if made and made[0] != ffi.NULL and directory not in _volumes:
                lib.mojim_detach(made[0])
            raise


def attach(config: str | os.PathLike[str], node: str, volume: str | None = None) -> Volume:
    """Attaches this process to a volume, as its primary, on a node of a configuration file.

    ``volume`` may be left out where there is only one. A volume that this process has attached
    already is returned as it is, so a notebook's cell can run again; a ``with`` of it then leaves it
    attached. Waits for what is needed: for a mirror that does not answer ten seconds, unless the
    configuration says otherwise. An interrupt takes effect after that.

    >>> volume = mojim.attach(config, "a")
    >>> n = volume.array("runs", "i8", 1)
    >>> n[0] += 1
    >>> mojim.msync(n)
    >>> int(n[0])
    1

    :class:`Busy`: another process is attached, or this one in another way (as a reader, say).
    :class:`Stale`: another node is the primary.
    :class:`TimedOut`: the mirror does not answer. :class:`NotFound`: no such configuration,
    node or volume.
    """
    return _attach("attach", config, node, volume)


def attach_reader(config: str | os.PathLike[str], node: str, volume: str | None = None) -> Volume:
    """Attaches as a reader, on a node that follows the primary (its mirror or a backup): regions
    are read-only, and follow by themselves, one whole sync point after the other. The daemon of
    that node (``mojim node``) has to run."""
    return _attach("attach_reader", config, node, volume)


def join(config: str | os.PathLike[str], node: str, volume: str | None = None) -> Volume:
    """Attaches, or shares the volume with the process of this node that has it, if that one
    shares it (``working = "shared"``, or it joined, too). If that one has it for itself, waits
    some seconds for it to end or to share it; :class:`Busy` then."""
    return _attach("join", config, node, volume)


def the_only() -> Volume:
    """The volume that is attached, where there is just one."""
    volumes = [v for v in _volumes.values() if v._handle is not None]
    if not volumes:
        raise error(errno.EINVAL, "no volume is attached: call mojim.attach first")
    if len(volumes) != 1:
        raise error(errno.EINVAL, f"{len(volumes)} volumes are attached: say which, by volume=")
    return volumes[0]
