#!/usr/bin/env python3
"""Fetches what `run.py` needs of other projects and the distribution lacks, and builds it.

Each comes from its language's registry, at one version, into a directory of its own below the one
that is named (`target/tools/programs` by `scripts/programs`). It gets its name when all of it is
there: a directory that exists is complete, and nothing is fetched anew. One that cannot be had is
said, and left out; its programs are then skipped.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

LIMIT = 300
MDBX = "libmdbx-0.13.7"
SPEEDTEST = "speedtest1-3.50.4"
PY_LMDB = "py-lmdb-3.0.0"


def run(args, **more):
    return subprocess.run([str(a) for a in args], check=True, capture_output=True, text=True, timeout=LIMIT, **more).stdout


def version(name):
    return name.rpartition("-")[2]


def mdbx(at):
    """libmdbx and its tool that checks a file, of the sources in a crate."""
    crate = "signet-mdbx-sys"
    # A workspace of its own: this directory may lie in another.
    (at / "Cargo.toml").write_text(
        '[workspace]\n[package]\nname = "fetch"\nversion = "0.1.0"\nedition = "2021"\n[lib]\npath = "none.rs"\n'
        f'[dependencies]\n{crate} = "=0.1.0"\n'
    )
    (at / "none.rs").touch()
    run(["cargo", "vendor", "--quiet", "vendor"], cwd=at)
    source = at / "vendor" / crate / "libmdbx"
    if json.loads((source / "VERSION.json").read_text())["semver"] != version(MDBX):
        raise ValueError("another version")
    flags = ["-std=gnu11", "-O2", "-DNDEBUG=1", '-DMDBX_BUILD_FLAGS="-O2"']
    run(["cc", *flags, "-c", source / "mdbx.c", "-o", at / "mdbx.o"])
    run(["cc", *flags, source / "mdbx_chk.c", at / "mdbx.o", "-pthread", "-lm", "-o", at / "mdbx_chk"])
    shutil.copy(source / "mdbx.h", at)


def speedtest(at):
    """SQLite's program, which a Go module has among its test data, with the distribution's library."""
    said = json.loads(run(["go", "mod", "download", "-json", "modernc.org/sqlite@v1.40.0"], cwd=at))
    source = pathlib.Path(said["Dir"]) / "testdata/tcl/speedtest1.c"
    run(["cc", "-O1", source, "-o", at / "speedtest1", "-lsqlite3"])


def py_lmdb(at):
    """The module and its tests, of the same archive."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "download", "--no-deps", "--no-binary", "lmdb", "--dest", at, f"lmdb=={version(PY_LMDB)}"])
    archive = next(at.glob("lmdb-*.tar.gz"))
    run([*pip, "install", "--no-deps", "--target", at / "site", archive])
    run(["tar", "-xzf", archive, "-C", at, "--strip-components=1", "--wildcards", "*/tests", "*/pyproject.toml"])


def main():
    at = pathlib.Path(sys.argv[1])
    at.mkdir(parents=True, exist_ok=True)
    for name, fetch in ((MDBX, mdbx), (SPEEDTEST, speedtest), (PY_LMDB, py_lmdb)):
        if (at / name).exists():
            continue
        half = pathlib.Path(tempfile.mkdtemp(dir=at))
        half.chmod(0o755)
        try:
            fetch(half)
            os.rename(half, at / name)
        except (OSError, ValueError, KeyError, StopIteration, subprocess.SubprocessError) as e:
            shutil.rmtree(half, ignore_errors=True)
            said = getattr(e, "stderr", None) or ""
            print(f"not fetched: {name}: {e} {said[-400:]}", file=sys.stderr)


if __name__ == "__main__":
    main()
