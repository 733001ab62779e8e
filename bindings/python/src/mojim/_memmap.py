"""``mojim.memmap``: what stands in place of ``numpy.memmap`` in a program.

It is no ``numpy.memmap`` and has no ``filename``: libraries (joblib) hand the name of one to
other processes, which would map the file past its volume.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Literal

import numpy

from ._library import error, last_error, lib, public
from ._ranges import msync
from ._volume import Volume, _plain, _size, the_only

Mode = Literal["r", "c", "r+", "w+", "readonly", "copyonwrite", "readwrite", "write"]
_MODES = {"readonly": "r", "copyonwrite": "c", "readwrite": "r+", "write": "w+"}


@public
class memmap(numpy.ndarray[Any, numpy.dtype[Any]]):  # noqa: N801, as numpy's
    """An array over a file of a volume, without a copy; arguments as of ``numpy.memmap``.

    ``mode``: ``"r"`` and ``"r+"``, a file that is there, for reading, or also for storing (with
    a ``shape`` beyond its end it grows); ``"w+"``, a file that is made, or filled with zeros (a
    longer one is cut at once, and durably: only the zeros wait for the first flush; :class:`Busy`
    while there are arrays of a longer one); ``"c"``, a copy in memory, of which nothing is kept.
    ``volume``: where the file is; may be left out where one volume is attached. The file's name is
    one in the volume, and no path of the system.

    >>> a = mojim.memmap("data", dtype="f4", mode="w+", shape=(3, 4))
    >>> a[1] = 2.5
    >>> a.flush()                # commits: atomic, durable, replicated

    :meth:`flush` of a part of it commits that part. Pickles, and results of arithmetic, are
    ordinary arrays.
    """

    mode: str | None
    offset: int

    def __new__(
        cls,
        file: str | bytes | os.PathLike[Any],
        dtype: Any = numpy.uint8,
        mode: Mode = "r+",
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
        order: Any = "C",
        *,
        volume: Volume | None = None,
    ) -> memmap:
        mode_ = _MODES.get(mode, mode)
        if mode_ not in _MODES.values():
            raise ValueError(f"mode must be one of {sorted(_MODES.values())}, not {mode!r}")
        if mode_ == "w+" and shape is None:
            raise ValueError("shape must be given with mode 'w+'")
        volume, file = volume or the_only(), os.fsdecode(file)
        kind = _plain(dtype)
        size = None
        if shape is not None:
            shape = shape if isinstance(shape, tuple) else (shape,)
            size = _size(kind, shape, offset)
        if mode_ in ("r", "c") and size is not None and size > volume.size(file):
            raise ValueError("the file is shorter than offset and shape say")
        if mode_ == "w+":
            _cut(volume, file, size or 0)
        region = volume.map(file, size, create=mode_ == "w+")
        if shape is None and (region.size - offset) % kind.itemsize:
            raise ValueError("the size of the file is no multiple of that of the dtype")
        array = region._array(kind, shape, offset, order, region.read_only or mode_ == "r")
        if mode_ == "c":
            array = array.copy(order)
        self = array.view(cls)
        if mode_ == "w+":
            # Of a type of subarrays, which has made more dimensions, the element's.
            self.fill(numpy.zeros((), self.dtype)[()])
        self.mode, self.offset = mode_, offset
        return self

    def __array_finalize__(self, base: Any) -> None:
        shares = isinstance(base, memmap) and numpy.may_share_memory(self, base)
        self.mode = base.mode if shares else None
        self.offset = base.offset if shares else 0

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # As numpy.memmap: what does not lie in the file is an ordinary array.
        if self is array or type(self) is not memmap:
            return array
        return array[()] if array.shape == () else array.view(numpy.ndarray)

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if type(part) is memmap and part.mode is None:
            return part.view(numpy.ndarray)
        return part

    def __reduce__(self) -> Any:
        return numpy.array(self, subok=False).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return numpy.array(self, subok=False).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return numpy.array(self, subok=False)

    def flush(self) -> None:
        """Commits this array: its bytes, atomically. Of one in mode ``"r"`` or ``"c"``, and of
        one that is in no file: nothing."""
        if self.mode in ("r+", "w+"):
            msync(self)


def _cut(volume: Volume, file: str, size: int) -> None:
    """Gives a file that is there, and longer, this size; :class:`Busy` while there are arrays or
    views of it."""
    if size <= 0:
        raise error(errno.EINVAL, "an empty file cannot be mapped")
    with volume._state:
        if file in volume and volume.size(file) > size:
            region = volume._regions.get(file)
            if region is not None:
                volume._require_free(region)
                region.unmap()
            if lib.mojim_truncate(volume._alive(), os.fsencode(file), size) != 0:
                raise last_error()
