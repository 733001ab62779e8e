"""An 8-byte commit in Python beside the same in C.

    scripts/python bindings/python/bench.py [--json] [--rounds N]

on a volume in memory (log on tmpfs), unreplicated. Rounds of C and of each way in Python follow
each other; a figure is the median of the rounds, the ratio that of the medians. MOJIM_LIBRARY
says which libmojim.so (of a release build, to mean anything).
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import mojim

TOP = pathlib.Path(__file__).resolve().parents[2]
#: So many in a round: less than a scheduler's slice.
COMMITS = 100

C = r"""
#include <mojim.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
/* At each line of standard input: so many commits, and how many ns one took. */
int main(int argc, char **argv) {
    mojim_t *m = mojim_attach(argv[1], "a", NULL);
    long *n = m ? mojim_map(m, "c", 4096, MOJIM_CREATE | MAP_ATOMIC) : MAP_FAILED;
    if (n == MAP_FAILED)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    int commits = atoi(argv[argc - 1]);
    while (getchar() != EOF) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < commits; i++) {
            *n += 1;
            if (mojim_msync(n, sizeof *n, MS_SYNC) != 0)
                return 1;
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        printf("%f\n", ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / commits);
        fflush(stdout);
    }
    return 0;
}
"""


def volume_in(root):
    """A volume in memory; its configuration."""
    root.mkdir()
    (root / "node").mkdir()
    (root / "ring").mkdir()
    config = root / "mojim.toml"
    config.write_text(
        f"""cluster = "bench"
[volume.v]
mode = "unreplicated"
primary = "a"
[node.a]
address = "127.0.0.1:7401"
directory = "{root}/node"
ring = "{root}/ring"
log = {{ medium = "disk", size = "64MiB" }}
"""
    )
    return config


def ways(volume):
    """The ways to commit 8 bytes, by name."""
    array = volume.array("python", "i8", 512)
    region = volume.map("python")
    view = region.view().cast("q")
    one, item = array[:1], view[:1]

    def msync_of_an_array():
        for _ in range(COMMITS):
            one[0] += 1
            mojim.msync(one)

    def msync_of_a_slice():
        for _ in range(COMMITS):
            array[0] += 1
            mojim.msync(array[:1])

    def msync_of_a_memoryview():
        for _ in range(COMMITS):
            item[0] += 1
            mojim.msync(item)

    def region_sync():
        for _ in range(COMMITS):
            view[0] += 1
            region.sync(0, 8)

    def atomic():
        for _ in range(COMMITS):
            with volume.atomic(one):
                one[0] += 1

    return {
        "region.sync(0, 8)": region_sync,
        "mojim.msync(memoryview)": msync_of_a_memoryview,
        "mojim.msync(array)": msync_of_an_array,
        "mojim.msync(array[:1])": msync_of_a_slice,
        "with volume.atomic(array)": atomic,
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--rounds", type=int, default=401)
    given = arguments.parse_args()
    root = pathlib.Path(tempfile.mkdtemp(prefix="mojim-bench-", dir="/dev/shm"))
    library = pathlib.Path(os.environ["MOJIM_LIBRARY"]).resolve().parent
    try:
        (root / "twin.c").write_text(C)
        subprocess.run(
            ["cc", "-O2", root / "twin.c", f"-I{TOP}/include", f"-L{library}", "-lmojim",
             f"-Wl,-rpath,{library}", "-o", root / "twin"],
            check=True,
        )
        twin = subprocess.Popen(
            [root / "twin", volume_in(root / "c"), str(COMMITS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        with mojim.attach(volume_in(root / "python"), "a") as volume:
            figures = run(twin, ways(volume), given.rounds)
        twin.stdin.close()
        twin.wait()
    finally:
        shutil.rmtree(root)
    medians = {name: statistics.median(all) for name, all in figures.items()}
    ratios = {name: ns / medians["C"] for name, ns in medians.items()}
    if given.json:
        result = {"commit_ns": medians, "ratio_to_c": ratios, "rounds": given.rounds}
        print(json.dumps(result, indent=1))
    else:
        for name, ns in medians.items():
            print(f"{name:28} {ns:8.0f} ns  {ratios[name]:5.2f}")


def run(twin, all_ways, rounds):
    figures = {"C": [], **{name: [] for name in all_ways}}
    for _ in range(rounds):
        twin.stdin.write("\n")
        twin.stdin.flush()
        figures["C"].append(float(twin.stdout.readline()))
        for name, way in all_ways.items():
            begin = time.perf_counter_ns()
            way()
            figures[name].append((time.perf_counter_ns() - begin) / COMMITS)
    return figures


if __name__ == "__main__":
    sys.exit(main())
