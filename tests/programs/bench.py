#!/usr/bin/env python3
"""Files and programs on a mounted volume, beside the file system that its nodes' copies lie on.

The places take turns in each round: a plain directory (`plain`), and mounts of volumes in mode
`sync` on two nodes of this machine, whose mirror has its log on the disk (`disk`, the default) or in
memory (`memory`). A row has the median of the rounds, and of each round's ratio to the plain
directory: of times for single operations (less is better), of operations a second for programs (more
is better). Nothing is replicated in the plain directory.

`scripts/bench-programs` builds and installs what is needed and starts this.
"""

import argparse
import contextlib
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

import run as programs
from run import HERE, Cluster, Failed, free_port, is_there, postgres_bin, until

OPS = ["write+fsync", "append+fdatasync", "create+fsync+rename", "msync-1", "msync-64", "read-4k", "read-1m",
       "write-4k", "write-1m"]
PLACES = ["plain", "disk", "memory"]


def output(args, **more):
    p = subprocess.run([str(a) for a in args], capture_output=True, text=True, check=False, timeout=300, **more)
    if p.returncode != 0:
        raise Failed(f"{args[0]}: exit code {p.returncode}: {p.stdout[-300:]} {p.stderr[-300:]}")
    return p.stdout


class InMemory(Cluster):
    """The mirror's log is in memory."""

    def __init__(self, mojim, home):
        self.more = '[node.b.log]\nmedium = "dram"\n'
        super().__init__(mojim, home, "mount")


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


def sqlite(mode):
    def rate(at, seconds):
        return python(f"""
            import sqlite3
            c = sqlite3.connect(at + '/db', isolation_level=None)
            c.execute('pragma journal_mode={mode}'); c.execute('pragma synchronous=full')
            c.execute('create table t (n integer primary key, x)')
            def op(n): c.execute('insert into t values (?, ?)', (n, 'x' * 100))
        """, at, seconds)

    return rate


def lmdb(at, seconds):
    return python("""
        import lmdb
        e = lmdb.open(at + '/lmdb', map_size=1 << 28, writemap=True)
        def op(n):
            with e.begin(write=True) as t: t.put(b'%08d' % n, b'x' * 100)
    """, at, seconds)


def kyoto(at, seconds):
    n = 20
    while True:
        begin = time.monotonic()
        output(["kctreetest", "tran", "-hard", "-it", "1", f"{at}/kc", n])
        took = time.monotonic() - begin
        (pathlib.Path(at) / "kc").unlink()
        if took > seconds / 2:
            return n / took
        n *= 4


def pgbench(at, seconds):
    def as_user(*args):
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *map(str, args)]

    shutil.chown(at, "postgres", "postgres")
    data, port, bin_ = f"{at}/data", free_port(), postgres_bin()
    output(as_user(bin_ / "initdb", "-D", data, "-A", "trust", "--no-sync"), cwd="/")
    server = subprocess.Popen(as_user(bin_ / "postgres", "-D", data, "-p", port, "-k", "/tmp"),
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    try:
        ready = as_user(bin_ / "pg_isready", "-h", "/tmp", "-p", port)
        until("postgres", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)
        at_it = ["-h", "/tmp", "-p", port, "postgres"]
        output(as_user(bin_ / "pgbench", "-q", "-i", "-s", "1", *at_it), cwd="/")
        said = output(as_user(bin_ / "pgbench", "-n", "-c", "4", "-T", int(seconds) + 2, *at_it), cwd="/")
        return float(re.search(r"tps = ([\d.]+)", said)[1])
    finally:
        server.send_signal(2)
        server.wait()


def redis(at, seconds):
    port = free_port()
    server = subprocess.Popen(["redis-server", "--port", str(port), "--dir", at, "--appendonly", "yes", "--appendfsync",
                               "always", "--save", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ping = ["redis-cli", "-p", str(port), "ping"]
        until("redis", lambda: subprocess.run(ping, capture_output=True, text=True, check=False).stdout == "PONG\n")
        n = int(2500 * seconds)
        said = output(["redis-benchmark", "-p", port, "-t", "set", "-c", "4", "-n", n, "-d", "100", "--csv"])
        return float(said.splitlines()[-1].split(",")[1].strip('"'))
    finally:
        server.kill()
        server.wait()


PROGRAMS = [
    ("SQLite, WAL, a row a commit", sqlite("wal"), []),
    ("SQLite, DELETE, a row a commit", sqlite("delete"), []),
    ("LMDB, MDB_WRITEMAP, a put a commit", lmdb, ["py:lmdb"]),
    ("Kyoto Cabinet, tree, tran -hard", kyoto, ["kctreetest"]),
    ("PostgreSQL, pgbench -c 4", pgbench, [str(postgres_bin() / "pgbench")]),
    ("Redis, AOF always, 4 clients", redis, ["redis-server", "redis-benchmark"]),
]


@contextlib.contextmanager
def places(mojim, home):
    """The directories, by name."""
    home.chmod(0o755)
    made = {name: home / name for name in PLACES}
    for d in made.values():
        d.mkdir()
        d.chmod(0o755)
    clusters = []
    try:
        clusters.append(Cluster(mojim, made["disk"], "mount"))
        clusters.append(InMemory(mojim, made["memory"]))
        yield {"plain": made["plain"], "disk": clusters[0].at, "memory": clusters[1].at}
    finally:
        for c in clusters:
            c.end()


def rounds(one, at, n):
    """`one` of each place's new directory, in turns; the values by place."""
    values = {name: [] for name in PLACES}
    for i in range(n):
        order = PLACES if i % 2 == 0 else PLACES[::-1]
        for name in order:
            d = at[name] / "w"
            d.mkdir()
            values[name].append(one(str(d)))
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
    a.add_argument("--json", action="store_true", help="an object for each row, on a line")
    args = a.parse_args()
    programs.before[:] = []
    with tempfile.TemporaryDirectory(prefix="mojim-bench-", dir=args.dir) as home, places(
        args.mojim, pathlib.Path(home)
    ) as at:
        if not args.json:
            print("| case | plain | sync, log on disk | sync, log in memory |\n|---|---|---|---|", flush=True)
        for name in OPS:
            if args.only in name:
                values = rounds(lambda d, n=name: [float(x) for x in output([args.ops, d, n, args.seconds]).split()], at, args.rounds)
                say(args, name, {p: [v[2] for v in values[p]] for p in PLACES}, "us", {p: [v[3] for v in values[p]] for p in PLACES})
        for name, rate, needs in PROGRAMS:
            if args.only not in name:
                continue
            lacks = [n for n in needs if not is_there(n)]
            if lacks:
                print(f"left out: {name}: no {', '.join(lacks)}", file=sys.stderr)
                continue
            say(args, name, rounds(lambda d, rate=rate: rate(d, args.seconds), at, args.rounds), "per_second")


def say(args, name, values, unit, p99=None):
    median = {p: statistics.median(v) for p, v in values.items()}
    ratio = {p: statistics.median(x / y for x, y in zip(values[p], values["plain"])) for p in PLACES}
    if args.json:
        for p in PLACES:
            row = {"bench": "programs", "case": name, "place": p, unit: round(median[p], 2), "ratio": round(ratio[p], 3), "rounds": args.rounds}
            if p99:
                row["p99_us"] = round(statistics.median(p99[p]), 2)
            print(json.dumps(row), flush=True)
        return
    mark = " µs" if unit == "us" else "/s"
    cells = [f"{median['plain']:.4g}{mark}"] + [f"{median[p]:.4g}{mark} ({ratio[p]:.2f})" for p in PLACES[1:]]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
