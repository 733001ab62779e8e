"""Ranges of memory, and their sync points.

A range is an address (a cffi pointer, or what keeps an exported buffer alive) and a length.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import repeat, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ._library import MS_ASYNC, MS_SYNC, Error, error, failure, ffi, lib

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


def refusal(argument: Any, n: int) -> Exception | None:
    """Why the n-th argument of a sync point cannot be one; None for memory of a volume."""
    from ._volume import Region, Volume

    kind = type(argument).__name__
    if isinstance(argument, (Region, Volume)):
        way = "call its sync(), or give its view() or array()"
        way = way if isinstance(argument, Region) else "call its sync()"
        return TypeError(f"argument {n} is a {kind}: {way}")
    if isinstance(argument, (list, tuple)):
        return TypeError(f"argument {n} is a {kind}: give its arrays one by one: *arrays")
    try:
        found = runs(argument)
    except (TypeError, BufferError, ValueError):
        text = f"argument {n} is of type {kind}: give an array, a slice of one, or a memoryview"
        return TypeError(text)
    if not found or found[0][1] == 0 or lib.mojim_is_region(found[0][0]):
        return None
    text = (
        f"argument {n} is no memory of an attached volume: a[[...]], a[mask], a[0] and arithmetic "
        "give copies; an array kept after detach is one"
    )
    return error(errno.EINVAL, text)


def call(results: list[Any], function: Any, *arguments: Any) -> None:
    """Calls a function of the library; raises its error. Puts the result, with its errno, into
    ``results`` in the same step (as `once` does). An interrupt that came while it ran is raised
    in place of the error, which is its cause then."""
    try:
        results.extend(zip(starmap(function, (arguments,)), _errnos))
        if results[0][0] != 0:
            raise failure(results[0][1])
    except Error:
        raise
    except BaseException as interrupt:
        if results and results[0][0] != 0:
            raise interrupt from failure(results[0][1])
        raise


def commit(
    ranges: Sequence[tuple[Any, int]], results: list[Any], flags: int = MS_SYNC
) -> None:
    """Commits ranges together, by one `call`."""
    if torn:
        refuse_torn(ranges)
    address, length = ranges[0] if len(ranges) == 1 else (None, 0)
    if length:
        call(results, _msync, address, length, flags)
    else:
        parts = [p for r in ranges for p in pieces(*r)]
        if parts:
            inputs = ffi.new("struct msync_input[]", parts)
            call(results, lib.gmsync, inputs, len(parts), flags)
        else:
            results.append((0, 0))


def msync(array: Any, wait: bool = True) -> None:
    """Commits the bytes of an array, a slice, or a memoryview of a region: atomically, and no
    other byte, whether they are in an open block or not. With ``wait=False`` it begins to commit
    only: :func:`last_lsn` has its number, for :meth:`Volume.wait`.

    >>> accounts = volume.array("accounts", "i8", 4)
    >>> accounts[1:3] = 7
    >>> mojim.msync(accounts[1:3])

    An interrupt (Ctrl-C) takes effect after the commit; see :class:`TimedOut`. :class:`Error` where
    the memory is no volume's: what ``a[[0, 1]]``, ``a[mask]`` and ``a[0]`` give is a copy."""
    flags = MS_SYNC if wait else MS_ASYNC
    try:
        try:
            data = _from_buffer(array)
        except (BufferError, ValueError):
            commit(runs(array), [], flags)
            return
        length = len(data)
        if torn:
            refuse_torn([(data, length)])
        if length:
            call([], _msync, data, length, flags)
    except (Error, TypeError, BufferError, ValueError):
        refused = refusal(array, 1)
        if refused is None:
            raise
        raise refused from None


def gmsync(*arrays: Any) -> None:
    """Commits several arrays, slices or memoryviews of one volume, atomically together."""
    try:
        commit([r for a in arrays for r in runs(a)], [])
    except (Error, TypeError, BufferError, ValueError):
        for n, array in enumerate(arrays, 1):
            refused = refusal(array, n)
            if refused is not None:
                raise refused from None
        raise


def last_lsn() -> int:
    """The number of this thread's last successful sync point; numbers grow within a volume."""
    return int(lib.mojim_last_lsn())
