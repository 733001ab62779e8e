"""The C functions that the package uses (include/mojim.h is their manual), and the making of
src/mojim/_abi.py, in which cffi has them parsed: `python declarations.py`.
"""

import contextlib
import io
import os
import pathlib
import tempfile

from cffi import FFI

FUNCTIONS = """
typedef struct mojim mojim_t;
mojim_t *mojim_attach(const char *, const char *, const char *);
mojim_t *mojim_attach_reader(const char *, const char *, const char *);
mojim_t *mojim_join(const char *, const char *, const char *);
int mojim_usable(mojim_t *);
int mojim_detach(mojim_t *);
int mojim_finish(mojim_t *);
void *mojim_map(mojim_t *, const char *, size_t, int);
int mojim_unmap(void *, size_t);
int mojim_leave_memory(void *);
int mojim_is_region(const void *);
int mojim_msync(void *, size_t, int);
struct msync_input { void *address; int length; };
int gmsync(struct msync_input *, int, int);
uint64_t mojim_last_lsn(void);
int mojim_wait(mojim_t *, uint64_t);
int64_t mojim_shown(mojim_t *);
int mojim_remove(mojim_t *, const char *);
int mojim_rename(mojim_t *, const char *, const char *);
int mojim_truncate(mojim_t *, const char *, int64_t);
int64_t mojim_size(mojim_t *, const char *);
int mojim_directory(const char *, const char *, const char *, char *, size_t);
const char *mojim_last_error(void);
const char *mojim_version(void);
"""

TARGET = pathlib.Path(__file__).resolve().parent / "src/mojim/_abi.py"


def make():
    """Makes the module, unless it is newer than this file."""
    if TARGET.exists() and TARGET.stat().st_mtime >= pathlib.Path(__file__).stat().st_mtime:
        return
    ffi = FFI()
    ffi.cdef(FUNCTIONS)
    ffi.set_source("mojim._abi", None)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as directory:
        made = pathlib.Path(directory) / "_abi.py"
        with contextlib.redirect_stdout(io.StringIO()):
            ffi.emit_python_code(str(made))
        # Others that look see no part of it.
        os.replace(made, TARGET)


if __name__ == "__main__":
    make()
