"""The to-do list of docs/tutorial/python.md, used wrongly: it says so, and its list stays as it was."""

import pathlib
import re
import subprocess
import sys

from conftest import TOP


def test_the_to_do_list_is_not_spoiled_by_wrong_use(config):
    page = (TOP / "docs/tutorial/python.md").read_text()
    (text,) = re.findall(r"```python file=todo\.py\n(.*?)```", page, re.DOTALL)
    assert text.count("\n") <= 30
    root = pathlib.Path(config).parent
    (root / "todo.py").write_text(text)

    def todo(*words):
        done = subprocess.run(
            [sys.executable, "todo.py", *words],
            cwd=root, capture_output=True, text=True, check=False, encoding="utf-8",
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout if done.returncode == 0 else done.stderr

    assert todo("a", "add", "one") == "0 [ ] one\n"
    # Two bytes a letter: the 200th byte is half of one.
    assert "200 bytes" in todo("a", "add", "x" + "é" * 100)
    for number in ("-1", "1", "9" * 150, "²"):
        assert "no such entry" in todo("a", "done", number), number
    for words in (("a",), ("a", "finish", "0")):
        assert "usage" in todo(*words), words
    long = "é" * 100
    assert todo("a", "add", long) == f"0 [ ] one\n1 [ ] {long}\n"
    todo("a", "done", "0")
    assert todo("a", "drop", "1") == todo("a", "list") == "0 [x] one\n"


def test_the_counter_of_the_readme_counts(config):
    """README shows examples/counter.py as it is: `structure.rs` of mojim-format sees to that."""
    for run in (1, 2):
        done = subprocess.run(
            [sys.executable, str(TOP / "examples/counter.py")],
            cwd=pathlib.Path(config).parent, capture_output=True, text=True, check=False,
        )
        assert done.stdout == f"run {run}\n", done.stderr
