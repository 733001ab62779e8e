"""Which libmojim.so the package takes."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import mojim

from conftest import Program

# The files of all libraries of Mojim that are in the process.
LOADED = """
names = {line.split(None, 5)[-1].strip() for line in open('/proc/self/maps') if '/' in line}
print(sorted(n for n in names if os.path.basename(n).startswith('libmojim.so')))
"""


@pytest.fixture
def installed(tmp_path):
    """The package with a library of its own, as pip installs it, and an environment for it."""
    package = tmp_path / "site/mojim"
    shutil.copytree(pathlib.Path(mojim.__file__).parent, package)
    shutil.copy(os.environ["MOJIM_LIBRARY"], package / "libmojim.so")
    environment = {k: v for k, v in os.environ.items() if k != "MOJIM_LIBRARY"}
    environment["PYTHONPATH"] = str(package.parent)
    return environment, str(package / "libmojim.so")


def run(command, environment):
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "how", ["preloaded", "opened by another module", "its own", "its own beside one not loaded"]
)
def test_a_process_has_one_library(config, installed, how):
    """The package loaded its own beside the library of `mojim run --preload`. Each had volumes of
    its own, and neither committed what the other one had mapped. Later the import ended the process
    where `LD_LIBRARY_PATH` leads to a library that is not loaded."""
    environment, own = installed
    loaded = str(pathlib.Path(os.environ["MOJIM_LIBRARY"]).resolve())
    opened = f"import ctypes\nctypes.CDLL({loaded!r})\n"
    if how == "preloaded":
        environment["LD_PRELOAD"] = loaded
    if how == "its own beside one not loaded":
        environment["LD_LIBRARY_PATH"] = os.path.dirname(loaded)
    [*python, text] = Program(config).command(LOADED)
    if how == "opened by another module":
        text = opened + text
    done = run([*python, text], environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([own if how.startswith("its own") else loaded])


def test_fsync_under_preload_commits_what_the_package_mapped(config, installed):
    """The preloaded library did not know the package's memory, and its fsync committed nothing."""
    environment, _ = installed
    beside = pathlib.Path(os.environ["MOJIM_LIBRARY"]).resolve().parent
    text = """
v = mojim.join(config, 'a')
a = v.map('f', 4096).view().cast('q')
with open(os.path.join(v.directory, 'f'), 'rb') as f:
    a[0] += 1
    os.fsync(f.fileno())
    os.kill(os.getpid(), 9)
"""
    command = [beside / "mojim", "run", "--config", config, "--name", "a", "--preload", "--"]
    done = run([*command, *Program(config).command(text)], environment)
    assert done.returncode == 128 + 9, done.stderr
    done = Program(config)("v = mojim.attach(config, 'a')\nprint(v.map('f')[0])\n")
    assert done.stdout == "1\n"


def test_an_older_library_is_refused(installed, tmp_path):
    """It was found out by the first call of the function that was not there."""
    environment, _ = installed
    older = tmp_path / "libmojim.so"
    source = 'const char *mojim_version(void) { return "0.0.1"; }'
    compiler = ["cc", "-shared", "-Wl,-soname,libmojim.so", "-x", "c", "-", "-o", older]
    subprocess.run(compiler, input=source, text=True, check=True)
    done = run([sys.executable, "-c", "import mojim"], dict(environment, LD_PRELOAD=str(older)))
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: {older} is older than this package: it has no "), said
