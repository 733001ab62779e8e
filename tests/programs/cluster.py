"""The commands that programs are started by, and the cluster whose volume they have."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
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

    # The end of the configuration, where `{rings}` is a directory in memory.
    more = ""

    def __init__(self, mojim, home, way, options=()):
        self.mojim, self.home, self.way, self.options = mojim, home, way, options
        self.config = home / "mojim.toml"
        # The nodes' rings, which outlive them.
        self.rings = tempfile.mkdtemp(prefix="mojim-programs-", dir="/dev/shm")
        text = 'cluster = "programs"\n[volume.v]\nprimary = "a"\nmirror = "b"\nresend_timeout = "5s"\n'
        for name in "ab":
            text += f'[node.{name}]\naddress = "127.0.0.1:{free_port()}"\ndirectory = "{home}/{name}"\nring = "{self.rings}"\n'
        self.config.write_text(text + self.more.replace("{rings}", self.rings))
        self.nodes = {name: self.start("node", name) for name in "ab"}
        self.mounted = None
        self.serve("a")

    def start(self, word, name, *args):
        said = open(self.home / f"{word}-{name}.txt", "a")
        args = [*self.command(word, name), "--config", self.config, "--name", name, *args]
        p = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=said, text=True)
        if not p.stdout.readline():
            p.wait()
            raise Failed((self.home / f"{word}-{name}.txt").read_text()[-400:])
        return p

    def command(self, word, _name):
        return [self.mojim, word]

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
        """The process behind `mojim run` that serves the mount. It has the same words as its parent, which watches
        it: to kill that one leaves the mount as it is."""
        found = {}
        for p in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (p / "cmdline").read_bytes().split(b"\0")
                if b"--while-used" in words and str(self.config).encode() in words:
                    parent = (p / "stat").read_text().rpartition(")")[2].split()[1]
                    found[int(p.name)] = int(parent)
        served = [pid for pid, parent in found.items() if parent in found]
        return next(iter(served or found), None)

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
        shutil.rmtree(self.rings, ignore_errors=True)
