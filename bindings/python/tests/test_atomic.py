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
    with pytest.raises(Trouble), volume.atomic(a[0:2], a[8::2]):
        a[:] = 5
        raise Trouble
    assert a.tolist() == [1, 1] + [5] * 6 + [1, 5] * 4


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
    # What is in no region is found by the commit.
    elsewhere = np.zeros(4)
    with pytest.raises(mojim.Error), volume.atomic(a, elsewhere):
        a[:] = elsewhere[:] = 3
    assert not ran and not a.any() and not elsewhere.any()
    with volume.atomic(a):
        a[:] = 1


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
