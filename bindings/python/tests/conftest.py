"""What the tests share: a volume in a directory of its own, and programs that use one."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

TOP = pathlib.Path(__file__).parents[3]


def make(root, log="1MiB"):
    """An unreplicated volume `v` on a node `a`, in this directory; its configuration file."""
    for d in ("node", "ring"):
        (root / d).mkdir()
    config = root / "mojim.toml"
    config.write_text(
        f"""cluster = "python"
[volume.v]
mode = "unreplicated"
primary = "a"
[node.a]
address = "127.0.0.1:7401"
directory = "{root}/node"
ring = "{root}/ring"
log = {{ medium = "disk", size = "{log}" }}
"""
    )
    return str(config)


@pytest.fixture
def config():
    """The configuration file of a new volume."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="mojim-python-")).resolve()
    yield make(root)
    shutil.rmtree(root)


@pytest.fixture
def volume(config):
    """A new volume, attached; detached after the test, unless that did."""
    import mojim

    with mojim.attach(config, "a") as v:
        yield v


class Program:
    """Runs Python programs in processes of their own, for which `config` is set."""

    def __init__(self, config):
        self.config = config

    def command(self, text):
        head = f"import mojim, os, sys\nconfig = {self.config!r}\n"
        return [sys.executable, "-c", head + text]

    def __call__(self, text, status=0):
        done = subprocess.run(
            self.command(text), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status, f"{done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def start(self, text):
        return subprocess.Popen(self.command(text), stdout=subprocess.PIPE, text=True)


@pytest.fixture
def program(config):
    return Program(config)
