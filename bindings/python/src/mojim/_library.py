"""libmojim.so, opened, and its errors.

Owns the choice of the library, and the mapping from errno to the exceptions. `_abi.py` is made by
`declarations.py`.

Invariant: the package brings no second libmojim.so into a process. It takes one that is loaded,
whether `mojim run --preload` or another module loaded it. Else it takes its own.
"""

import ctypes
import errno
import os
from typing import Any, TypeVar

from . import _abi

ffi: Any = _abi.ffi
CREATE, RDONLY, SHARED, ATOMIC = 0x00800000, 0x00400000, 0x00200000, 0x02000000
MS_ASYNC, MS_INVALIDATE, MS_SYNC = 1, 2, 4
_T = TypeVar("_T", bound=type)


def _open() -> Any:
    # Never unloaded: its threads run, and what is attached is finished at the very end of
    # the process, behind every handler that Python runs then.
    flags = os.RTLD_NOW | os.RTLD_NODELETE
    if _is_loaded():
        return ffi.dlopen("libmojim.so", flags | os.RTLD_NOLOAD)
    path = os.environ.get("MOJIM_LIBRARY")
    if path is None:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libmojim.so")
    try:
        return ffi.dlopen(path, flags)
    except OSError as e:
        raise ImportError(f"libmojim.so cannot be loaded: {e}", path=path) from None


def _is_loaded() -> bool:
    """Whether the process has a libmojim.so."""
    try:
        # Not by cffi: where the system finds a library and does not load it, it gives no
        # message, and cffi ends the process.
        ctypes.CDLL("libmojim.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _refuse_an_older(library: Any) -> None:
    """Raises ImportError if a function that the package uses is not in ``library``."""
    addresses, missing = [], []
    for name in dir(library):
        try:
            addresses.append(int(ffi.cast("uintptr_t", getattr(library, name))))
        except ffi.error:
            missing.append(name)
    if not missing:
        return
    path = _file_at(addresses[0]) if addresses else "libmojim.so"
    raise ImportError(
        f"{path} is older than this package: it has no {missing[0]}. The process uses this "
        f"library. Take the package and the library from one build of Mojim",
        path=path,
    )


def _file_at(address: int) -> str:
    """The file that is mapped at ``address``."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(n, 16) for n in line.split(" ", 1)[0].split("-"))
            if first <= address < last:
                return line.split(None, 5)[-1].strip()
    return "libmojim.so"


lib: Any = _open()
_refuse_an_older(lib)
__version__: str = ffi.string(lib.mojim_version()).decode()


def public(kind: _T) -> _T:
    """A class, as one of the package: that is where a program finds it."""
    kind.__module__ = "mojim"
    return kind


@public
class Error(OSError):
    """A call of Mojim failed: ``errno`` is the number of include/mojim.h, ``strerror`` the
    library's text, which says what failed, where, and what to do."""


@public
class Busy(Error):
    """Another process is attached (EBUSY), or the file is mapped in a way that excludes this."""


@public
class NotFound(Error, FileNotFoundError):
    """There is no such file, node, volume or configuration (ENOENT)."""


@public
class Stale(Error):
    """Another node is the primary now (ESTALE): nothing can be committed here any more."""


@public
class TimedOut(Error, TimeoutError):
    """No acknowledgement in time (ETIMEDOUT): 10 seconds, unless the volume's configuration says
    otherwise. The commit is in doubt: it is there whole, or not at all. Its bytes stay in memory
    and count as changed; commit again. An interrupt (Ctrl-C) that came meanwhile is raised in
    place of it, and has it as its ``__cause__``."""


@public
class Torn(Error):
    """A rollback failed (``__cause__`` says why; ``errno`` is its number), so that the memory may
    hold a part of an atomic block. Nothing of the volume can be committed until a rollback
    succeeds: each call that would commit tries that first."""


_KINDS = {
    errno.EBUSY: Busy,
    errno.ENOENT: NotFound,
    errno.ESTALE: Stale,
    errno.ETIMEDOUT: TimedOut,
}


def error(number: int, text: str) -> Error:
    """The exception of an errno."""
    return _KINDS.get(number, Error)(number, text)


def last_error() -> Error:
    """The exception of the call that failed just now in this thread."""
    return failure(ffi.errno)


def failure(number: int) -> Error:
    """The same, of which the errno is known."""
    return error(number, ffi.string(lib.mojim_last_error()).decode(errors="replace"))


def once(results: list[Any], function: Any, *arguments: Any) -> Any:
    """Calls ``function``, puts its result into ``results``, and returns it.

    Python raises KeyboardInterrupt between a call and the storing of its result. Here both
    are one step of C: where this raises, ``results`` tells whether the call was made.
    """
    results.extend(map(function, *((a,) for a in arguments)))
    return results[-1]
