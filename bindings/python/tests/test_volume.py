"""Volumes, regions and arrays: what holds memory, what is committed, how they end."""

import gc
import itertools
import pathlib
import pickle
import random
import threading
import weakref

import numpy as np
import pytest

import mojim


def test_what_is_committed_is_there_for_the_next_process(config, program):
    with mojim.attach(config, "a") as volume:
        a = volume.array("numbers", "f8", (3, 4))
        a[1] = 2.5
        mojim.msync(a)
        a[2] = 7
    program(
        "v = mojim.attach(config, 'a')\n"
        "a = v.array('numbers', 'f8', (3, 4))\n"
        "assert a.tolist() == [[0] * 4, [2.5] * 4, [0] * 4], a\n"
    )


def test_a_range_is_exact(config):
    with mojim.attach(config, "a") as volume:
        region = volume.map("f", 64)
        region[0:64] = b"x" * 64
        region.sync(8, 16)
        view = region.view()
        mojim.msync(view[20:22])
        mojim.gmsync(view[30:31], view[40:42])
        del view
        assert bytes(region[0:64]) == b"x" * 64
    with mojim.attach(config, "a") as volume:
        there = [i for i, byte in enumerate(volume.map("f")[0:64]) if byte]
    assert there == [*range(8, 16), 20, 21, 30, 40, 41]


def test_begun_is_committed_when_waited_for(volume):
    a = volume.array("f", "i8", 4)
    a[:] = 3
    before = mojim.last_lsn()
    mojim.msync(a, wait=False)
    assert mojim.last_lsn() > before
    volume.wait(mojim.last_lsn())


def test_a_region_and_a_volume_are_the_same_again(config):
    volume = mojim.attach(config, "a")
    assert mojim.attach(config, "a") is volume
    assert mojim.attach(config, "a", "v") is volume
    region = volume.map("f", 100)
    assert volume.map("f") is region and volume.map("f", 10) is region
    view = region.view()
    with pytest.raises(mojim.Busy, match="views of f"):
        volume.map("f", 101)
    del view
    a = volume.array("f", "u1", 100)
    b = volume.array("f", "u1", 100)
    a[3] = 9
    assert b[3] == 9
    del a, b
    region.unmap()
    assert len(volume.map("f", 101)) == 101
    volume.detach()
    assert not volume.attached
    with mojim.attach(config, "a") as again:
        with again:
            assert again.size("f") == 101
        assert again.attached
    assert not again.attached


def test_a_with_ends_what_nobody_else_has_attached(config, program):
    """A function that attaches for itself ends nothing under the feet of its caller."""

    def helper(size):
        with mojim.attach(config, "a") as v, v:
            assert v.size("f") == size

    volume = mojim.attach(config, "a")
    a = volume.array("f", "i8", 4)
    helper(32)
    helper(32)
    assert volume.attached
    a[0] = 5
    mojim.msync(a)
    with volume:
        helper(32)
    assert volume.attached
    del a
    volume.detach()
    # Within a `with` it is that one that ends it; also a `with` of what one call has attached.
    volume = mojim.attach(config, "a")
    with volume:
        helper(32)
        assert mojim.attach(config, "a") is volume and volume.attached
    assert not volume.attached
    with mojim.attach(config, "a") as volume:
        helper(32)
        assert volume.attached
    assert not volume.attached
    program("v = mojim.attach(config, 'a')\nassert v.array('f', 'i8')[0] == 5\n")


def test_what_is_public_is_of_the_package():
    for name in mojim.__all__:
        value = getattr(mojim, name)
        if isinstance(value, type):
            assert value.__module__ == "mojim" and value.__qualname__ == name
            assert pickle.loads(pickle.dumps(value)) is value


def test_what_is_not_there_is_not_found(config):
    for wrong in (config + "x", "a"), (config, "x"), (config, "a", "x"):
        with pytest.raises(FileNotFoundError, match=r"no.* such|No such") as e:
            mojim.attach(*wrong)
        assert isinstance(e.value, mojim.NotFound) and e.value.errno == 2
    with pytest.raises(mojim.NotFound, match="is `mojim node` running"):
        mojim.attach_reader(config, "a")
    # One that is there, and wrong, is something else.
    pathlib.Path(config).write_text("cluster = 7\n")
    with pytest.raises(mojim.Error) as wrong_type:
        mojim.attach(config, "a")
    assert wrong_type.value.errno == 22


def test_what_holds_the_memory_keeps_it(config):
    volume = mojim.attach(config, "a")
    holders = {
        "array": lambda: volume.array("f", "i4", 16),
        "slice": lambda: volume.array("f", "i4", 16)[3:7:2],
        "element view": lambda: volume.array("f", "i4", 16)[0:1].view("u1"),
        "reshape": lambda: volume.array("f", "i4", 16).reshape(4, 4).T,
        "dtype": lambda: volume.array("f", [("a", "i2"), ("b", "i2")], 16)["b"],
        "diagonal": lambda: volume.array("f", "i4", (4, 4)).diagonal(),
        "iterator": lambda: iter(volume.array("f", "i4", (4, 4))),
        "flat": lambda: volume.array("f", "i4", (4, 4)).flat,
        "masked": lambda: np.ma.masked_array(volume.array("f", "i4", 16), mask=False, copy=False),
        "broadcast": lambda: np.broadcast_to(volume.array("f", "i4", 1), (2, 8)),
        "strided": lambda: np.lib.stride_tricks.sliding_window_view(
            volume.array("f", "i4", 16), 3
        ),
        "memoryview": lambda: volume.map("f", 64).view(),
        "cast": lambda: volume.map("f", 64).view()[8:16].cast("i"),
        "asarray": lambda: np.asarray(volume.map("f", 64)),
        "frombuffer": lambda: np.frombuffer(volume.map("f", 64).view(), "u1"),
        "memmap": lambda: mojim.memmap("f", "i4", "r+", shape=(16,))[2:],
        "bound method": lambda: volume.array("f", "i4", 16).sum,
        "closure": lambda: (lambda a: lambda: a)(volume.array("f", "i4", 16)),
    }
    for name, make in holders.items():
        held = make()
        with pytest.raises(BufferError, match="f"):
            volume.detach()
        with pytest.raises(BufferError, match="f"):
            volume.map("f").unmap()
        assert volume.attached, name
        del held
    free = {
        "pickle": lambda: pickle.loads(pickle.dumps(volume.array("f", "i4", 16))),
        "copy": lambda: volume.array("f", "i4", 16).copy(),
        "sum": lambda: volume.array("f", "i4", 16) + 1,
        "element": lambda: volume.array("f", "i4", 16)[0],
        "list": lambda: volume.array("f", "i4", 16).tolist(),
        "bytes": lambda: volume.map("f", 64)[0:8],
        "memmap's pickle": lambda: pickle.loads(
            pickle.dumps(mojim.memmap("f", "i4", "r+", shape=(16,)))
        ),
        "memmap's sum": lambda: mojim.memmap("f", "i4", "r+", shape=(16,)) * 2,
    }
    for name, make in free.items():
        kept = make()
        volume.map("f", 64).unmap()
        assert kept is not None, name
    volume.detach()
    volume.detach()
    assert not volume.attached


def test_a_released_view_and_a_cycle_hold_nothing(config):
    volume = mojim.attach(config, "a")
    view = volume.map("f", 8).view()
    view.release()
    cycle = [volume.array("f")]
    cycle.append(cycle)
    del cycle
    volume.detach()


def test_any_order_of_collection(config):
    """Arrays, views of views, the region and the volume go in any order; the memory is there
    while one is, and free when none is."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    steps = [
        lambda a: a[1:],
        lambda a: a[::-1],
        lambda a: a.view("u1").view("i8"),
        lambda a: a.reshape(-1, 1)[:, 0],
        lambda a: np.asarray(memoryview(a)),
        lambda a: a[...],
    ]
    for _ in range(8):
        volume = mojim.attach(config, "a")
        arrays = [volume.array("f", "i8", 64)]
        for _ in range(rng.randrange(1, 12)):
            source = rng.choice(arrays)
            if source.size > 4 and source.flags.c_contiguous:
                arrays.append(rng.choice(steps)(source))
            else:
                arrays.append(source[...])
        if rng.random() < 0.3:
            arrays.append([arrays[-1]])
            arrays[-1].append(arrays[-1])
        rng.shuffle(arrays)
        region = weakref.ref(volume.map("f"))
        del source
        while arrays:
            with pytest.raises(BufferError):
                volume.detach()
            arrays.pop()
        volume.detach()
        del volume
        gc.collect()
        assert region() is None


def test_no_order_of_names_matters_at_the_end(program):
    """The interpreter ends with everything alive, whatever is dropped first."""
    lines = ["v = None", "r = None", "a = None", "b = None"]
    for order in itertools.islice(itertools.permutations(lines), 0, 24, 8):
        program(
            "v = mojim.attach(config, 'a')\n"
            "r = v.map('f', 4096)\n"
            "a = r.view().cast('q')\n"
            "b = a[3:]\n"
            "a[3] += 1\n" + "\n".join(order[: len(order) // 2]) + "\n"
        )


def test_a_with_leaves_memory_to_those_who_hold_it(config):
    with mojim.attach(config, "a") as volume:
        a = volume.array("f", "i8", 1000)
        a[:] = 5
        mojim.msync(a)
    assert not volume.attached
    assert a.sum() == 5000
    a[:] = 6
    with pytest.raises(mojim.Error):
        mojim.msync(a)
    with mojim.attach(config, "a") as volume:
        # Nothing was stored to it.
        b = volume.array("f", "i8", 1000)
    # What becomes of the file, also by another process, is not seen in the arrays.
    with mojim.attach(config, "a") as volume:
        c = volume.array("f", "i8", 1000)
        assert c.sum() == 5000
        c[:] = 7
        mojim.msync(c)
        del c
        mojim.memmap("f", "i8", "w+", shape=1).flush()
    assert a.sum() == 6000 and b.sum() == 5000


def test_errors_say_what_and_where(config, volume):
    for wrong in (("nobody", None), ("a", "other")):
        with pytest.raises(mojim.Error) as e:
            mojim.attach(config, *wrong)
        assert e.value.errno and e.value.strerror
    with pytest.raises(mojim.NotFound, match="none") as missing:
        volume.map("none")
    assert isinstance(missing.value, FileNotFoundError)
    with pytest.raises(mojim.NotFound):
        volume.map("none", 10, create=False)
    with pytest.raises(mojim.Error):
        mojim.msync(np.zeros(8))
    with pytest.raises(TypeError, match="objects"):
        volume.array("f", "O", 3)
    with pytest.raises(TypeError):
        pickle.dumps(volume)
    with pytest.raises(TypeError):
        pickle.dumps(volume.map("f", 8))
    region = volume.map("f", 8)
    for start, stop in ((-1, 4), (5, 4), (0, 9)):
        with pytest.raises(ValueError, match="of 8"):
            region.sync(start, stop)
    region.unmap()
    for call in (region.sync, region.view, region.rollback):
        with pytest.raises(ValueError, match="unmapped"):
            call()
    volume.detach()
    for call in (volume.sync, volume.rollback, lambda: volume.map("f"), lambda: volume.size("f")):
        with pytest.raises(mojim.Error, match="detached"):
            call()


def test_another_process_is_busy(volume, program):
    done = program(
        "try:\n    mojim.attach(config, 'a')\n"
        "except mojim.Busy as e:\n    print(e.errno, e.strerror)\n"
    )
    assert done.stdout.startswith("16 "), done.stdout


def test_files(volume):
    volume.map("a/b", 100).unmap()
    assert "a/b" in volume and "c" not in volume
    volume.rename("a/b", "c")
    assert volume.size("c") == 100
    region = volume.map("c")
    volume.rename("c", "d")
    assert volume.map("d") is region and region.name == "d"
    with pytest.raises(mojim.Busy):
        volume.remove("d")
    region.unmap()
    volume.remove("d")
    assert "d" not in volume


def test_threads_commit_side_by_side(config):
    with mojim.attach(config, "a") as volume:
        a = volume.array("f", "i8", 8 * 64)

        def work(i):
            mine = a[64 * i : 64 * i + 64]
            for n in range(50):
                mine[:] = n
                mojim.msync(mine)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        del a
    with mojim.attach(config, "a") as volume:
        assert (volume.array("f", "i8") == 49).all()


def test_views_that_are_made_while_another_thread_detaches(config):
    """Either there is an array, and its memory; or a clear error."""
    for _ in range(20):
        volume = mojim.attach(config, "a")
        region = volume.map("f", 4096)
        seen = []

        def make():
            try:
                while True:
                    seen.append(region.array("i8").sum())
            except ValueError as e:
                assert "unmapped" in str(e)

        thread = threading.Thread(target=make)
        thread.start()
        while volume.attached:
            try:
                volume.detach()
            except BufferError:
                pass
        thread.join()


def test_without_numpy(program):
    program(
        "sys.modules['numpy'] = None\n"
        "v = mojim.attach(config, 'a')\n"
        "r = v.map('f', 16)\n"
        "r[0:2] = b'ab'\n"
        "m = r.view()\n"
        "with v.atomic(m[0:8]):\n    m[3] = 7\n"
        "mojim.msync(m[0:2])\n"
        "assert r[0:4] == b'ab\\0\\7'\n"
    )


def test_what_is_for_reading_stays_so(volume):
    """NumPy's flag cannot be set on an array of a reader's region, nor on a memmap in mode "r"."""
    region = volume.map("f", 64)
    read = mojim.memmap("f", "i8", "r", volume=volume)
    region.read_only = True
    for a in (region.array("i8"), region.array("i8", (2, 2), 8, "F"), np.asarray(region), read):
        assert not a.flags.writeable
        for b in (a, a[:], a.view()):
            with pytest.raises(ValueError):
                b.flags.writeable = True
    with pytest.raises(BufferError):
        region.unmap()
    del a, b, read
    region.unmap()


def test_a_volume_that_is_attached_in_another_way_is_busy(volume, config):
    """A program that asks for a reader gets no writer, which it would not expect."""
    for other in (mojim.attach_reader, mojim.join):
        with pytest.raises(mojim.Busy, match="by mojim.attach"):
            other(config, "a")
    assert mojim.attach(config, "a") is volume


def test_names_of_every_kind(volume):
    """A name is text, bytes or a path, and the same file by each of them."""
    path = pathlib.PurePosixPath
    region = volume.map(path("a"), 8)
    assert volume.map(b"a") is region and volume.map("a") is region
    volume.rename(path("a"), b"b")
    assert volume.map("b") is region and region.name == "b"
    assert path("b") in volume and b"b" in volume and volume.size(path("b")) == 8
    assert volume.array(b"b").size == mojim.memmap(path("b"), volume=volume).size == 8
    region.unmap()
    volume.remove(path("b"))
    assert "b" not in volume


def test_a_region_is_no_buffer(volume):
    """What takes the buffer of an object keeps the object, and not always what the object has
    given (NumPy does so): the mapping would not be held. `view` and `array` hold it."""
    region = volume.map("f", 64)
    with pytest.raises(TypeError):
        np.ndarray(8, "i8", region)
    assert not hasattr(mojim.Region, "__buffer__")
