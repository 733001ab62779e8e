"""The kinds of programs, and their list."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading

from cluster import HERE, run, start

PROGRAMS = []
# Of `fetch.py`.
FETCHED = HERE.parent.parent / "target/tools/programs"


def program(name, version, needs, way="killed"):
    """Registers a program. `needs`: commands, headers, Python modules, and what `fetch.py` fetches, without
    which it is skipped."""

    def register(cls):
        cls.name, cls.version, cls.needs, cls.way = name, version, needs, way
        PROGRAMS.append(cls)
        return cls

    return register


def feed(p, lines):
    """Writes lines to a process until it ends."""

    def write():
        try:
            for line in lines:
                p.stdin.write(line)
                p.stdin.flush()
        except (OSError, ValueError):
            pass

    threading.Thread(target=write, daemon=True).start()


class Worker:
    """A program in Python's hands: `WORK` prints a number for each acknowledged operation,
    `CHECK` prints how many are there, the first of them without a gap."""

    # Whether it acknowledges nothing after an error.
    tells = True
    # What the table says was done to the operations that are counted.
    acknowledged = "acknowledged"
    # Of the mount.
    options = ()

    def __init__(self, at):
        self.at = at

    def prepare(self):
        pass

    def work(self):
        args = [sys.executable, "-c", textwrap.dedent(self.WORK), str(self.at)]
        return start(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        args = [sys.executable, "-c", textwrap.dedent(self.CHECK), str(self.at)]
        return int(run(args).split()[-1])

    def end(self):
        pass


class Compiled(Worker):
    """A program of `src`, which works with one word, the path, and checks with two."""

    FILE = "db"

    def compiler(self):
        raise NotImplementedError

    def prepare(self):
        self.home = pathlib.Path(tempfile.mkdtemp())
        self.home.chmod(0o755)
        self.exe = self.home / "program"
        self.compiler()

    def work(self):
        return start([self.exe, self.at / self.FILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        return int(run([self.exe, self.at / self.FILE, "check"]).split()[-1])

    def end(self):
        shutil.rmtree(self.home)


def dpkg(package):
    """The version of a package of the distribution."""
    return run(["dpkg-query", "-W", "-f", "${Version}", package])


class Suite(Worker):
    """A program's own test, to its end."""

    def suite(self):
        raise NotImplementedError


def is_there(need):
    if need.startswith("py:"):
        code = f"import {need[3:]}"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    if need.startswith("/usr/include/"):
        return os.path.exists(need)
    if need.startswith("fetched:"):
        return (FETCHED / need[8:]).exists()
    return shutil.which(need) is not None
