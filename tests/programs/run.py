#!/usr/bin/env python3
"""Programs that know nothing of Mojim, on a volume.

Two nodes on loopback. The program's way to the volume is the mount on the first (`mount`), or each
of its commands runs under `mojim run`, in the volume's directory (`run`). It works in a directory of
its own and says which of its operations are acknowledged: a commit that returned, a reply that
came. Then the mount and the node are killed with SIGKILL, with the program still at work; the other
node is promoted; and what was acknowledged is looked for there, with the program's own check of its
files. Suites run to their end, and are judged by their own verdict; then the volume's copies are
compared.

`scripts/programs` installs the programs and starts this. It writes docs/programs.md with --write.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 120


# Words before each command of a program.
before = []


def start(args, **more):
    """A program's command."""
    return subprocess.Popen([*before, *map(str, args)], **more)


def run(args, **more):
    """A program's command to its end; an error tells what it said."""
    p = subprocess.run([*before, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT, **more)
    if p.returncode != 0:
        raise Failed(f"{args[0]}: exit code {p.returncode}: {p.stdout[-400:]}")
    return p.stdout


class Failed(Exception):
    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, f):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = f()
        if found:
            return found
        time.sleep(0.05)
    raise Failed(f"{what}: not within {LIMIT} s")


class Cluster:
    """Two nodes, and a volume that is mounted, or that programs have under `mojim run`."""

    # The end of the configuration.
    more = ""

    def __init__(self, mojim, home, way, options=()):
        self.mojim, self.home, self.way, self.options = mojim, home, way, options
        self.config = home / "mojim.toml"
        text = 'cluster = "programs"\n[volume.v]\nprimary = "a"\nmirror = "b"\nresend_timeout = "5s"\n'
        for name in "ab":
            text += f'[node.{name}]\naddress = "127.0.0.1:{free_port()}"\ndirectory = "{home}/{name}"\n'
        self.config.write_text(text + self.more)
        self.nodes = {name: self.start("node", name) for name in "ab"}
        self.mounted = None
        self.serve("a")

    def start(self, word, name, *args):
        said = open(self.home / f"{word}-{name}.txt", "a")
        args = [self.mojim, word, "--config", self.config, "--name", name, *args]
        p = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=said, text=True)
        if not p.stdout.readline():
            p.wait()
            raise Failed((self.home / f"{word}-{name}.txt").read_text()[-400:])
        return p

    def serve(self, name):
        """Programs have the volume on this node from here on."""
        if self.way == "mount":
            self.at = self.home / "at"
            self.at.mkdir(exist_ok=True)
            self.at.chmod(0o755)
            return self.mount(name)
        # Programs of other users pass.
        (self.home / name).chmod(0o711)
        self.at = self.home / name / "v"
        before[:] = [str(self.mojim), "run", "--config", str(self.config), "--name", name, *self.options, "--"]
        until("the volume", lambda: subprocess.run([*before, "true"], capture_output=True, check=False).returncode == 0)

    def server(self):
        """The process behind `mojim run`."""
        for p in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (p / "cmdline").read_bytes().split(b"\0")
                if b"--while-used" in words and str(self.config).encode() in words:
                    return int(p.name)
        return None

    def mount(self, name):
        def once():
            try:
                return self.start("mount", name, *self.options, self.at)
            except Failed as e:
                if "only one process" in str(e):
                    return None
                raise

        self.mounted = until("the mount", once)

    def fail_over(self):
        """The primary's node is lost, the other one goes on."""
        if self.way == "run":
            os.kill(self.server(), signal.SIGKILL)
        for p in filter(None, (self.mounted, self.nodes["a"])):
            p.send_signal(signal.SIGKILL)
            p.wait()
        if self.way == "mount":
            subprocess.run(["umount", "-l", self.at], check=False)

        def promote():
            args = [self.mojim, "promote", "--config", self.config, "--name", "b"]
            return subprocess.run(args, capture_output=True, check=False).returncode == 0

        until("the promotion", promote)
        self.serve("b")

    def equal(self):
        args = [self.mojim, "verify", "--config", self.config, "--wait", "60"]
        p = subprocess.run(args, capture_output=True, text=True, check=False)
        if p.returncode != 0:
            raise Failed(f"verify: {p.stdout} {p.stderr}")

    def end(self):
        before[:] = []
        if self.way == "run":
            with contextlib.suppress(Failed):
                until("the mount's end", lambda: self.server() is None)
            if (server := self.server()) is not None:
                os.kill(server, signal.SIGKILL)
        for at in [self.home / "at", *(self.home / n / ".mojim/v/run/at" for n in "ab")]:
            subprocess.run(["umount", "-l", at], check=False, stderr=subprocess.DEVNULL)
        # The mount first: it commits what is left, for which it needs the mirror.
        for ending in ([self.mounted], self.nodes.values()):
            for p in filter(None, ending):
                if p.poll() is None:
                    p.send_signal(signal.SIGTERM)
            for p in filter(None, ending):
                p.wait()


PROGRAMS = []


def program(name, version, needs, way="killed"):
    """Registers a program. `needs`: commands or Python modules without which it is skipped."""

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


def sqlite(mode, mmap):
    class Sqlite(Worker):
        # Of a journal that is deleted, FULL leaves the directory unsynced: EXTRA does not.
        WORK = f"""
            import sqlite3, sys
            c = sqlite3.connect(sys.argv[1] + '/db', isolation_level=None)
            c.execute('pragma journal_mode={mode}'); c.execute('pragma synchronous={"extra" if mode == "delete" else "full"}')
            c.execute('pragma mmap_size={mmap}')
            c.execute('create table t (n integer primary key, x)')
            n = 0
            while True:
                n += 1
                c.execute('begin'); c.execute('insert into t values (?, ?)', (n, 'x' * (n % 3000))); c.execute('commit')
                print(n, flush=True)
        """
        CHECK = """
            import sqlite3, sys
            c = sqlite3.connect(sys.argv[1] + '/db')
            assert c.execute('pragma integrity_check').fetchall() == [('ok',)]
            rows = [n for n, in c.execute('select n from t order by n')]
            assert rows == list(range(1, len(rows) + 1))
            print(len(rows))
        """

    return Sqlite


def sqlite_version():
    import sqlite3

    return sqlite3.sqlite_version


program("SQLite, DELETE journal", sqlite_version, [])(sqlite("delete", 0))
program("SQLite, WAL", sqlite_version, [])(sqlite("wal", 0))
program("SQLite, WAL, mapped", sqlite_version, [])(sqlite("wal", 1 << 28))


def lmdb(writemap):
    class Lmdb(Worker):
        WORK = f"""
            import lmdb, sys
            e = lmdb.open(sys.argv[1] + '/lmdb', map_size=1 << 28, writemap={writemap})
            n = 0
            while True:
                n += 1
                with e.begin(write=True) as t:
                    t.put(b'%08d' % n, b'x' * (n % 2000))
                print(n, flush=True)
        """
        CHECK = f"""
            import lmdb, sys
            e = lmdb.open(sys.argv[1] + '/lmdb', map_size=1 << 28, writemap={writemap})
            with e.begin() as t:
                keys = [int(k) for k, v in t.cursor() if v == b'x' * (int(k) % 2000)]
            assert keys == list(range(1, len(keys) + 1))
            print(len(keys))
        """

    return Lmdb


def lmdb_version():
    import lmdb as l

    return ".".join(map(str, l.version()))


program("LMDB", lmdb_version, ["py:lmdb"])(lmdb(False))
program("LMDB, MDB_WRITEMAP", lmdb_version, ["py:lmdb"])(lmdb(True))


def plyvel_version():
    import plyvel

    return plyvel.__version__ + " (plyvel)"


@program("LevelDB, sync", plyvel_version, ["py:plyvel"])
class LevelDb(Worker):
    WORK = """
        import plyvel, sys
        db = plyvel.DB(sys.argv[1] + '/level', create_if_missing=True, write_buffer_size=1 << 18)
        n = 0
        while True:
            n += 1
            db.put(b'%08d' % n, b'x' * (n % 2000), sync=True)
            print(n, flush=True)
    """
    CHECK = """
        import plyvel, sys
        db = plyvel.DB(sys.argv[1] + '/level', paranoid_checks=True)
        keys = [int(k) for k, v in db if v == b'x' * (int(k) % 2000)]
        assert keys == list(range(1, len(keys) + 1))
        print(len(keys))
    """


def gdbm_version():
    return re.search(r"[\d.]+", run(["gdbmtool", "--version"]))[0]


@program("GDBM, synchronous", gdbm_version, ["gdbmtool", "py:dbm.gnu"])
class Gdbm(Worker):
    # Python's binding does not tell whether the sync failed.
    tells = False
    WORK = """
        import dbm.gnu, sys
        db = dbm.gnu.open(sys.argv[1] + '/gdbm', 'nfs')
        n = 0
        while True:
            n += 1
            db[b'%08d' % n] = b'x' * (n % 500)
            db.sync()
            print(n, flush=True)
    """
    CHECK = """
        import dbm.gnu, sys
        db = dbm.gnu.open(sys.argv[1] + '/gdbm', 'w')
        keys = sorted(int(k) for k in db.keys())
        assert keys == list(range(1, len(keys) + 1))
        print(len(keys))
    """


def numpy_version():
    import numpy

    return numpy.__version__


@program("numpy.memmap, flush", numpy_version, ["py:numpy"])
class Numpy(Worker):
    WORK = """
        import numpy, sys
        m = numpy.memmap(sys.argv[1] + '/array', dtype='<u8', mode='w+', shape=(65536,))
        n = 0
        while True:
            n += 1
            m[n % 64::64] = n
            m[0] = n
            m.flush()
            print(n, flush=True)
    """
    CHECK = """
        import numpy, sys
        m = numpy.memmap(sys.argv[1] + '/array', dtype='<u8', mode='r')
        n = int(m[0])
        assert all((m[k % 64 + 64::64] == k).all() for k in range(max(1, n - 62), n + 1))
        print(n)
    """


@program("a C program, linked statically", lambda: "write, fsync", ["cc"])
class Static(Worker):
    SOURCE = r"""
        #include <fcntl.h>
        #include <stdio.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            (void)argc;
            int f = open(argv[1], O_WRONLY | O_CREAT | O_APPEND, 0644);
            for (unsigned n = 1;; n++) {
                if (write(f, &n, sizeof n) != sizeof n || fsync(f) != 0) { perror("work"); return 1; }
                printf("%u\n", n); fflush(stdout);
            }
        }
    """
    CHECK = """
        import struct, sys
        b = open(sys.argv[1] + '/records', 'rb').read()
        all = [n for n, in struct.iter_unpack('<I', b[:len(b) // 4 * 4])]
        assert all == list(range(1, len(all) + 1))
        print(len(all))
    """

    def prepare(self):
        self.exe = pathlib.Path(tempfile.mkdtemp()) / "static"
        run(["cc", "-static", "-O1", "-o", self.exe, "-x", "c", "-"], input=textwrap.dedent(self.SOURCE))

    def work(self):
        args = ["env", "-i", self.exe, self.at / "records"]
        return start(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self):
        shutil.rmtree(self.exe.parent)


@program("Java, MappedByteBuffer.force", lambda: run(["java", "--version"]).split("\n")[0], ["java"])
class Java(Worker):
    SOURCE = """
        import java.nio.*; import java.nio.channels.*; import java.nio.file.*;
        public class Work { public static void main(String[] a) throws Exception {
            try (FileChannel c = FileChannel.open(Path.of(a[0], "mapped"), StandardOpenOption.READ, StandardOpenOption.WRITE, StandardOpenOption.CREATE)) {
                MappedByteBuffer b = c.map(FileChannel.MapMode.READ_WRITE, 0, 1 << 20);
                for (int n = 1; ; n++) {
                    for (int i = 0; i < 1 << 20; i += 65536) b.putInt(i, n);
                    b.force();
                    System.out.println(n); System.out.flush();
                } } } }
    """
    CHECK = """
        import struct, sys
        b = open(sys.argv[1] + '/mapped', 'rb').read()
        all = {struct.unpack_from('>I', b, i)[0] for i in range(0, 1 << 20, 65536)}
        assert len(all) == 1, all
        print(all.pop())
    """

    def prepare(self):
        self.home = pathlib.Path(tempfile.mkdtemp())
        (self.home / "Work.java").write_text(textwrap.dedent(self.SOURCE))

    def work(self):
        args = ["java", self.home / "Work.java", self.at]
        return start(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self):
        shutil.rmtree(self.home)


@program("Redis, AOF always", lambda: re.search(r"v=(\S+)", run(["redis-server", "--version"]))[1], ["redis-server"])
class Redis(Worker):
    def server(self):
        self.port = free_port()
        args = ["redis-server", "--port", str(self.port), "--dir", str(self.at), "--appendonly", "yes",
                "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1"]
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)

        def up():
            try:
                return self.ask("PING") == "+PONG" or None
            except OSError:
                return None

        until("redis", up)

    def ask(self, line):
        with socket.create_connection(("127.0.0.1", self.port), 20) as s:
            s.sendall(line.encode() + b"\r\n")
            return s.makefile().readline().strip()

    def work(self):
        self.server()
        code = """
            import socket, sys
            s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
            f = s.makefile()
            n = 0
            while True:
                n += 1
                s.sendall(b'INCR n\\r\\n')
                assert f.readline().strip() == ':%d' % n
                print(n, flush=True)
        """
        args = [sys.executable, "-c", textwrap.dedent(code), str(self.port)]
        return start(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        self.process.kill()
        self.process.wait()
        self.server()
        with socket.create_connection(("127.0.0.1", self.port), 20) as s:
            s.sendall(b"GET n\r\n")
            f = s.makefile()
            f.readline()
            return int(f.readline())

    def end(self):
        self.process.kill()
        self.process.wait()


def postgres_bin():
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))
    return found[-1] if found else pathlib.Path("/nowhere")


@program("PostgreSQL, data checksums", lambda: run([postgres_bin() / "postgres", "--version"]).split()[-1].strip(")"),
         [str(postgres_bin() / "initdb"), "fuser"])
class Postgres(Worker):
    @property
    def data(self):
        return self.at / "data"

    def as_user(self, *args):
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *map(str, args)]

    def prepare(self):
        run(["chown", "postgres:postgres", self.at])
        run(self.as_user(postgres_bin() / "initdb", "-D", self.data, "--data-checksums", "-A", "trust"), cwd="/")

    def server(self):
        self.port = free_port()
        args = self.as_user(postgres_bin() / "postgres", "-D", self.data, "-p", self.port, "-k", "/tmp",
                            "-c", "shared_buffers=16MB")
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        ready = self.as_user(postgres_bin() / "pg_isready", "-h", "/tmp", "-p", self.port)
        until("postgres", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)

    def psql(self, sql):
        args = self.as_user("psql", "-h", "/tmp", "-p", self.port, "-qtA", "-c", sql, "postgres")
        return run(args, cwd="/")

    def work(self):
        self.server()
        self.psql("create table t (n serial primary key, x text)")
        one = "insert into t (x) values (repeat('x', 200)) returning n;\n"
        args = self.as_user("psql", "-h", "/tmp", "-p", self.port, "-qtA", "postgres")
        p = start(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        feed(p, (one for _ in range(1000000)))
        return p

    def stop(self):
        self.process.kill()
        self.process.wait()
        # Its children end when they notice, and until then nothing may be started.
        held = ["fuser", "-s", f"{self.port}/tcp"]
        until("the end of postgres", lambda: subprocess.run(held, check=False).returncode != 0)
        run(["rm", "-f", self.data / "postmaster.pid"])

    def check(self):
        self.stop()
        self.server()
        rows, most, size = self.psql("select count(*), max(n), sum(length(x)) from t").split("|")
        assert rows == most and int(size) == 200 * int(rows), f"{rows} rows, the last {most}, {size} bytes"
        return int(rows)

    def end(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


@program("MariaDB, InnoDB", lambda: run(["mariadbd", "--version"]).split()[2], ["mariadbd", "mariadb"])
class MariaDb(Worker):
    @property
    def data(self):
        return self.at / "data"

    def prepare(self):
        run(["chown", "mysql:mysql", self.at])
        run(["mariadb-install-db", "--user=mysql", f"--datadir={self.data}", "--auth-root-authentication-method=normal",
             "--skip-test-db"])

    def server(self):
        self.socket = pathlib.Path(tempfile.gettempdir()) / f"mojim-maria-{os.getpid()}.sock"
        args = ["mariadbd", "--user=mysql", f"--datadir={self.data}", f"--socket={self.socket}", "--skip-networking",
                "--innodb-flush-log-at-trx-commit=1", f"--pid-file={self.socket}.pid"]
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ready = ["mariadb", f"--socket={self.socket}", "-uroot", "-e", "select 1"]
        until("mariadbd", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)

    def sql(self, text):
        return run(["mariadb", f"--socket={self.socket}", "-uroot", "-N", "-B", "-e", text])

    def work(self):
        self.server()
        self.sql("create database w; create table w.t (n int primary key, x varchar(300)) engine=innodb")
        args = ["mariadb", f"--socket={self.socket}", "-uroot", "-N", "-B", "--unbuffered", "w"]
        p = start(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        feed(p, (f"insert into t values ({n}, repeat('x', 200)); select {n};\n" for n in range(1, 1000000)))
        return p

    def check(self):
        self.process.kill()
        self.process.wait()
        self.server()
        assert "OK" in self.sql("check table w.t extended")
        n, most = map(int, self.sql("select count(*), max(n) from w.t").split())
        assert n == most, f"{n} rows, the last {most}"
        return n

    def end(self):
        self.process.kill()
        self.process.wait()


@program("git", lambda: run(["git", "--version"]).split()[2], ["git"])
class Git(Worker):
    WORK = """
        import os, subprocess, sys
        at = sys.argv[1] + '/repo'
        def git(*a): subprocess.run(['git', '-C', at, '-c', 'core.fsync=all', '-c', 'user.name=x', '-c', 'user.email=x', *a], check=True, capture_output=True)
        subprocess.run(['git', 'init', '-q', at], check=True, capture_output=True)
        n = 0
        while True:
            n += 1
            open(f'{at}/f{n}', 'w').write('x' * n * 50)
            git('add', '.'); git('commit', '-qm', str(n))
            # Git renames the branch's file and leaves the directory unsynced.
            f = os.open(at + '/.git/refs/heads', os.O_RDONLY); os.fsync(f); os.close(f)
            print(n, flush=True)
    """
    CHECK = """
        import subprocess, sys
        at = sys.argv[1] + '/repo'
        def git(*a):
            p = subprocess.run(['git', '-c', 'safe.directory=*', '-C', at, *a], capture_output=True, text=True)
            assert p.returncode == 0, p.stderr
            return p.stdout
        git('fsck', '--full', '--strict')
        print(git('rev-list', '--count', 'HEAD'))
    """


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


@program("RocksDB, sync", lambda: dpkg("librocksdb-dev"), ["cc", "/usr/include/rocksdb/c.h"])
class Rocks(Compiled):
    def compiler(self):
        run(["cc", "-O1", HERE / "src/rocks.c", "-o", self.exe, "-lrocksdb"])


@program("Boost.Interprocess, mapped file", lambda: dpkg("libboost-dev"), ["c++", "/usr/include/boost/interprocess/managed_mapped_file.hpp"])
class Boost(Compiled):
    def compiler(self):
        run(["c++", "-O1", HERE / "src/boost.cpp", "-o", self.exe])


@program("PMDK, libpmemobj", lambda: dpkg("libpmemobj-dev"), ["cc", "/usr/include/libpmemobj.h"])
class Pmdk(Compiled):
    def compiler(self):
        run(["cc", "-O1", HERE / "src/pmdk.c", "-o", self.exe, "-lpmemobj"])


BBOLT = "v1.4.3"


@program("bbolt, in Go", lambda: f"{BBOLT}, {run(['go', 'version']).split()[2]}", ["go"])
class Bolt(Compiled):
    def compiler(self):
        shutil.copy(HERE / "src/bolt.go", self.home / "main.go")
        for words in (["mod", "init", "w"], ["get", f"go.etcd.io/bbolt@{BBOLT}"], ["build", "-o", self.exe, "."]):
            run(["go", *words], cwd=self.home, env={**os.environ, "CGO_ENABLED": "0"})


@program("Key-value server, examples/kvserver", lambda: dpkg("libkyotocabinet-dev"), ["c++", "/usr/include/kchashdb.h", "kchashmgr"])
class KeyValue(Compiled):
    FILE = "kv.kch"
    # Nothing is committed but by the server's msync.
    options = ("--commit-interval", "never")
    CLIENT = """
        import itertools, socket, sys
        # Connections take turns: what was acknowledged to one is read by the next.
        all = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), 60).makefile('rw') for _ in range(3)]
        turns = itertools.cycle(all)
        def ask(line):
            f = next(turns)
            f.write(line + '\\n')
            f.flush()
            said = f.readline()
            assert said, 'the server ended'
            return said[:-1]
        def value(n):
            return f'{n} ' + 'x' * (n * 37 % 2000)
        def there(n):
            said = ask(f'get k{n}')
            assert said in ('none', 'value ' + value(n)), said
            return said != 'none'
        n = 0
        if sys.argv[2] == 'check':
            while there(n + 1): n += 1
            assert not any(there(n + k) for k in range(2, 10))
            print(n)
        while sys.argv[2] == 'work':
            n += 1
            assert n == 1 or there(n - 1)
            if n % 5 == 0:
                assert [ask(f'{what} k{n}') for what in ('set', 'remove', 'remove')] == ['ok', 'ok', 'none']
            assert ask(f'set k{n} {value(n)}') == 'ok'
            print(n, flush=True)
    """

    def compiler(self):
        examples = HERE.parent.parent / "examples/kvserver"
        for name, more in (("server", ["-lkyotocabinet"]), ("load", [])):
            run(["c++", "-std=c++17", "-O1", "-pthread", examples / f"{name}.cpp", "-o", self.home / name, *more])
        # Both loads, in each way.
        ways = [f"{w}={self.at}" for w in ("synchronize", "transaction", "no-sync")]
        said = run([self.home / "load", "--json", "--seconds", "0.03", self.home / "server", *ways])
        rows = [json.loads(line) for line in said.splitlines()]
        assert len(rows) == 18 and all(r["requests_per_second"] > 0 for r in rows), said

    def server(self):
        # It ends with this program, whatever ends that.
        args = ["setpriv", "--pdeathsig", "KILL", self.home / "server", "synchronize", self.at / self.FILE]
        self.process = start(args, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = self.process.stdout.readline().split()
        # A sync point leaves nothing to repair.
        assert said[:1] == ["port"] and said[2:] == ["clean"], said
        return [sys.executable, "-c", textwrap.dedent(self.CLIENT), said[1]]

    def work(self):
        return subprocess.Popen([*self.server(), "work"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        self.process.kill()
        self.process.wait()
        client = self.server()
        found = int(subprocess.run([*client, "check"], stdout=subprocess.PIPE, check=True, timeout=LIMIT).stdout)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT) == 0
        run(["kchashmgr", "check", self.at / self.FILE])
        return found

    def end(self):
        self.process.kill()
        self.process.wait()
        super().end()


@program("slapd, back-mdb", lambda: dpkg("slapd"), ["slapd", "ldapadd", "ldapsearch"])
class Slapd(Worker):
    least = 100

    def prepare(self):
        self.home = pathlib.Path(tempfile.mkdtemp())
        run(["mkdir", self.at / "ldap"])

    def server(self):
        self.port = free_port()
        conf = self.home / "slapd.conf"
        conf.write_text(textwrap.dedent(f"""
            include /etc/ldap/schema/core.schema
            modulepath /usr/lib/ldap
            moduleload back_mdb
            pidfile {self.home}/pid
            database mdb
            suffix "dc=x"
            rootdn "cn=admin,dc=x"
            rootpw secret
            directory {self.at}/ldap
            maxsize 67108864
        """))
        self.url = f"ldap://127.0.0.1:{self.port}"
        args = ["slapd", "-d", "0", "-f", conf, "-h", self.url]
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ready = ["ldapsearch", "-x", "-H", self.url, "-s", "base", "-b", "", "1.1"]
        until("slapd", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)

    def work(self):
        self.server()
        code = """
            import subprocess, sys
            def add(text):
                subprocess.run(['ldapadd', '-x', '-H', sys.argv[1], '-D', 'cn=admin,dc=x', '-w', 'secret'],
                               input=text, text=True, check=True, stdout=subprocess.DEVNULL)
            add('dn: dc=x\\nobjectClass: dcObject\\nobjectClass: organization\\no: x\\ndc: x\\n')
            n = 0
            while True:
                n += 1
                add(f'dn: cn={n},dc=x\\nobjectClass: person\\ncn: {n}\\nsn: {n * 7}\\n')
                print(n, flush=True)
        """
        args = [sys.executable, "-c", textwrap.dedent(code), self.url]
        return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        self.process.kill()
        self.process.wait()
        self.server()
        said = run(["ldapsearch", "-x", "-LLL", "-H", self.url, "-b", "dc=x", "(objectClass=person)", "cn", "sn"])
        found = dict(zip(re.findall(r"^cn: (\d+)$", said, re.M), re.findall(r"^sn: (\d+)$", said, re.M)))
        numbers = sorted(map(int, found))
        assert numbers == list(range(1, len(numbers) + 1)) and all(int(v) == 7 * int(k) for k, v in found.items())
        return len(numbers)

    def end(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.home)


def dpkg(package):
    """The version of a package of the distribution."""
    return run(["dpkg-query", "-W", "-f", "${Version}", package])


class Suite(Worker):
    """A program's own test, to its end."""

    def suite(self):
        raise NotImplementedError


def kyoto(tool):
    class Kyoto(Suite):
        def suite(self):
            f = self.at / "kc"
            run([tool, "order", "-rnd", f, "20000"])
            run([tool, "queue", "-it", "2", "-rnd", f, "5000"])
            run([tool, "wicked", "-it", "2", f, "5000"])
            run([tool, "tran", "-hard", "-it", "1", f, "200"])
            return "order 20,000; queue 5,000; wicked 5,000; tran -hard 200"

    return Kyoto


def kyoto_version():
    return re.search(r"[\d.]+", run(["kchashmgr", "version"]))[0]


program("Kyoto Cabinet, hash", kyoto_version, ["kchashtest"], "suite")(kyoto("kchashtest"))
program("Kyoto Cabinet, tree", kyoto_version, ["kctreetest"], "suite")(kyoto("kctreetest"))


@program("Tokyo Cabinet", lambda: re.search(r"[\d.]+", run(["tchmgr", "version"]))[0], ["tchtest", "tcbtest"], "suite")
class Tokyo(Suite):
    def suite(self):
        for tool in ["tchtest", "tcbtest"]:
            f = self.at / tool
            run([tool, "write", f, "20000"])
            run([tool, "read", f])
            run([tool, "wicked", f, "5000"])
        return "write and read 20,000, wicked 5,000, of a hash and a tree"


@program("QDBM", lambda: re.search(r"[\d.]+", run(["dpmgr", "version"]))[0], ["dpmgr"], "suite")
class Qdbm(Suite):
    def suite(self):
        f = self.at / "dp"
        run(["dpmgr", "create", f])
        for n in range(300):
            run(["dpmgr", "put", f, f"key{n}", f"value{n * 7}"])
        run(["dpmgr", "optimize", f])
        assert all(run(["dpmgr", "get", f, f"key{n}"]).strip() == f"value{n * 7}" for n in range(300))
        return "300 put, optimized, got"


@program("TDB", lambda: "of the distribution", ["tdbtool", "tdbdump"], "suite")
class Tdb(Suite):
    def suite(self):
        f = self.at / "tdb"
        lines = [f"create {f}"] + [f"insert key{n} value{n * 7}" for n in range(300)] + ["check", "quit"]
        said = run(["tdbtool"], input="\n".join(lines) + "\n")
        assert "Database integrity is OK" in said, said[-200:]
        assert run(["tdbdump", f]).count("key(") == 300
        return "300 inserted, checked, dumped"


@program("Berkeley DB", lambda: run(["db_dump", "-V"]).split("\n")[0], ["db_load", "db_dump", "db_verify"], "suite")
class BerkeleyDb(Suite):
    def suite(self):
        text = "".join(f"key{n:06}\nvalue{n * 7}\n" for n in range(20000))
        run(["db_load", "-T", "-t", "btree", self.at / "b.db"], input=text)
        run(["db_verify", self.at / "b.db"])
        assert f"key019999\n value{19999 * 7}".replace("\n ", "\n ") in run(["db_dump", "-p", self.at / "b.db"])
        return "20,000 loaded, verified, dumped"


@program("cp, tar, rsync, mv, rm", lambda: "of the distribution", ["tar", "rsync"], "suite")
class Tools(Suite):
    def suite(self):
        source = HERE.parent.parent / "crates"
        run(["cp", "-a", source, self.at / "cp"])
        run(["sh", "-c", f"tar -C {source.parent} -cf - crates | tar -C {self.at} -xf -"])
        run(["rsync", "-a", f"{source}/", self.at / "rsync"])
        run(["rsync", "-a", "--delete", f"{source}/mojim/", self.at / "rsync"])
        run(["mv", self.at / "cp", self.at / "moved"])
        run(["diff", "-r", source, self.at / "moved"])
        run(["diff", "-r", source, self.at / "crates"])
        run(["diff", "-r", source / "mojim", self.at / "rsync"])
        run(["rm", "-rf", self.at / "crates"])
        return "the sources of this repository, compared"


@program("vim", lambda: run(["vim", "--version"]).split("\n")[0][:40], ["vim"], "suite")
class Vim(Suite):
    def suite(self):
        run(["sh", "-c", f"echo one > '{self.at}/text'"])
        run(["vim", "-es", "-u", "NONE", "-c", "normal Atwo", "-c", "wq", str(self.at / "text")])
        assert run(["cat", self.at / "text"]) == "onetwo\n"
        return "a file edited and written"


@program("fio, verified", lambda: run(["fio", "--version"]).strip(), ["fio"], "suite")
class Fio(Suite):
    def suite(self):
        engines = ["sync", "psync", "mmap", "libaio", "io_uring"]
        for engine in engines:
            run(["fio", "--name=f", f"--filename={self.at}/{engine}", f"--ioengine={engine}", "--rw=randwrite",
                 "--bs=4k-64k", "--size=8m", "--verify=crc32c", "--fsync=64", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0"])
        return "randwrite, 8 MiB, " + ", ".join(engines)


@program("stress-ng", lambda: run(["stress-ng", "--version"]).split()[2], ["stress-ng"], "suite")
class StressNg(Suite):
    def suite(self):
        kinds = ["dentry", "dir", "fallocate", "link", "symlink", "mmap", "rename", "hdd", "utime", "xattr", "seek", "sync-file"]
        for kind in kinds:
            run(["stress-ng", f"--{kind}", "1", f"--{kind}-ops", "100", "--verify", "--temp-path", self.at, "-t", "5",
                 *(["--mmap-file", "--mmap-bytes", "8m"] if kind == "mmap" else []),
                 *(["--hdd-bytes", "16m"] if kind == "hdd" else [])])
        return ", ".join(kinds)


def is_there(need):
    if need.startswith("py:"):
        code = f"import {need[3:]}"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    if need.startswith("/usr/include/"):
        return os.path.exists(need)
    return shutil.which(need) is not None


@contextlib.contextmanager
def a_directory(cls, mojim, way):
    """A cluster, and a directory of its volume for this program."""
    with tempfile.TemporaryDirectory(prefix="mojim-programs-") as home:
        home = pathlib.Path(home)
        home.chmod(0o755)
        c = Cluster(mojim, home, way, cls.options)
        try:
            run(["mkdir", c.at / "w"])
            yield c, c.at / "w"
        finally:
            c.end()


def killed(cls, mojim, least, way):
    """The program at work while its node is killed."""
    with a_directory(cls, mojim, way) as (c, at):
        one = cls(at)
        one.prepare()
        p = one.work()
        acked = 0
        for line in p.stdout:
            acked = int(line.split()[-1]) if line.strip() else acked
            if acked >= least:
                break
        if acked < least:
            raise Failed(f"ended after {acked}: {p.stderr.read()[-400:]}")
        c.fail_over()
        # What was acknowledged before the node was lost, and lies in the pipe.
        p.kill()
        for line in p.stdout if cls.tells else []:
            acked = int(line.split()[-1]) if line.strip() else acked
        p.wait()
        one.at = c.at / "w"
        found = one.check()
        one.end()
        if found < acked:
            raise Failed(f"{acked} acknowledged, {found} there")
        return acked, f"all there, {found - acked} more"


def suite(cls, mojim, _least, way):
    with a_directory(cls, mojim, way) as (c, at):
        what = cls(at).suite()
        if way == "run":
            until("the mount's end", lambda: c.server() is None)
        os.sync()
        c.equal()
        return what, "passed; the copies are equal"


def one_row(cls, way, args):
    """A program's row of the table."""
    row = {"program": cls.name, "version": "", "way": way, "what": "", "result": ""}
    lacks = [n for n in cls.needs if not is_there(n)]
    if lacks:
        row["result"] = "skipped: no " + ", ".join(lacks)
        return row
    try:
        row["version"] = str(cls.version()).strip()
        how = killed if cls.way == "killed" else suite
        # Slow ones need not do so many.
        least = min(args.least, getattr(cls, "least", args.least))
        what, row["result"] = how(cls, args.mojim, least, way)
        row["what"] = f"{what} acknowledged, then SIGKILL of mount and node, takeover" if how is killed else what
    except (Failed, AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as e:
        row["result"] = f"FAILED: {e}"
    return row


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--mojim", required=True, help="the command")
    a.add_argument("--only", default="", help="programs whose names contain this")
    a.add_argument("--way", default="mount,run", help="how programs have the volume: mount, run or both")
    a.add_argument("--least", type=int, default=300, help="acknowledged operations before the kill")
    a.add_argument("--json", action="store_true", help="an object for each program, on a line")
    a.add_argument("--write", help="write the table to this file")
    args = a.parse_args()
    rows, bad = [], 0
    for cls in PROGRAMS:
        if args.only.lower() not in cls.name.lower():
            continue
        for way in args.way.split(","):
            row = one_row(cls, way, args)
            bad += row["result"].startswith("FAILED")
            rows.append(row)
            print(json.dumps(row) if args.json else " | ".join(row.values()), flush=True)
    if args.write:
        head = (HERE / "head.md").read_text()
        lines = ["| program | version | way | what ran | result |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(v.replace("|", "/").replace("\n", " ") for v in r.values()) + " |" for r in rows]
        pathlib.Path(args.write).write_text(head + "\n".join(lines) + "\n")
    return 1 if bad else 0


Git.least = 20
if __name__ == "__main__":
    sys.exit(main())
