"""Runs the map benchmark's program for every store, in rounds, and prints what came out.

Failure-atomic msync, Table 2. The stores take turns, each in a new directory and a
process of its own, in an order that rotates; so what else the machine does meanwhile
meets all of them. A store that has lost anything ends the run (see map.cpp).
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile

# Label, store, mode of the volume, and what an operation is when it returns.
ROWS = [
    ("mojim unreplicated", "mojim", "unreplicated", "durable"),
    ("mojim sync-flush", "mojim", "sync-flush", "durable, and on a second node"),
    ("mojim sync", "mojim", "sync", "in memory of two nodes"),
    ("leveldb", "leveldb", None, "durable"),
    ("rocksdb", "rocksdb", None, "durable"),
    ("sqlite wal", "sqlite-wal", None, "durable"),
    ("sqlite delete", "sqlite-delete", None, "durable"),
    ("lmdb writemap", "lmdb-writemap", None, "durable"),
    ("lmdb", "lmdb", None, "durable"),
    ("kyoto hash", "kyoto-hash", None, "durable"),
    ("kyoto tree", "kyoto-tree", None, "durable"),
    ("map and msync", "msync", None, "durable, not atomic"),
]
PHASES = ("insert", "replace", "delete")
# Whose threads share writes; with several threads the others are left out.
SHARING = ("mojim", "leveldb", "rocksdb")
BASE = "mojim unreplicated"


def volume(directory, memory, mode):
    """The text of a configuration with one volume of this mode, logs as in `mojim bench`."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    a, b = ("127.0.0.1:%d" % s.getsockname()[1] for s in held)
    for s in held:
        s.close()
    text = f'cluster = "bench"\n[volume.map]\nmode = "{mode}"\nprimary = "a"\n'
    if mode != "unreplicated":
        # As `mojim bench` has it: a machine under load is no lost mirror.
        text += 'mirror = "b"\nresend_timeout = "2s"\n'
    text += (
        f'[node.a]\naddress = "{a}"\ndirectory = "{directory}/a"\nring = "{memory}"\n'
        'log = { medium = "disk", size = "64MiB" }\n'
    )
    if mode != "unreplicated":
        text += (
            f'[node.b]\naddress = "{b}"\ndirectory = "{directory}/b"\nring = "{memory}"\n'
            f'log = {{ medium = "dram", path = "{memory}/b", size = "64MiB" }}\n'
        )
    return text


def run(options, store, mode, seed):
    """One store once: what the program said, and what was wrong, if anything."""
    directory = tempfile.mkdtemp(prefix="mojim-bench-map-", dir=options.dir)
    memory = tempfile.mkdtemp(prefix="mojim-bench-map-", dir="/dev/shm")
    nothing = subprocess.DEVNULL
    nodes = []
    try:
        config = os.path.join(directory, "mojim.toml")
        if mode is not None:
            with open(config, "w") as f:
                f.write(volume(directory, memory, mode))
            for name in "ab" if mode != "unreplicated" else "":
                command = [options.mojim, "node", "--config", config, "--name", name]
                nodes.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing))
        program = [options.program, store, directory]
        program += [str(n) for n in (options.keys, options.value, seed, options.threads)]
        done = subprocess.run(program, capture_output=True, text=True)
        if done.returncode != 0:
            return None, done.stderr.strip() or f"{store}: {done.returncode}"
        if nodes:
            verify = [options.mojim, "verify", "--config", config, "--volume", "map"]
            same = subprocess.run(verify, capture_output=True, text=True)
            if same.returncode != 0:
                return None, "the copies differ: " + same.stdout + same.stderr
        return json.loads(done.stdout), None
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def figures(all_runs):
    """A row for each label and phase. `slower` than BASE: in each round, by means and by
    medians, and of these the median over the rounds."""
    rows = []
    for label, store, _, promise in ROWS:
        if label not in all_runs:
            continue
        for phase in PHASES:
            rounds = [r[phase] for r in all_runs[label]]
            every = sorted(ns for r in rounds for ns in r)
            walls = [r[phase + "_all"] for r in all_runs[label]]
            rates = [len(r) / wall * 1e9 for r, wall in zip(rounds, walls)]
            means = [statistics.mean(r) for r in rounds]
            medians = [statistics.median(r) for r in rounds]
            row = {
                "bench": "map",
                "store": label,
                "phase": phase,
                "promise": promise,
                "mean_us": round(statistics.median(means) / 1e3, 1),
                "median_us": round(statistics.median(every) / 1e3, 1),
                "p99_us": round(every[len(every) * 99 // 100] / 1e3, 1),
                "per_second": round(statistics.median(rates)),
            }
            if BASE in all_runs:
                base = [r[phase] for r in all_runs[BASE]]
                of_means = [m / statistics.mean(b) for m, b in zip(means, base)]
                of_medians = [m / statistics.median(b) for m, b in zip(medians, base)]
                row["slower"] = round(statistics.median(of_means), 2)
                row["slower_by_medians"] = round(statistics.median(of_medians), 2)
            rows.append(row)
    return rows


def rates(rows, threads):
    """The rows of several threads as text: operations a second of all of them together."""
    print(f"{'':<18}", end="")
    for phase in PHASES:
        print(f" | {phase:<8}{'a second':>12}{'p99':>10}", end="")
    print()
    for first in rows[:: len(PHASES)]:
        print(f"{first['store']:<18}", end="")
        for r in (r for r in rows if r["store"] == first["store"]):
            print(f" | {r['per_second']:>20}{r['p99_us']:>10}", end="")
        print(" |", first["promise"])
    print(f"{threads} threads; p99 in microseconds.")


def table(rows):
    """The rows as text: a line for each store."""
    print(f"{'':<18}", end="")
    for phase in PHASES:
        print(f" | {phase:<8}{'mean':>7}{'times':>6}{'median':>8}{'times':>6}{'p99':>10}", end="")
    print()
    for first in rows[:: len(PHASES)]:
        print(f"{first['store']:<18}", end="")
        for r in (r for r in rows if r["store"] == first["store"]):
            mean, median = r.get("slower", ""), r.get("slower_by_medians", "")
            print(f" | {r['mean_us']:>15}{mean:>6}{r['median_us']:>8}{median:>6}", end="")
            print(f"{r['p99_us']:>10}", end="")
        print(" |", first["promise"])
    print(f"Microseconds an operation; times: that of {BASE}, by rounds.")


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench-map", description=__doc__)
    parser.add_argument("--program", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--mojim", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--value", type=int, default=1024, help="bytes")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="each with keys of its own; a map each, or all in one database (%s)" % ", ".join(SHARING),
    )
    parser.add_argument("--stores", help="some of: " + ", ".join(r[0] for r in ROWS))
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    names = options.stores and [s.strip() for s in options.stores.split(",")]
    rows = [r for r in ROWS if options.threads == 1 or r[1] in SHARING]
    chosen = [r for r in rows if not names or r[0] in names]
    if len(chosen) != len(names or rows) or min(options.rounds, options.keys, options.threads) < 1:
        parser.error("no such store (for so many threads), or no rounds, keys or threads")
    all_runs = {r[0]: [] for r in chosen}
    for n in range(options.rounds):
        for i in range(len(chosen)):
            label, store, mode, _ = chosen[(i + n) % len(chosen)]
            result, wrong = run(options, store, mode, n + 1)
            if wrong is not None:
                sys.exit(f"{label}: {wrong}")
            all_runs[label].append(result)
    rows = figures(all_runs)
    if options.json:
        for row in rows:
            print(json.dumps(row))
    elif options.threads > 1:
        rates(rows, options.threads)
    else:
        table(rows)


main()
