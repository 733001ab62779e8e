"""mojim.memmap beside numpy.memmap: the same program, and the same bytes."""

import pickle

import numpy as np
import pytest

import mojim
from mojim._library import lib


def test_the_same_as_numpys(volume, tmp_path):
    ours = lambda *a, **k: mojim.memmap("f", *a, **k)  # noqa: E731
    theirs = lambda *a, **k: np.memmap(tmp_path / "f", *a, **k)  # noqa: E731
    said = []
    for make in (ours, theirs):
        a = make(dtype="f4", mode="w+", shape=(3, 4))
        assert a.shape == (3, 4) and not a.any()
        a[:] = np.arange(12).reshape(3, 4)
        a.flush()
        b = make(dtype="f4", mode="r")
        c = make(dtype="f4", mode="c", offset=16, shape=(2, 4), order="F")
        c[0, 0] = 99
        d = make(dtype="u1", mode="r+", offset=4)
        d[0] = 7
        d.flush()
        with pytest.raises(ValueError):
            b[0] = 1
        results = [a, b, c, d, a[1], a[1, 2], a + 1, a.sum(), a.sum(axis=0), a[a > 3], a[[0, 1]]]
        results += [np.sqrt(a), a.T, a.view("i4"), a.mean(), a == 1, np.concatenate([a[0], b])]
        said.append(
            [(np.asarray(r).tolist(), isinstance(r, (mojim.memmap, np.memmap))) for r in results]
            + [a.mode, b.mode, c.mode, d.offset]
        )
        del a, b, c, d, results
        e = make(dtype=("i4", (2,)), mode="w+", shape=6)
        said.append((e.shape, e.dtype.name, e.any()))
        del e
    assert said[:2] == said[2:]


def test_arguments_that_are_wrong(volume):
    for wrong in (
        {"mode": "x"},
        {"mode": "w+"},
        {"mode": "r", "shape": 99},
        {"mode": "r", "dtype": "S3"},
    ):
        volume.map("f", 8)
        with pytest.raises(ValueError):
            mojim.memmap("f", **wrong)
    for mode in ("r", "r+", "c"):
        with pytest.raises(FileNotFoundError):
            mojim.memmap("none", mode=mode)


def test_the_volume_is_the_one_that_is_attached(volume):
    a = mojim.memmap("f", mode="w+", shape=8)
    assert a.sum() == 0 and volume.map("f").size == 8
    assert np.may_share_memory(a, volume.array("f"))
    assert mojim.memmap("f", volume=volume).shape == (8,)


def test_without_a_volume():
    with pytest.raises(mojim.Error, match="call mojim.attach first"):
        mojim.memmap("f", mode="w+", shape=8)


def test_flush_commits_what_it_is_called_on(volume):
    a = mojim.memmap("f", "i8", "w+", shape=16)
    a[:] = 1
    a[4:8].flush()
    volume.rollback()
    assert a.tolist() == [0] * 4 + [1] * 4 + [0] * 8
    with pytest.raises(RuntimeError), volume.atomic(a[0:2]):
        a[0] = 9
        raise RuntimeError
    assert a[0] == 0


def test_a_file_that_is_made_anew_is_zero(config):
    with mojim.attach(config, "a") as volume:
        a = mojim.memmap("f", "i8", "w+", shape=1000)
        a[:] = 1
        a.flush()
        del a
    with mojim.attach(config, "a") as volume:
        a = mojim.memmap("f", "i8", "w+", shape=10)
        # It was cut at once.
        assert a.tolist() == [0] * 10 and volume.size("f") == 80
        # The zeros are not committed yet.
        volume.rollback()
        assert a.tolist() == [1] * 10


def test_another_size_of_a_file_that_is_mapped(volume):
    """Nobody has an array of it: it is cut, or grows, and keeps what was stored."""
    a = mojim.memmap("f", "i8", "w+", shape=100)
    a[:] = 1
    a.flush()
    with pytest.raises(mojim.Busy, match="views of f"):
        mojim.memmap("f", "i8", "w+", shape=10)
    with pytest.raises(mojim.Busy, match="views of f"):
        mojim.memmap("f", "i8", "r+", shape=20000)
    assert volume.size("f") == 800 and a.sum() == 100
    del a
    mojim.memmap("f", "i8", "w+", shape=10).flush()
    assert mojim.memmap("f", "i8").shape == (10,) and volume.size("f") == 80
    region = volume.map("f")
    region[0:1] = b"\x07"
    a = mojim.memmap("f", "i8", "w+", shape=20000)
    assert a.shape == (20000,) and not a.any() and volume.map("f") is region
    a[5] = 5
    a[5:6].flush()
    a[9] = a[19999] = 9
    del a
    a = mojim.memmap("f", "i8", "r+", shape=30000)
    assert a[5] == 5 and a[9] == a[19999] == 9 and np.count_nonzero(a) == 3
    volume.rollback()
    assert a[5] == 5 and np.count_nonzero(a) == 1


def test_a_shared_region_that_grows(volume):
    """Its working copy lives on: what was stored there is neither lost nor stored again."""
    region = volume.map("f", 4096, shared=True)
    region[0:2] = b"\x01\x02"
    region.sync(0, 1)
    former = region._base
    assert volume.map("f", 1 << 20) is region and region.size == 1 << 20
    assert region[0:2] == b"\x01\x02" and region[(1 << 20) - 1 : 1 << 20] == b"\x00"
    assert not lib.mojim_is_region(former)
    volume.rollback()
    assert region[0:2] == b"\x01\x00"


def test_others_get_a_copy(volume):
    a = mojim.memmap("f", "i8", "w+", shape=4)
    assert not isinstance(a, np.memmap) and not hasattr(a, "filename")
    b = pickle.loads(pickle.dumps(a))
    a[0] = 5
    assert type(b) is np.ndarray and b[0] == 0
