"""Atomic blocks: committed whole or undone, whatever ends them."""

import contextlib
import threading

import numpy as np
import pytest

import mojim


def committed(volume, file="f", dtype="i8"):
    """What a rollback would bring back, as another process would see it."""
    before = volume.array(file, dtype).copy()
    volume.rollback()
    found = volume.array(file, dtype).copy()
    volume.array(file, dtype)[:] = before
    return found


class Trouble(Exception):
    pass


@pytest.fixture(params=["everything", "arrays"])
def block(request, volume):
    """A block that is given nothing, or the array."""

    def make(*arrays):
        return volume.atomic(*(arrays if request.param == "arrays" else ()))

    return make


def test_a_block_commits(volume, block):
    a = volume.array("f", "i8", 16)
    with block(a):
        a[:] = np.arange(16)
    assert committed(volume).tolist() == list(range(16))


def test_an_exception_undoes(volume, block):
    a = volume.array("f", "i8", 16)
    with block(a):
        a[:] = 1
    for work in (
        lambda: a.fill(9),
        lambda: np.add(a, 5, out=a),
        lambda: np.multiply.at(a, [0, 0, 3], 7),
        lambda: a.sort(),
        lambda: a[::3].__setitem__(slice(None), 4),
        lambda: a.view("u1").__setitem__(5, 255),
    ):
        with pytest.raises(Trouble), block(a):
            work()
            raise Trouble
        assert (a == 1).all()
        assert (committed(volume) == 1).all()


def test_exact_arrays_leave_others_alone(volume):
    a = volume.array("f", "i8", 16)
    with volume.atomic(a[2:4]):
        a[:] = 1
    assert committed(volume).tolist() == [0, 0, 1, 1] + [0] * 12
    with volume.atomic(a[4::6]):
        a[4::6] = 1
    assert committed(volume).tolist() == [0, 0, 1, 1, 1] + [0] * 5 + [1] + [0] * 5
    with pytest.raises(Trouble), volume.atomic(a[0:2], a[8::2]):
        a[:] = 5
        raise Trouble
    assert a.tolist() == [1, 1] + [5] * 6 + [1, 5] * 4


@pytest.mark.parametrize("sync", ["atomic", "msync", "gmsync"])
def test_the_bytes_between_an_arrays_are_not_committed(volume, sync):
    """Of views of every kind: what they show, and no other byte."""
    whole = volume.array("f", "i2", (4, 5, 6))
    shown = np.zeros_like(whole)
    views = [
        lambda a: a[::2], lambda a: a[1:3, ::-2, 1:4], lambda a: a.T[::-1, 2], lambda a: a[..., 3],
        lambda a: a[:, :0], lambda a: a[3:, 1:2, ::5], lambda a: a.view("i1")[..., ::3],
        lambda a: np.broadcast_to(a[2], (9, 5, 6))[:, ::2],
        lambda a: np.lib.stride_tricks.sliding_window_view(a[0, :, 0], 3, writeable=True),
        lambda a: a[0, 0].view([("x", "i2"), ("y", "i2")])["y"], lambda a: a[2:, 1].T,
    ]
    for n, view in enumerate(views):
        with volume.atomic(whole):
            whole[:] = 0
        shown[:] = 0
        shown_part = view(shown)
        shown_part.flags.writeable or shown_part.setflags(write=True)
        shown_part[...] = -1
        part = view(whole)
        if sync == "atomic":
            part.flags.writeable or part.setflags(write=True)
            with volume.atomic(part):
                whole[:] = -1
        else:
            whole[:] = -1
            getattr(mojim, sync)(part)
        assert (committed(volume, dtype="i2") == shown.ravel()).all(), n


def test_arrays_of_every_shape(volume):
    square = volume.array("f", "i4", (8, 8))
    with volume.atomic(square[1:3, 2:5], square.T[7]):
        square[1, 2] = square[0, 7] = 3
    assert committed(volume, dtype="i4").sum() == 6
    dates = volume.array("dates", "M8[s]", 4)
    with pytest.raises(Trouble), volume.atomic(dates):
        dates[:] = np.datetime64("2020-01-01")
        raise Trouble
    assert (dates == np.datetime64(0, "s")).all()
    with volume.atomic(dates):
        dates[1] = np.datetime64("2021-01-01")
    assert committed(volume, "dates", "M8[s]")[1] == np.datetime64("2021-01-01")
    with volume.atomic(square[0:0], square[3:3, :]):
        pass
    records = volume.array("records", [("n", "i4"), ("x", "f8")], 5)
    with volume.atomic(records["x"]):
        records["x"] = 1.5
    with pytest.raises(Trouble), volume.atomic(records["n"], records):
        records["n"] = 7
        raise Trouble
    assert records["n"].sum() == 0 and records["x"].sum() == 7.5


def test_what_cannot_be_in_a_block_is_refused_before_it_begins(volume):
    a = volume.array("f", "i8", 4)
    fixed = a[:]
    fixed.flags.writeable = False
    ran = []
    for wrong in (7, "text", fixed, [1, 2]):
        with pytest.raises((TypeError, BufferError, ValueError, AttributeError)):
            with volume.atomic(wrong):
                ran.append(wrong)
    assert not ran and not a.any()
    with volume.atomic(a):
        a[:] = 1


def test_memory_that_is_no_volumes_is_refused_before_a_block_begins(config, volume):
    """Nothing of the block has run; and a sync point says the same."""
    a = volume.array("f", "i8", 8)
    square = volume.array("g", "i8", (4, 4))
    gone = volume.map("gone", 4096)
    empty = np.zeros(0)
    copies = [a[[0, 1]], a[a == 0], a + 1, square[:, [1]], np.zeros((4, 4))[:, 1], bytearray(8)]
    for copy in [*copies, a[0]]:
        for arrays in ([copy], [a, square[:, 2], copy, a]):
            text = f"argument {len(arrays[:3])} is no memory of an attached volume: a\\[\\[.*give copies"
            with pytest.raises(mojim.Error, match=text):
                with volume.atomic(*arrays):
                    pytest.fail("entered")
            with pytest.raises(mojim.Error, match=text):
                mojim.gmsync(*arrays)
        with pytest.raises(mojim.Error, match="argument 1 is no memory of an attached volume"):
            mojim.msync(copy)
    for wrong, text in (
        (gone, "is a Region: call its sync"), (volume, "is a Volume: call its sync"),
        ([a, a], "is a list: give its arrays one by one"), (3, "is of type int: give an array"),
    ):
        for call in (lambda *w: volume.atomic(*w).__enter__(), mojim.gmsync):
            with pytest.raises(TypeError, match="argument 2 " + text):
                call(a, wrong)
        with pytest.raises(TypeError, match="argument 1 " + text):
            mojim.msync(wrong)
    with contextlib.ExitStack() as stack, pytest.raises(mojim.Error, match="argument 1"):
        stack.enter_context(volume.atomic(a + 1))
    assert volume._block is None and not volume._lock.locked() and not volume._inside
    with volume.atomic(a, empty):
        a[1] = 1
    mojim.msync(empty)
    assert volume._block is None and committed(volume)[1] == 1


def test_sizes_and_shapes_that_are_negative_are_named(volume):
    volume.map("f", 64)
    for call in (
        lambda: volume.array("f", "i8", -3), lambda: volume.array("g", "i8", (2, -3)),
        lambda: mojim.memmap("f", "i8", shape=-3, volume=volume),
    ):
        with pytest.raises(ValueError, match=r"shape=.*leave shape out"):
            call()
    with pytest.raises(ValueError, match="size=-3"):
        volume.map("g", -3)
    for call in (
        lambda: volume.array("f", "i8", 2, -8), lambda: volume.map("f").array("i8", 2, -8),
        lambda: mojim.memmap("f", "i8", offset=-8, volume=volume),
    ):
        with pytest.raises(ValueError, match="offset=-8"):
            call()
    assert "g" not in volume


def test_nested_blocks(volume, block):
    a = volume.array("f", "i8", 4)
    with block(a):
        a[0] = 1
        with block(a):
            a[1] = 1
    assert committed(volume).tolist() == [1, 1, 0, 0]
    with pytest.raises(Trouble), block(a):
        a[0] = 2
        with block(a):
            a[1] = 2
        raise Trouble
    assert a.tolist() == [1, 1, 0, 0]


def test_an_inner_block_that_failed(volume):
    a = volume.array("f", "i8", 4)
    with volume.atomic(a[0:1]):
        a[0] = 1
        with contextlib.suppress(Trouble), volume.atomic(a[1:3]):
            a[1:3] = 9
            raise Trouble
        a[1] = 0
    assert committed(volume).tolist() == [1, 0, 0, 0]
    # Without arrays nothing but the whole can be undone.
    with pytest.raises(mojim.Error, match="rolled back"), volume.atomic():
        a[3] = 4
        with contextlib.suppress(Trouble), volume.atomic():
            a[2] = 9
            raise Trouble
    assert a.tolist() == [1, 0, 0, 0]
    with volume.atomic():
        a[:] = 7
    assert (committed(volume) == 7).all()


def test_ends_of_many_kinds(volume):
    a = volume.array("f", "i8", 1)

    def returns():
        with volume.atomic(a):
            a[0] += 1
            return a[0]

    def generates():
        for _ in range(3):
            with volume.atomic(a):
                a[0] += 1
                continue

    assert returns() == 1
    generates()
    assert committed(volume)[0] == 4
    with contextlib.ExitStack() as stack:
        stack.enter_context(volume.atomic(a))
        a[0] = 50
    assert committed(volume)[0] == 50
    with pytest.raises(Trouble), contextlib.ExitStack() as stack:
        stack.enter_context(volume.atomic(a))
        a[0] = 60
        raise Trouble
    assert a[0] == 50
    again = volume.atomic(a)
    for _ in range(2):
        with again:
            a[0] += 1
    assert committed(volume)[0] == 52
    del again


def test_no_detach_in_a_block(config):
    volume = mojim.attach(config, "a")
    region = volume.map("f", 8)
    with volume.atomic():
        for end in (volume.detach, region.unmap):
            with pytest.raises(mojim.Busy, match="open"):
                end()
        region[0] = 1
    volume.detach()


@pytest.mark.parametrize("call", ["sync", "rollback"])
def test_what_is_about_all_waits_for_a_block(volume, call):
    """`sync` commits, and `rollback` undoes, no half of a block: not of another thread's, and not
    of one's own."""
    a = volume.array("f", "i8", 2)
    with volume.atomic():
        a[:] = 5
    for ends in (True, False):
        thread = threading.Thread(target=getattr(volume, call))
        with contextlib.suppress(Trouble), volume.atomic():
            a[0] += 1
            with pytest.raises(mojim.Busy, match="within"):
                getattr(volume, call)()
            thread.start()
            # It is in the call by then, and if it is late, nothing is shown.
            thread.join(0.2)
            a[1] += 1
            if not ends:
                raise Trouble
        thread.join()
        assert a.tolist() == [6, 6] == committed(volume).tolist()
    assert volume._block is None and not volume._lock.locked()


def test_several_regions_are_one(config):
    with mojim.attach(config, "a") as volume:
        a, b = volume.array("a", "i8", 4), volume.array("b", "i8", 4)
        with volume.atomic():
            a[:] = b[:] = 1
        with pytest.raises(Trouble), volume.atomic():
            a[:] = b[:] = 2
            raise Trouble
        assert a.tolist() == b.tolist() == [1] * 4
        lsn = mojim.last_lsn()
        with volume.atomic(a, b):
            a[:] = b[:] = 3
        assert mojim.last_lsn() == lsn + 1


def test_threads_take_turns(volume):
    """A transfer is never seen half done in a block, and never committed half done."""
    a = volume.array("f", "i8", 2)
    with volume.atomic(a):
        a[:] = 1000
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for i in range(60):
            with contextlib.suppress(Trouble), volume.atomic(a):
                if a.sum() != 2000:
                    wrong.append(a.tolist())
                n = rng.integers(10)
                a[0] -= n
                if i % 5 == seed % 5:
                    raise Trouble
                a[1] += n

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and a.sum() == 2000 and committed(volume).sum() == 2000


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("fails", ["inside", "behind", "around"])
def test_mixed_nestings_leave_nothing_half_done(volume, outer, inner, fails):
    """With and without arrays, one in the other: what is undone comes back by no saved copy, and
    the next block commits nothing of it."""
    a, b = volume.array("f", "i8", 4), volume.array("g", "i8", 4)
    with pytest.raises(Trouble), volume.atomic(*([a, b] if outer else [])):
        a[0] = b[0] = 1
        with volume.atomic(*([a] if inner else [])):
            a[1] = 2
            with volume.atomic(*([] if inner else [a])):
                a[2] = 3
                if fails == "inside":
                    raise Trouble
            if fails == "behind":
                raise Trouble
        raise Trouble
    assert not a.any() and not b.any()
    with volume.atomic():
        pass
    assert not committed(volume).any() and not committed(volume, "g").any()


def test_a_rollback_that_fails(volume, monkeypatch):
    """Half a block is in the memory: no call commits it. A sync point refuses until a rollback
    has succeeded, and once then; a block goes on."""
    import types

    import mojim._volume
    from mojim._library import ffi

    lib = mojim._volume.lib
    a = volume.array("f", "i8", 4)
    m = mojim.memmap("f", "i8", "r+", volume=volume)

    def fails(*_):
        ffi.errno = 110
        return -1

    def tear():
        with monkeypatch.context() as patch:
            patch.setattr(mojim._volume, "lib", types.SimpleNamespace(
                mojim_msync=fails, mojim_last_error=lib.mojim_last_error))
            with pytest.raises(mojim.Torn) as e, volume.atomic():
                a[0] = 1
                raise Trouble
            assert not isinstance(e.value, mojim.TimedOut)
            assert a[0] == 1
            with pytest.raises(mojim.Torn):
                mojim.msync(a)
            for arrays in ([a], []):
                with pytest.raises(mojim.Torn), volume.atomic(*arrays):
                    pytest.fail("entered")
            assert volume._block is None and not volume._lock.locked()

    calls = [
        volume.sync, m.flush, volume.map("f").sync,
        lambda: mojim.msync(a[0:1]), lambda: mojim.gmsync(a[0:1], a[2:3]),
        lambda: mojim.msync(a, wait=False),
    ]
    for call in calls:
        tear()
        with pytest.raises(mojim.Error, match="nothing was committed"):
            call()
        assert not a.any()
        call()
        assert not committed(volume).any()
    tear()
    with volume.atomic(a):
        assert not a.any()
        a[1] = 1
    assert committed(volume).tolist() == [0, 1, 0, 0]
    tear()
    volume.rollback()
    volume.sync()
    assert committed(volume).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("how", ["detach", "with"])
def test_another_thread_ends_the_volume_meanwhile(config, how):
    """It is refused while a block is open: a block that ends well has committed."""
    volume = mojim.attach(config, "a")
    region = volume.map("f", 64)
    refused = []

    def ends():
        try:
            if how == "detach":
                volume.detach()
            else:
                with volume:
                    pass
        except mojim.Busy as e:
            refused.append(e)

    with volume.atomic():
        region[0] = 7
        thread = threading.Thread(target=ends)
        thread.start()
        thread.join()
    assert refused
    volume.detach()
    with mojim.attach(config, "a") as volume:
        assert volume.map("f")[0] == 7


def test_a_block_of_a_volume_that_is_gone_says_so(config):
    """Whatever ended it: nothing was committed, so that the block fails."""
    volume = mojim.attach(config, "a")
    volume.map("f", 64)
    with pytest.raises(mojim.Error, match="detached"), volume.atomic():
        volume._block, block = None, volume._block
        volume.detach()
        volume._block = block
    assert volume._block is None


def test_an_exit_that_was_only_looked_at(volume):
    """And `__enter__` and `__exit__` called by hand: the lock is free afterwards."""
    a = volume.array("f", "i8", 4)
    at = volume.atomic(a)
    assert hasattr(at, "__exit__")
    with contextlib.ExitStack() as stack:
        stack.enter_context(at)
        a[0] = 1
    assert committed(volume)[0] == 1 and not volume._lock.locked()
    kept = at.__exit__
    with pytest.raises(Trouble), contextlib.ExitStack() as stack:
        stack.enter_context(at)
        a[0] = 2
        raise Trouble
    assert a[0] == 1 and not volume._lock.locked()
    del kept
    at.__enter__()
    a[0] = 3
    at.__exit__(None, None, None)
    assert committed(volume)[0] == 3 and not volume._lock.locked()
    with pytest.raises(RuntimeError, match="not entered"):
        at.__exit__(None, None, None)
    with at:
        a[0] = 4
    assert committed(volume)[0] == 4 and volume._block is None
