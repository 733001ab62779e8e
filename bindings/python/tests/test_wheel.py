"""The wheel: built from this source, installed into a directory, and used from there alone."""

import os
import subprocess
import sys
import zipfile

from conftest import TOP, Program


def test_the_wheel_works_by_itself(config, tmp_path):
    library = tmp_path / "libmojim.so"
    subprocess.run(["strip", "-o", library, os.environ["MOJIM_LIBRARY"]], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [*pip, *build, TOP / "bindings/python"],
        env=dict(environment, MOJIM_LIBRARY=str(library)), check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    version = next(
        line.split('"')[1]
        for line in (TOP / "Cargo.toml").read_text().splitlines()
        if line.startswith("version")
    )
    assert wheel.name == f"mojim-{version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        z.extractall(tmp_path / "site")
    assert {"mojim/libmojim.so", "mojim/py.typed", "mojim/__init__.py"} <= names
    del environment["MOJIM_LIBRARY"]
    done = subprocess.run(
        Program(config).command(
            "v = mojim.attach(config, 'a')\n"
            "a = v.array('f', 'i8', 1)\n"
            "with v.atomic():\n    a[0] += 1\n"
            "print(mojim.__version__, mojim.__file__)\n"
        ),
        env=dict(environment, PYTHONPATH=str(tmp_path / "site")),
        capture_output=True, text=True, check=True,
    )
    assert done.stdout.split() == [version, str(tmp_path / "site/mojim/__init__.py")]
