"""Suites: programs' own tests, or tests of them, which run to their end."""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import fetch
from cluster import HERE, LIMIT, run, start
from embedded import sqlite_version
from kinds import FETCHED, Suite, program


def kyoto(tool):
    class Kyoto(Suite):
        def suite(self):
            f = self.at / "kc"
            run([tool, "order", "-rnd", f, "20000"])
            run([tool, "queue", "-it", "2", "-rnd", f, "5000"])
            run([tool, "wicked", "-it", "2", f, "5000"])
            run([tool, "tran", "-hard", "-it", "1", f, "200"])
            return "order (20,000), queue (5,000), wicked (5,000), tran -hard (200)"

    return Kyoto


def kyoto_version():
    return re.search(r"[\d.]+", run(["kchashmgr", "version"]))[0]


program("Kyoto Cabinet, hash", kyoto_version, ["kchashtest"], "suite")(kyoto("kchashtest"))
program("Kyoto Cabinet, tree", kyoto_version, ["kctreetest"], "suite")(kyoto("kctreetest"))


@program("Kyoto Cabinet, polymorphic", kyoto_version, ["kcpolytest"], "suite")
class KyotoPolymorphic(Suite):
    def suite(self):
        for kind in ["kch", "kct"]:
            f = self.at / f"kc.{kind}"
            run(["kcpolytest", "misc", f])
            run(["kcpolytest", "index", "-etc", f, "20000"])
            run(["kcpolytest", "mapred", "-rnd", f, "20000"])
        return "misc, index (20,000), mapred (20,000), of a hash and a tree"


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


@program("SQLite, speedtest1", lambda: f"{sqlite_version()}; {fetch.SPEEDTEST}", [f"fetched:{fetch.SPEEDTEST}"], "suite")
class SpeedTest(Suite):
    @staticmethod
    def speedtest(*words):
        """What all its queries gave, as it hashes that."""
        said = run([FETCHED / fetch.SPEEDTEST / "speedtest1", "--size", "10", "--verify", *words])
        return re.search(r"^Verification Hash: (.*)$", said, re.M)[1]

    def suite(self):
        expected = self.speedtest("--memdb")
        for mode in ["delete", "wal"]:
            db = self.at / f"{mode}.db"
            found = self.speedtest("--journal", mode, db)
            assert found == expected, f"{mode}: {found}, in memory {expected}"
            code = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('pragma integrity_check').fetchall())"
            said = run([sys.executable, "-c", code, db]).strip()
            assert said == "[('ok',)]", said
        return "--size 10, journals DELETE and WAL, its hash is that of its run in memory, integrity_check"


@program("py-lmdb, its own tests", lambda: fetch.version(fetch.PY_LMDB), [f"fetched:{fetch.PY_LMDB}", "py:pytest"], "suite")
class PyLmdb(Suite):
    # Of the plain directory, for all ways.
    plain = None

    @staticmethod
    def tests(begin, temporary, report):
        """Begins all tests, whose files lie in a directory."""
        site = FETCHED / fetch.PY_LMDB / "site"
        words = ["env", f"TMPDIR={temporary}", f"PYTHONPATH={site}", sys.executable, "-B", "-m", "pytest", "-q",
                 "-p", "no:cacheprovider", f"--junit-xml={report}", "tests"]
        return begin(words, cwd=FETCHED / fetch.PY_LMDB, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @staticmethod
    def outcomes(report):
        """How each test ended."""
        cases = xml.etree.ElementTree.parse(report).iter("testcase")
        bad = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        return {
            f"{c.get('classname')}.{c.get('name')}": next((bad[e.tag] for e in c if e.tag in bad), "passed") for c in cases
        }

    def suite(self):
        with tempfile.TemporaryDirectory(dir=FETCHED) as plain:
            plain = pathlib.Path(plain)
            reports = [plain / "volume.xml", plain / "plain.xml"]
            # Side by side: they wait most of the time.
            both = [self.tests(start, self.at, reports[0])]
            if PyLmdb.plain is None:
                both.append(self.tests(subprocess.Popen, plain, reports[1]))
            try:
                for p in both:
                    p.wait(LIMIT)
            finally:
                for p in both:
                    p.kill()
            found = self.outcomes(reports[0])
            PyLmdb.plain = PyLmdb.plain or self.outcomes(reports[1])
        all = {**found, **PyLmdb.plain}
        other = [f"{t} {found.get(t)}, there {PyLmdb.plain.get(t)}" for t in all if found.get(t) != PyLmdb.plain.get(t)]
        assert not other, f"{len(other)} not as in a plain directory: {'; '.join(other)[:400]}"
        count = collections.Counter(found.values())
        assert count["passed"] > 400 and not count["failed"], dict(count)
        return f"{count['passed']} passed, {count['skipped']} skipped, each as in a plain directory"
