"""Programs that keep files by a library, or by themselves, without a server."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

import fetch
from cluster import HERE, run, start
from kinds import FETCHED, Compiled, Worker, dpkg, program


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


def mdbx(flags):
    class Mdbx(Compiled):
        def compiler(self):
            built = FETCHED / fetch.MDBX
            run(["cc", "-O1", f"-DFLAGS={flags}", f"-I{built}", HERE / "src/mdbx.c", built / "mdbx.o", "-o", self.exe, "-pthread", "-lm"])

        def check(self):
            found = super().check()
            run([FETCHED / fetch.MDBX / "mdbx_chk", self.at / self.FILE])
            return found

    return Mdbx


for name, flags in (("libmdbx", "MDBX_ENV_DEFAULTS"), ("libmdbx, MDBX_WRITEMAP", "MDBX_WRITEMAP")):
    program(name, lambda: fetch.version(fetch.MDBX), ["cc", f"fetched:{fetch.MDBX}"])(mdbx(flags))


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


@program("git", lambda: run(["git", "--version"]).split()[2], ["git"])
class Git(Worker):
    least = 20
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
