"""Ranges of memory, and their sync points.

A range is an address (a cffi pointer, or what keeps an exported buffer alive) and a length.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import repeat, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ._library import MS_ASYNC, MS_SYNC, Error, ffi, last_error, lib

if TYPE_CHECKING:
    from ._volume import Volume

#: The largest range of one entry of gmsync, whose length is an int.
PIECE = 1 << 30

_msync = lib.mojim_msync
_from_buffer = ffi.from_buffer
#: The errno of the thread that takes the next one, without end. (No step of it is in Python.)
_errnos = map(attrgetter("errno"), repeat(ffi))

#: Volumes whose last rollback has not succeeded (yet): their memory may hold a part of a block.
torn: list[Volume] = []


def refuse_torn(ranges: Sequence[tuple[Any, int]]) -> None:
    """Fails if the memory that is to be committed is that of a torn volume, which it rolls back
    (:class:`Torn` if that fails again). What the caller has stored since is gone then, so
    that this call must not succeed."""
    for volume in list(torn):
        if volume._has_any(ranges) and volume._mend():
            text = "rolled back, as an earlier rollback had failed: nothing was committed"
            raise Error(errno.ECANCELED, text)


def runs(array: Any) -> list[tuple[Any, int]]:
    """Where the bytes of an array lie: of one with gaps, all that is between two of them."""
    try:
        data = _from_buffer(array)
        return [(data, len(data))]
    except (BufferError, ValueError):
        interface = getattr(array, "__array_interface__", None)
        if interface is None:
            raise
    if array.size == 0:
        return []
    start, length = int(interface["data"][0]), array.itemsize
    outer = []
    # By the distance of neighbours: what is without gaps is one run.
    for stride, n in sorted((abs(s), n) for n, s in zip(array.shape, array.strides)):
        if stride <= length:
            length = max(length, stride * (n - 1) + length)
        else:
            outer.append((stride, n))
    start += sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides))
    starts = [start]
    for stride, n in reversed(outer):
        starts = [at + i for at in starts for i in range(0, n * stride, stride)]
    return [(ffi.cast("char *", at), length) for at in starts]


def pieces(address: Any, length: int) -> list[tuple[Any, int]]:
    """A range in pieces that gmsync takes."""
    if length <= PIECE:
        return [(address, length)] if length else []
    base = ffi.cast("char *", address)
    starts = range(0, length, PIECE)
    return [(base + start, min(PIECE, length - start)) for start in starts]


def commit(
    ranges: Sequence[tuple[Any, int]], results: list[Any], flags: int = MS_SYNC
) -> None:
    """Commits ranges together. Puts the call's result, with its errno, into ``results`` in the
    same step (as `once` does)."""
    if torn:
        refuse_torn(ranges)
    address, length = ranges[0] if len(ranges) == 1 else (None, 0)
    if length:
        results.extend(zip(starmap(_msync, ((address, length, flags),)), _errnos))
    else:
        parts = [p for r in ranges for p in pieces(*r)]
        if parts:
            inputs = ffi.new("struct msync_input[]", parts)
            results.extend(zip(starmap(lib.gmsync, ((inputs, len(parts), flags),)), _errnos))
        else:
            results.append((0, 0))
    if results[0][0] != 0:
        raise last_error()


def msync(array: Any, wait: bool = True) -> None:
    """Commits the bytes of an array, a slice, or a memoryview of a region: atomically, and no
    other byte, whether they are in an open block or not. With ``wait=False`` it begins to commit
    only: :func:`last_lsn` has its number, for :meth:`Volume.wait`.

    >>> accounts = volume.array("accounts", "i8", 4)
    >>> accounts[1:3] = 7
    >>> mojim.msync(accounts[1:3])

    An interrupt (Ctrl-C) takes effect after the commit. :class:`Error` where the memory is in no
    region."""
    flags = MS_SYNC if wait else MS_ASYNC
    try:
        data = _from_buffer(array)
    except (BufferError, ValueError):
        commit(runs(array), [], flags)
        return
    length = len(data)
    if torn:
        refuse_torn([(data, length)])
    if length and _msync(data, length, flags) != 0:
        raise last_error()


def gmsync(*arrays: Any) -> None:
    """Commits several arrays, slices or memoryviews of one volume, atomically together."""
    commit([r for a in arrays for r in runs(a)], [])


def last_lsn() -> int:
    """The number of this thread's last successful sync point; numbers grow within a volume."""
    return int(lib.mojim_last_lsn())
