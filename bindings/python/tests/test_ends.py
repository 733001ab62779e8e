"""How processes end: exits, forks, kills, interrupts."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import mojim

# The same without and with NumPy, which takes a while to import.
ATTACH = "v = mojim.attach(config, 'a')\na = v.map('f', 4096).view().cast('q')\n"
ARRAY = "v = mojim.attach(config, 'a')\na = v.array('f', 'i8', 512)\n"


def value(program):
    return int(program(ATTACH + "print(a[0])\n").stdout)


def test_an_exit_with_live_arrays(program):
    ends = ["", "sys.exit()", "os._exit(0)", "import gc; gc.disable()"]
    for attach, end in [(ARRAY, "c = a[3:].view('u1')"), *((ATTACH, e) for e in ends)]:
        program(attach + f"a[0] = 7\nmojim.msync(a[0:1])\na[1] = 8\nb = [a]; b.append(b)\n{end}\n")
    done = program("import atexit\n" + ATTACH + "assert a[0] == 7 and a[1] == 0\n")
    assert done.stderr == ""


def test_handlers_at_exit_can_still_commit(program):
    """Also one that was there before mojim was imported."""
    text = """
        import subprocess, textwrap
        code = textwrap.dedent('''
            import atexit
            def last():
                a[0] += 1
                mojim.msync(a[0:1])
            atexit.register(last)
            import mojim
            atexit.register(last)
            v = mojim.attach(%r, 'a')
            a = v.map('f', 4096).view().cast('q')
            a[0] = 5
        ''' % config)
        done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    """
    program(textwrap.dedent(text))
    assert value(program) == 7


def test_the_end_in_the_middle_of_a_block(program):
    for end in ("sys.exit(3)", "raise SystemExit(3)"):
        program(ATTACH + f"with v.atomic():\n    a[0] = 9\n    {end}\n", status=3)
    program(ATTACH + "t = v.atomic(a)\nt.__enter__()\na[0] = 9\n")
    program(ATTACH + "def g():\n    with v.atomic(a):\n        a[0] = 9\n        yield\n"
            "i = g()\nnext(i)\n")
    assert value(program) == 0


def test_threads_that_commit_while_the_interpreter_ends(program):
    program(
        "import threading, time\n" + ATTACH + "def work():\n"
        "    while True:\n        a[1] += 1\n        mojim.msync(a[1:2])\n"
        "for _ in range(3):\n    threading.Thread(target=work, daemon=True).start()\n"
        "while a[1] < 100: time.sleep(0)\n"
    )
    assert int(program(ATTACH + "print(a[1])\n").stdout) >= 100


def test_a_child_made_by_fork(program):
    """It can read; its commits fail; its end ends nothing."""
    program(
        ATTACH + """
a[0] = 1
mojim.msync(a[0:1])
with v.atomic(a):
    child = os.fork()
    if child == 0:
        try:
            assert a[0] == 1 and not v.attached
            a[0] = 5
            for call in (lambda: mojim.msync(a), v.sync, lambda: v.map('g', 8)):
                try:
                    call()
                except mojim.Error as e:
                    assert e.errno == 95, e
                else:
                    raise AssertionError
            v.detach()
            try:
                mojim.attach(config, 'a')
            except mojim.Error as e:
                os._exit(0)
            os._exit(2)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    a[0] = 2
child = os.fork()
if child == 0:
    with v: pass
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
a[0] += 1
mojim.msync(a[0:1])
"""
    )
    assert value(program) == 3


def test_multiprocessing(program):
    program(
        """
import multiprocessing, numpy
def total(a):
    return int(a.sum())
def stores(a):
    a[0] = 99
if __name__ == '__main__':
    v = mojim.attach(config, 'a')
    a = v.array('f', 'i8', 512)
    m = mojim.memmap('g', 'i8', 'w+', shape=16)
    a[:] = 1
    m[:] = 2
    context = multiprocessing.get_context('fork')
    with context.Pool(2) as pool:
        assert pool.map(total, [a, a[:5], m]) == [512, 5, 32]
        pool.map(stores, [a, m])
    assert a[0] == 1 and m[0] == 2
    mojim.msync(a)
"""
    )
    assert value(program) == 1


def test_kills_leave_whole_blocks(config, program):
    """Killed at random moments: both ends of a block are there, or neither, and all that was
    said to be committed."""
    seed = int(os.environ.get("PYTHON_SEED", random.randrange(1 << 32)))
    print("PYTHON_SEED", seed)
    rng = random.Random(seed)
    for how in ("", "a[0:1], a[511:512]"):
        acknowledged = int(program(ATTACH + "print(a[0])\n").stdout)
        for _ in range(int(os.environ.get("PYTHON_KILLS", 2))):
            child = program.start(
                ATTACH + f"assert a[0] == a[511]\nwhile True:\n    with v.atomic({how}):\n"
                "        a[0] += 1\n        a[511] += 1\n"
                "    print(a[0], flush=True)\n"
            )
            for line in child.stdout:
                if rng.random() < 0.05:
                    time.sleep(rng.random() / 1000)
                    child.send_signal(signal.SIGKILL)
                if line.endswith("\n"):
                    acknowledged = int(line)
            child.stdout.close()
            assert child.wait() == -signal.SIGKILL
            found = program(ATTACH + "print(a[0], a[511])\n").stdout.split()
            assert found[0] == found[1] and int(found[0]) - acknowledged in (0, 1), found


def test_a_checker_that_sees_half_a_block(program):
    """What the test above would see: two sync points in place of one."""
    child = program.start(
        ATTACH + "a[0] += 1\nmojim.msync(a[0:1])\nprint(flush=True)\nos.kill(os.getpid(), 9)\n"
        "a[511] += 1\nmojim.msync(a[511:512])\n"
    )
    child.communicate()
    found = program(ATTACH + "print(a[0], a[511])\n").stdout.split()
    assert found[0] != found[1]


class Interrupts:
    """Raises KeyboardInterrupt at the n-th step of what runs (each of Python's lines and calls
    counts), as a signal that comes then would."""

    def __init__(self, at):
        self.left = at

    def trace(self, frame, event, _):
        if "mojim" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        self.left -= 1
        if self.left == 0:
            self.interrupt()
        return self.trace

    def interrupt(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_an_interrupt_anywhere_in_a_block(volume, whole, fails):
    """The stores are committed or undone, the lock is free, and the next block works, wherever
    in our code an interrupt comes, and also while its traceback is kept."""
    a = volume.array("f", "i8", 4)
    b = volume.array("g", "i8", 4)
    kept = []
    interrupted = ends = 0
    for at in range(1, 100000):
        before = int(a[0])
        interrupts = Interrupts(at)
        sys.settrace(interrupts.trace)
        try:
            with volume.atomic(*(() if whole else (a, b[1:2]))):
                a[0] += 1
                b[1] += 1
                if fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        except KeyboardInterrupt as e:
            interrupted += 1
            kept[:] = [e]
        finally:
            sys.settrace(None)
        assert a[0] == b[1] and a[0] - before in ((0,) if fails else (0, 1)), at
        assert volume._block is None and not volume._lock.locked() and not volume._inside, at
        if at % 16 == 0:
            volume.rollback()
            assert a[0] == b[1] and a[0] - before in ((0,) if fails else (0, 1)), at
        if interrupts.left > 0:
            ends += 1
            break
    assert interrupted > 50 and ends == 1
    with volume.atomic():
        a[0] = b[1] = 1000
    volume.rollback()
    assert a[0] == 1000


@pytest.mark.parametrize("call", ["sync", "atomic"])
def test_a_signal_handler_waits_for_nothing_that_it_interrupts(volume, call):
    """Wherever in our code it comes, what it calls is done, or is refused."""
    a = volume.array("f", "i8", 4)
    ends = []

    class Handler(Interrupts):
        def interrupt(self):
            try:
                volume.sync()
                with volume.atomic(a[3:]):
                    a[3] += 1
                ends.append("done")
            except mojim.Busy:
                ends.append("refused")

    for at in range(1, 100000, 2):
        handler = Handler(at)
        sys.settrace(handler.trace)
        try:
            if call == "sync":
                volume.sync()
            else:
                with volume.atomic(a[:2]):
                    a[:2] += 1
        finally:
            sys.settrace(None)
        assert volume._block is None and not volume._lock.locked() and not volume._inside, at
        if handler.left > 0:
            break
    assert {"done", "refused"} == set(ends)
    volume.rollback()
    assert a[0] == a[1] and a[3] == ends.count("done")


def test_a_detach_that_fails_leaves_no_address(program):
    """The disk is full when the regions are gone already: what touches them gets an error, and no
    SIGSEGV, and the volume can be attached again."""
    program(
        """
import resource
v = mojim.attach(config, 'a')
r = v.map('f', 1 << 20)
r[0:4] = b'kept'
r[1000000:1000004] = b'kept'
r.sync()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
try:
    v.detach()
except mojim.Error as e:
    print(e)
else:
    sys.exit('no error')
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
def refused(call):
    try:
        call()
    except (ValueError, mojim.Error):
        return
    sys.exit('not refused')
refused(lambda: r[0:4])
refused(lambda: r.view())
refused(lambda: v.array('f')[0])
refused(v.sync)
assert not v.attached
v.detach()
"""
    )
    program("v = mojim.attach(config, 'a')\nassert v.map('f')[0:4] == b'kept'\n")


@pytest.mark.parametrize("several", [False, True])
def test_an_interrupt_of_a_commit_that_is_in_doubt(volume, monkeypatch, several):
    """The mirror does not answer, and an interrupt comes, wherever: the stores are not undone."""
    import types

    import mojim._ranges
    from mojim._library import ffi

    a = volume.array("f", "i8", 4)
    calls = []

    def waits(*_):
        calls.append(1)
        ffi.errno = 110
        return -1

    monkeypatch.setattr(mojim._ranges, "_msync", waits)
    monkeypatch.setattr(mojim._ranges, "lib", types.SimpleNamespace(
        gmsync=waits, mojim_last_error=mojim._ranges.lib.mojim_last_error))
    seen = set()
    for at in range(1, 100000):
        a[:] = 0
        calls.clear()
        interrupts = Interrupts(at)
        sys.settrace(interrupts.trace)
        try:
            with volume.atomic(*((a[0:1], a[2:3]) if several else (a,))):
                a[0] = 1
        except (KeyboardInterrupt, mojim.TimedOut) as e:
            seen.add((type(e), len(calls)))
        finally:
            sys.settrace(None)
        assert a[0] == len(calls), at
        assert volume._block is None and not volume._lock.locked() and not volume._inside, at
        if interrupts.left > 0:
            break
    assert seen == {(KeyboardInterrupt, 0), (KeyboardInterrupt, 1), (mojim.TimedOut, 1)}


@pytest.mark.parametrize("call", ["msync", "gmsync", "sync", "region", "block", "wait"])
def test_an_interrupt_of_a_call_that_is_in_doubt_tells_of_it(volume, monkeypatch, call):
    """Python raises what comes while the library waits at its next step, before our code can
    raise the library's error: the interrupt has that as its cause."""
    import mojim._ranges
    import mojim._volume
    from mojim._library import ffi, lib

    a = volume.array("f", "i8", 4)
    calls = []

    class Waits:
        def __getattr__(self, name):
            waits = ("mojim_msync", "gmsync", "mojim_wait")
            return self.wait if name in waits else getattr(lib, name)

        def wait(self, *_):
            calls.append(1)
            ffi.errno = 110
            return -1

    class Behind(Interrupts):
        """At the first step behind the call."""

        def trace(self, frame, event, _):
            if calls:
                self.left = 1
            return super().trace(frame, event, _)

    def block():
        with volume.atomic(a[:1]):
            a[0] = 1

    make = {
        "msync": lambda: mojim.msync(a), "gmsync": lambda: mojim.gmsync(a[:1], a[2:]),
        "sync": volume.sync, "region": volume.map("f").sync, "block": block,
        "wait": lambda: volume.wait(1),
    }[call]
    with monkeypatch.context() as patch:
        patch.setattr(mojim._ranges, "_msync", Waits().wait)
        patch.setattr(mojim._ranges, "lib", Waits())
        patch.setattr(mojim._volume, "lib", Waits())
        sys.settrace(Behind(1 << 60).trace)
        try:
            with pytest.raises(KeyboardInterrupt) as e:
                make()
        finally:
            sys.settrace(None)
    assert calls == [1] and isinstance(e.value.__cause__, mojim.TimedOut)
    assert a[0] == (call == "block") and not volume._lock.locked() and not volume._inside


def test_a_with_that_ends_in_doubt_tells_once(config, monkeypatch):
    """The mirror does not answer, and the detach waits for it in vain, too: one traceback."""
    import mojim._volume
    from mojim._library import ffi, lib

    gone = set()

    class Late:
        def __getattr__(self, name):
            return getattr(lib, name)

        def mojim_detach(self, handle):
            assert lib.mojim_detach(handle) == 0
            gone.add(handle)
            ffi.errno = 110
            return -1

        def mojim_usable(self, handle):
            return 0 if handle in gone else lib.mojim_usable(handle)

    monkeypatch.setattr(mojim._volume, "lib", Late())
    doubt = mojim.TimedOut(110, "the body's")
    interrupt = KeyboardInterrupt()
    interrupt.__cause__ = doubt
    for error in (doubt, interrupt):
        with pytest.raises(type(error)) as e, mojim.attach(config, "a") as volume:
            a = volume.array("f", "i8", 4)
            raise error
        assert e.value is error and not volume.attached
        assert not a.any()
        # The next volume may lie where this one lay.
        gone.clear()
    # After another end of the body it is news.
    with pytest.raises(mojim.TimedOut) as e, mojim.attach(config, "a") as volume:
        a = volume.array("f", "i8", 4)
        raise RuntimeError
    assert isinstance(e.value.__context__, RuntimeError)


def test_an_interrupt_of_attach_map_and_detach(config):
    """Nothing is lost that nobody could end."""
    interrupted = 0
    for at in range(random.randrange(1, 3), 100000, 2):
        interrupts = Interrupts(at)
        sys.settrace(interrupts.trace)
        try:
            v = mojim.attach(config, "a")
            v.map("f", 8)
            v.detach()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        if at % 3 == 0 or interrupts.left > 0:
            with mojim.attach(config, "a") as v:
                v.map("f", 8)
        if interrupts.left > 0:
            break
    assert interrupted > 25


def test_a_real_interrupt(program):
    """SIGINT while a program commits in a loop: it ends with the traceback, and the file is
    whole. Where the tests are started in the background SIGINT is ignored from the start."""
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    for _ in range(3):
        child = subprocess.Popen(
            program.command(
                heard + ATTACH + "try:\n    print(flush=True)\n    while True:\n"
                "        with v.atomic(a[0:1], a[5:6]):\n"
                "            a[0] += 1\n            a[5] += 1\n"
                "except KeyboardInterrupt:\n"
                "    with v.atomic():\n        a[7] += 1\n    assert a[0] == a[5]\n"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        child.stdout.readline()
        time.sleep(random.random() / 50)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        found = program(ATTACH + "print(*a[:8])\n").stdout.split()
        assert found[0] == found[5]
    assert found[7] == "3"


def test_a_cell_that_runs_again(program):
    """As a notebook runs it: without a file, several times, and after an error in it."""
    program(
        """
cell = compile('''
v = mojim.attach(config, 'a')
a = v.array('f', 'i8', 8)
with v.atomic():
    a[0] += 1
    if a[0] == 3:
        1 / 0
''', '<cell>', 'exec')
names = {'mojim': mojim, 'config': config}
for n in (1, 2, 2, 2):
    try:
        exec(cell, names)
    except ZeroDivisionError as e:
        names['kept'] = e
    assert names['a'][0] == n, n
"""
    )


def test_docstrings(config):
    """Every example of the documentation, in a volume of its own."""
    import doctest
    import importlib

    tried = 0
    for name in ("mojim", "mojim._volume", "mojim._ranges", "mojim._memmap", "mojim._atomic"):
        module = importlib.import_module(name)
        with mojim.attach(config, "a") as volume:
            known = {"mojim": mojim, "config": config, "volume": volume}
            done = doctest.testmod(module, extraglobs=known, raise_on_error=False)
        assert done.failed == 0
        tried += done.attempted
    assert tried > 10


def test_types():
    """mypy finds nothing in the package, and the types of a program that uses it."""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental"],
        cwd=root, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
