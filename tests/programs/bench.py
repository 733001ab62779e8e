#!/usr/bin/env python3
"""Files and programs on a mounted volume, beside the file system that its nodes' copies lie on.

The places take turns in each round: a plain directory (`plain`), in which nothing is replicated;
mounts of volumes in mode `sync` on two nodes of this machine, whose mirror has its log on the disk
(`disk`, the default) or in memory (`memory`), the same with the mount's requests over io_uring (`uring`) where
the machine has that switched on; with `--mirror-disk`, one whose mirror has its log on an emulated disk
(`emulated`), over io_uring where that is switched on; and, for programs that can replicate by themselves, a
plain directory with the program and a replica that its commits wait for (`replicated`): the program
flushes, then the replica receives and flushes, or writes only, where the case says `remote_write`.
The last place is the limit (`unsynced`): the plain directory, with the program told not to sync. So
fast would be a volume whose sync points, and the calls that lead to them, take no time at all.

A row has the median of the rounds, and of each round's ratio to the plain directory: of times for
single operations (less is better), of operations a second for programs (more is better). A second
ratio of the mounts is to `replicated` (JSON: `of_replicated`).

`mojim bench programs` starts this; `scripts/bench-programs` installs the programs, too.
"""

import argparse
import contextlib
import json
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

from cluster import HERE, Cluster, Failed, before, free_port, until
from kinds import is_there
from servers import postgres_bin

OPS = ["write+fsync", "append+fdatasync", "create+fsync+rename", "msync-1", "msync-64", "read-4k", "read-1m",
       "write-4k", "write-1m"]
PLACES = ["plain", "disk", "memory"]
URING = "uring"
EMULATED = "emulated"
SWITCH = pathlib.Path("/sys/module/fuse/parameters/enable_uring")
REPLICATED = "replicated"
UNSYNCED = "unsynced"


def output(args, **more):
    p = subprocess.run([str(a) for a in args], capture_output=True, text=True, check=False, timeout=300, **more)
    if p.returncode != 0:
        raise Failed(f"{args[0]}: exit code {p.returncode}: {p.stdout[-300:]} {p.stderr[-300:]}")
    return p.stdout


class InMemory(Cluster):
    """The mirror's log is in memory."""

    def __init__(self, mojim, home, uring):
        self.more = '[node.b.log]\nmedium = "dram"\n'
        super().__init__(mojim, home, "mount", ["--uring", uring])


class OnEmulatedDisk(Cluster):
    """The mirror's log is in memory, and each durable write of it takes so many microseconds."""

    more = '[node.b.log]\npath = "{rings}/disk"\n'

    def __init__(self, mojim, home, bench, takes):
        self.bench, self.takes = bench, takes
        super().__init__(mojim, home, "mount", ["--uring", "auto"])

    def command(self, word, name):
        if (word, name) == ("node", "b"):
            return [self.bench, "__node", f"--takes={self.takes}"]
        return super().command(word, name)


def python(code, at, seconds):
    """Operations a second that `code` makes: it has `at`, and calls `op` again and again."""
    head = "import sys, time\nat, seconds = sys.argv[1], float(sys.argv[2])\n"
    tail = """
        n, begin = 0, time.monotonic()
        while time.monotonic() < begin + seconds:
            n += 1
            op(n)
        print(n / (time.monotonic() - begin))
    """
    text = head + textwrap.dedent(code) + textwrap.dedent(tail)
    return float(output([sys.executable, "-c", text, at, seconds]))


def sqlite(mode, synchronous="full"):
    def rate(at, seconds):
        return python(f"""
            import sqlite3
            c = sqlite3.connect(at + '/db', isolation_level=None)
            c.execute('pragma journal_mode={mode}'); c.execute('pragma synchronous={synchronous}')
            c.execute('create table t (n integer primary key, x)')
            def op(n): c.execute('insert into t values (?, ?)', (n, 'x' * 100))
        """, at, seconds)

    return rate


def lmdb(sync):
    def rate(at, seconds):
        return python(f"""
            import lmdb
            e = lmdb.open(at + '/lmdb', map_size=1 << 28, writemap=True, sync={sync})
            def op(n):
                with e.begin(write=True) as t: t.put(b'%08d' % n, b'x' * 100)
        """, at, seconds)

    return rate


def kyoto(*hard):
    def rate(at, seconds):
        n = 20
        while True:
            begin = time.monotonic()
            output(["kctreetest", "tran", *hard, "-it", "1", f"{at}/kc", n])
            took = time.monotonic() - begin
            (pathlib.Path(at) / "kc").unlink()
            if took > seconds / 2:
                return n / took
            n *= 4

    return rate


def as_user(*args):
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *map(str, args)]


@contextlib.contextmanager
def postgres(data, **settings):
    """A server; the arguments that lead to it."""
    port, bin_ = free_port(), postgres_bin()
    more = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    server = subprocess.Popen(as_user(bin_ / "postgres", "-D", data, "-p", port, "-k", "/tmp", *more),
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    try:
        ready = as_user(bin_ / "pg_isready", "-h", "/tmp", "-p", port)
        until("postgres", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)
        yield ["-h", "/tmp", "-p", port]
    finally:
        server.send_signal(2)
        server.wait()


def pgbench(commit, replicated=False, fsync="on"):
    def rate(at, seconds):
        def do(name, *args):
            return output(as_user(postgres_bin() / name, *args), cwd="/")

        def standbys():
            sql = "select sync_state, current_setting('synchronous_commit') from pg_stat_replication"
            return do("psql", *to, "-qtA", "-c", sql, "postgres").split()

        shutil.chown(at, "postgres", "postgres")
        data, standby = f"{at}/data", f"{at}/standby"
        do("initdb", "-D", data, "-A", "trust", "--no-sync")
        settings = {"synchronous_commit": commit, "synchronous_standby_names": "*" if replicated else "", "fsync": fsync}
        with contextlib.ExitStack() as servers:
            to = servers.enter_context(postgres(data, **settings))
            if replicated:
                do("pg_basebackup", *to, "-D", standby, "-R", "-c", "fast")
                servers.enter_context(postgres(standby))
                until("the standby", lambda: standbys() == [f"sync|{commit}"])
            do("pgbench", "-q", "-i", "-s", "1", *to, "postgres")
            said = do("pgbench", "-n", "-c", "4", "-T", int(seconds) + 2, *to, "postgres")
            if standbys() != replicated * [f"sync|{commit}"]:
                raise Failed(f"standbys: {standbys()}")
            return float(re.search(r"tps = ([\d.]+)", said)[1])

    return rate


@contextlib.contextmanager
def redis_server(at, *more, appendfsync="always"):
    """A server; its port, and a function that asks it."""
    port = free_port()
    args = ["redis-server", "--port", str(port), "--dir", str(at), "--appendonly", "yes", "--appendfsync", appendfsync,
            "--save", "", "--repl-diskless-sync-delay", "0", *more]
    server = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(word):
        args = ["redis-cli", "-p", str(port), word]
        return subprocess.run(args, capture_output=True, text=True, check=False).stdout.split()

    try:
        until("redis", lambda: ask("ping") == ["PONG"])
        yield port, ask
    finally:
        server.kill()
        server.wait()


def redis(replicated=False, **how):
    def rate(at, seconds):
        with tempfile.TemporaryDirectory() as built, contextlib.ExitStack() as servers:
            sets = f"{built}/sets"
            output(["cc", "-O2", "-o", sets, HERE / "src/sets.c"])
            port, _ = servers.enter_context(redis_server(at, **how))
            if replicated:
                replica = pathlib.Path(at) / "replica"
                replica.mkdir()
                _, ask = servers.enter_context(redis_server(replica, "--replicaof", f"127.0.0.1 {port}"))
                # Its log begins when it has its first copy.
                ready = {"master_link_status:up", "aof_enabled:1", "aof_rewrite_in_progress:0", "aof_rewrite_scheduled:0"}
                until("the replica", lambda: ready <= set(ask("info")))
            # An answer of WAIT that is less than 1 is an error there.
            return float(output([sets, port, 4, seconds, int(replicated)]))

    return rate


# The last two of each: the rate with a replica of its own, and the rate without any sync. memcached is not here: no request syncs its file (-e),
# which is of use after an orderly end only.
PROGRAMS = [
    ("SQLite, WAL, a row a commit", sqlite("wal"), [], None, sqlite("wal", "off")),
    ("SQLite, DELETE, a row a commit", sqlite("delete"), [], None, sqlite("delete", "off")),
    ("LMDB, MDB_WRITEMAP, a put a commit", lmdb(True), ["py:lmdb"], None, lmdb(False)),
    ("Kyoto Cabinet, tree, tran -hard", kyoto("-hard"), ["kctreetest"], None, kyoto()),
    ("PostgreSQL, pgbench -c 4", pgbench("on"), [str(postgres_bin() / "pgbench")], pgbench("on", True),
     pgbench("on", fsync="off")),
    ("PostgreSQL, pgbench -c 4, remote_write", pgbench("remote_write"), [str(postgres_bin() / "pgbench")],
     pgbench("remote_write", True), None),
    ("Redis, AOF always, 4 clients", redis(), ["redis-server", "cc"], redis(True), redis(appendfsync="no")),
]


@contextlib.contextmanager
def places(mojim, home, bench, takes):
    """The directories, by name."""
    home.chmod(0o755)
    made = {name: home / name for name in [*PLACES, REPLICATED, UNSYNCED]}
    for d in made.values():
        d.mkdir()
        d.chmod(0o755)
    clusters = []
    try:
        clusters.append(Cluster(mojim, made["disk"], "mount", ["--uring", "off"]))
        clusters.append(InMemory(mojim, made["memory"], "off"))
        at = {"disk": clusters[0].at, "memory": clusters[1].at}
        if URING in PLACES:
            clusters.append(InMemory(mojim, made[URING], "on"))
            at[URING] = clusters[-1].at
        if EMULATED in PLACES:
            clusters.append(OnEmulatedDisk(mojim, made[EMULATED], bench, takes))
            at[EMULATED] = clusters[-1].at
        yield {**made, **at}
    finally:
        for c in clusters:
            c.end()


# Somebody has asked this to end.
asked = []


def end(*_):
    asked.append(True)
    raise KeyboardInterrupt


def rounds(args, at, one, replicated=None, unsynced=None):
    """`one` of each place's new directory, and the others of theirs, in turns; the values by place."""
    ways = dict.fromkeys(PLACES, one)
    if replicated:
        ways[REPLICATED] = replicated
    if unsynced:
        ways[UNSYNCED] = unsynced
    values = {name: [] for name in ways}
    for i in range(args.rounds):
        for name in list(ways)[:: -1 if i % 2 else 1]:
            # Python drops what is raised while it frees an object.
            if asked:
                raise KeyboardInterrupt
            d = at[name] / "w"
            d.mkdir()
            values[name].append(ways[name](str(d), args.seconds))
            shutil.rmtree(d)
    return values


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--mojim", required=True, help="the command")
    a.add_argument("--ops", required=True, help="the compiled ops.c")
    a.add_argument("--dir", default=None, help="where everything lies: a directory on the disk to be measured")
    a.add_argument("--only", default="", help="cases whose names contain this")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--seconds", type=float, default=1.0, help="of each case, place and round")
    a.add_argument("--mirror-disk", type=int, help="microseconds of a durable write of an emulated disk: one place more")
    a.add_argument("--bench", help="the program that has an emulated disk")
    a.add_argument("--json", action="store_true", help="an object for each row, on a line")
    args = a.parse_args()
    before[:] = []
    signal.signal(signal.SIGINT, end)
    if SWITCH.exists() and SWITCH.read_text().strip() == "Y":
        PLACES.append(URING)
    else:
        print(f"left out: mounts over io_uring, which are not switched on ({SWITCH})", file=sys.stderr)
    if args.mirror_disk:
        PLACES.append(EMULATED)
    with tempfile.TemporaryDirectory(prefix="mojim-bench-", dir=args.dir) as home, places(
        args.mojim, pathlib.Path(home), args.bench, args.mirror_disk
    ) as at:
        if not args.json:
            uring = ["the same over io_uring"] if URING in PLACES else []
            emulated = [f"sync, log on a disk of {args.mirror_disk} µs"] if EMULATED in PLACES else []
            heads = ["case", "plain", "sync, log on disk", "sync, log in memory", *uring, *emulated,
                     "plain, replicated by the program", "plain, never synced"]
            print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        for name in OPS:
            if args.only in name:
                values = rounds(args, at, lambda d, s, n=name: [float(x) for x in output([args.ops, d, n, s]).split()])
                say(args, name, {p: [v[2] for v in values[p]] for p in PLACES}, "us", {p: [v[3] for v in values[p]] for p in PLACES})
        for name, rate, needs, *others in PROGRAMS:
            if args.only not in name:
                continue
            lacks = [n for n in needs if not is_there(n)]
            if lacks:
                print(f"left out: {name}: no {', '.join(lacks)}", file=sys.stderr)
                continue
            say(args, name, rounds(args, at, rate, *others), "per_second")


def say(args, name, values, unit, p99=None):
    def to(base):
        return {p: statistics.median(x / y for x, y in zip(values[p], values[base])) for p in values}

    median = {p: statistics.median(v) for p, v in values.items()}
    ratio = to("plain")
    of_replicated = {p: r for p, r in to(REPLICATED).items() if p in PLACES[1:]} if REPLICATED in values else {}
    if args.json:
        for p in values:
            row = {"bench": "programs", "case": name, "place": p, unit: round(median[p], 2), "ratio": round(ratio[p], 3), "rounds": args.rounds}
            if p in of_replicated:
                row["of_replicated"] = round(of_replicated[p], 3)
            if p99:
                row["p99_us"] = round(statistics.median(p99[p]), 2)
            print(json.dumps(row), flush=True)
        return

    def cell(p):
        ratios = [f"{r[p]:.2f}" for r in (ratio, of_replicated) if p in r and p != "plain"]
        return f"{median[p]:.4g}" + (" µs" if unit == "us" else "/s") + (f" ({', '.join(ratios)})" if ratios else "")

    print(f"| {name} | " + " | ".join(cell(p) if p in values else "" for p in [*PLACES, REPLICATED, UNSYNCED]) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
