"""Ordinary memory that is also a file, committed atomically, and copied to a second node.

A counter that survives, whatever ends the program and whichever node is lost:

>>> import mojim
>>> volume = mojim.attach(config, "a")         # mojim.toml, and the name of this node
>>> runs = volume.array("counter", "i8", 1)    # a NumPy array: the file, without a copy
>>> with volume.atomic():                      # commits; an exception rolls back
...     runs[0] += 1

Nothing that is stored is kept before a sync point commits it: the end of
:meth:`Volume.atomic`, :func:`msync`, :meth:`Region.sync`, :meth:`Volume.sync`, or
:meth:`memmap.flush`. A sync point is there whole, or not at all, after any failure; what its
return promises depends on the volume's mode (docs/reference/guarantees.md). docs/reference/python.md is the guide.

Threads: everything may be called from any thread. Calls of the library let other threads run.
Do not store into a range while another thread commits it.

Processes: a child made by fork (also by ``multiprocessing``) can read what was mapped, and its
stores and sync points fail or are its own; attach in one process, or after the fork. An array
that is sent to another process is a copy.

The end: arrays may be alive when the interpreter ends. libmojim finishes what is attached behind
all ``atexit`` handlers, which may still commit. What was not committed is not kept.

One volume has one handle in a process; what is said of threads holds for sub-interpreters that
can import cffi, but each has its own list of what is attached, so a second one gets :class:`Busy`.
"""

from typing import TYPE_CHECKING, Any

from ._library import Busy, Error, NotFound, Stale, TimedOut, Torn, __version__
from ._ranges import gmsync, last_lsn, msync
from ._volume import Region, Volume, attach, attach_reader, join

if TYPE_CHECKING:
    from ._memmap import memmap as memmap

__all__ = [
    "Busy",
    "Error",
    "NotFound",
    "Region",
    "Stale",
    "TimedOut",
    "Torn",
    "Volume",
    "__version__",
    "attach",
    "attach_reader",
    "gmsync",
    "join",
    "last_lsn",
    "memmap",
    "msync",
]


def __getattr__(name: str) -> Any:
    # NumPy is needed for this one only, and takes a while to import.
    if name == "memmap":
        from ._memmap import memmap

        globals()["memmap"] = memmap
        return memmap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
