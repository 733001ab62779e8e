#!/usr/bin/env python3
"""Programs that know nothing of Mojim, on a volume.

Two nodes on loopback. The program's way to the volume is the mount on the first (`mount`), or each
of its commands runs under `mojim run`, in the volume's directory (`run`). It works in a directory of
its own and says which of its operations are acknowledged: a commit that returned, a reply that
came. Then the mount and the node are killed with SIGKILL, with the program still at work; the other
node is promoted; and what was acknowledged is looked for there, with the program's own check of its
files. Suites run to their end, and are judged by their own verdict; then the volume's copies are
compared.

`scripts/programs` installs the programs and starts this. It writes docs/reference/programs.md with --write.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading

from cluster import HERE, LIMIT, Cluster, Failed, run, until
from kinds import PROGRAMS, is_there

# Each registers its programs, in the order of the table.
import embedded  # noqa: F401
import servers  # noqa: F401
import suites  # noqa: F401


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
        # One that stands still is a failure, too.
        watch = threading.Timer(LIMIT, p.kill)
        watch.start()
        try:
            for line in p.stdout:
                acked = int(line.split()[-1]) if line.strip() else acked
                if acked >= least:
                    break
            if acked < least:
                raise Failed(f"ended after {acked}: {p.stderr.read()[-400:]}")
            c.fail_over()
        finally:
            watch.cancel()
            p.kill()
        # What was acknowledged before the node was lost, and lies in the pipe.
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
        else:
            # Of this file system only: others may stand still, by tests of what becomes of them.
            run(["sync", "-f", c.at])
        c.equal()
        return what, "passed, the copies are equal"


def one_row(cls, way, args):
    """A program's row of the table."""
    row = {"program": cls.name, "version": "", "way": way, "what": "", "result": ""}
    lacks = [n for n in cls.needs if not is_there(n)]
    if lacks:
        row["result"] = "skipped: no " + ", ".join(n.removeprefix("fetched:") for n in lacks)
        return row
    try:
        row["version"] = str(cls.version()).strip()
        how = killed if cls.way == "killed" else suite
        # Slow ones need not do so many.
        least = min(args.least, getattr(cls, "least", args.least))
        what, row["result"] = how(cls, args.mojim, least, way)
        row["what"] = f"{what} {cls.acknowledged}, then SIGKILL of mount and node, takeover" if how is killed else what
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


if __name__ == "__main__":
    sys.exit(main())
