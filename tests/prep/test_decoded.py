"""Containers of decoded samples can be read back, are refused if damaged, and reuse their memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mbaas.prep.decoded import HEADER_BYTES, DecodedBuffer, DecodedRows, container_bytes, is_decoded, read_decoded
from mbaas.prep.header import UndecodableError, peek

DTYPES = ("uint8", "bool", "int16", "int64", "float16", "float32", "float64", "complex64", "complex128")


def kept(*samples, rows=None, applied=1, original=None, most_bytes=1 << 20):
    """DecodedRows with one container per sample."""
    rows = range(len(samples)) if rows is None else rows
    keep = DecodedRows(rows, most_bytes)
    for row, sample in zip(rows, samples, strict=True):
        np.copyto(keep.room(row, sample.shape, sample.dtype, applied=applied, original=original), sample)
    return keep


def container(sample, **given):
    return memoryview(kept(sample, **given).taken()[2])


def split(taken):
    """Rows taken from DecodedRows, as row -> sample."""
    rows, lengths, packed = taken
    ends = np.cumsum(lengths)
    return {
        row: read_decoded(memoryview(packed[end - length : end])).values
        for row, length, end in zip(rows.tolist(), lengths.tolist(), ends.tolist(), strict=True)
    }


@given(
    sample=st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3))
    ),
    applied=st.integers(1, 65_535),
    original=st.none() | st.tuples(st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1)),
)
def test_what_is_written_is_read(sample, applied, original):
    data = container(sample, applied=applied, original=original)
    assert is_decoded(data)
    assert len(data) == container_bytes(sample.shape, sample.dtype)
    assert len(data) % 64 == 0
    found = read_decoded(data)
    assert (found.applied, found.original) == (applied, original)
    assert (found.values.shape, found.values.dtype) == (sample.shape, sample.dtype)
    assert found.values.tobytes() == sample.tobytes()
    assert found.values.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        found.values[...] = 0


def test_values_are_viewed_where_they_lie_unless_no_number_begins_there():
    sample = np.arange(5, dtype=np.float32)
    data = np.frombuffer(container(sample), np.uint8)
    assert np.shares_memory(read_decoded(memoryview(data)).values, data)
    shifted = np.zeros(len(data) + 1, np.uint8)
    shifted[1:] = data
    found = read_decoded(memoryview(shifted)[1:])
    np.testing.assert_array_equal(found.values, sample)
    assert found.values.flags.aligned


def test_containers_end_to_end_are_aligned():
    _, lengths, packed = kept(*(np.full(size, size, np.float64) for size in (1, 7, 8, 9))).taken()
    assert (packed.ctypes.data + np.cumsum(lengths)).tolist() == [packed.ctypes.data + 64 * n for n in (3, 6, 9, 13)], (
        "128 bytes of header, and 64 bytes for each 8 numbers"
    )
    assert packed.ctypes.data % 64 == 0


def test_the_same_sample_has_the_same_bytes_whatever_was_in_the_memory():
    memory, sample = DecodedBuffer(), np.arange(3, dtype=np.uint8)
    found = []
    for filling in (0, 255):
        memory.first(1024)[:] = filling
        keep = DecodedRows([0], 1024, memory)
        keep.room(0, sample.shape, sample.dtype, applied=2)[:] = sample
        found.append(keep.taken()[2].tobytes())
    assert found[0] == found[1]


def test_every_bit_of_a_header_counts():
    data = bytearray(container(np.arange(6, dtype=np.int16).reshape(2, 3), original=(5, 7)))
    for place in range(HEADER_BYTES):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(UndecodableError, match="decoded sample"):
            read_decoded(memoryview(damaged))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", r"it is not a decoded sample: it starts with b''"),
        (b"\xff\xd8\xff" + bytes(200), "it is not a decoded sample: it starts with b'\\\\xff\\\\xd8"),
        (bytes(container(np.zeros(3))[:-64]), r"float64 \[3\] takes 192 bytes, and it has 128"),
        (bytes(container(np.zeros(3))) + bytes(64), r"float64 \[3\] takes 192 bytes, and it has 256"),
        (bytes(container(np.zeros(3))[:100]), "it is not a decoded sample"),
    ],
)
def test_what_is_no_whole_container_is_refused(data, says):
    with pytest.raises(UndecodableError, match=says):
        read_decoded(memoryview(data))


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"version": 2}, "it was decoded by another version of mbaas: format 2, here 1"),
        ({"applied": 0}, "1 axes of b'f'4 after 0 transforms"),
        ({"axes": 9}, "9 axes"),
        ({"kind": b"O"}, "1 axes of b'O'4"),
        ({"kind": b"\xff"}, "1 axes of b'.xff'4"),
        ({"kind": b","}, "1 axes of b','4"),
        ({"itemsize": 16}, "1 axes of b'f'16"),
        ({"engine": 2}, "after 1 transforms of engine 2"),
        ({"length": 2**63}, "takes 36,893,488,147,419,103,360 bytes, and it has 192"),
    ],
)
def test_claims_that_cannot_be_are_refused_although_the_checksum_is_right(claim, says):
    from mbaas.prep import decoded

    said = {"version": 1, "applied": 1, "axes": 1, "kind": b"f", "itemsize": 4, "engine": 0, "length": 3} | claim
    data = bytearray(container(np.zeros(3, np.float32)))
    *first, length = said.values()
    decoded._HEADER.pack_into(data, 0, decoded.MAGIC, *first, 0, 0, length, *(0,) * 7)
    decoded._CHECKSUM.pack_into(data, 124, decoded.zlib.crc32(data[:124]))
    with pytest.raises(UndecodableError, match=says):
        read_decoded(memoryview(data))


def test_files_are_not_taken_for_containers(jpegs, odd_files):
    for raw in [*jpegs, *(raw for raw, _ in odd_files.values()), b"", b"\x93NUMPY\1\0"]:
        assert not is_decoded(memoryview(raw))
    with pytest.raises(UndecodableError, match="it is not JPEG, PNG, WebP or BMP"):
        peek(memoryview(container(np.zeros((3, 3, 3), np.uint8)))[1:], 100)


def test_rows_that_are_dropped_leave_no_gap():
    samples = [np.full(row + 1, row, np.float32) for row in range(6)]
    keep = kept(*samples, rows=[10, 11, 12, 13, 14, 15])
    for row in (15, 10, 12, 99):
        keep.drop(row)
    assert not keep.wants(10)
    assert keep.wants(11)
    for _ in range(2):  # the second call has nothing left to move
        found = split(keep.taken())
        assert {row: values.tolist() for row, values in found.items()} == {
            row: samples[row - 10].tolist() for row in (11, 13, 14)
        }


def test_what_is_dropped_last_makes_room_for_the_next():
    keep = DecodedRows([0, 1], 192)
    assert keep.room(0, (8,), np.dtype("float64"), applied=1) is not None
    assert keep.room(1, (8,), np.dtype("float64"), applied=1) is None
    keep.drop(0)
    assert keep.room(1, (8,), np.dtype("float64"), applied=1) is not None


def test_a_row_that_is_made_again_is_there_once():
    keep = kept(np.zeros(3), np.ones(2))
    keep.room(0, (2,), np.dtype("int64"), applied=1)[:] = 7
    assert {row: values.tolist() for row, values in split(keep.taken()).items()} == {0: [7, 7], 1: [1, 1]}


@pytest.mark.parametrize(
    ("row", "shape", "dtype"),
    [
        (1, (3,), "float32"),
        (0, (3,), "longdouble"),
        (0, (3,), "U3"),
        (0, (3,), "O"),
        (0, (3,), ">f4"),
        (0, (1,) * 9, "uint8"),
        (0, (900,), "uint8"),
    ],
)
def test_there_is_no_room_for(row, shape, dtype):
    keep = DecodedRows([0], 1000)
    assert keep.room(row, shape, np.dtype(dtype), applied=1) is None
    rows, lengths, packed = keep.taken()
    assert (len(rows), len(lengths), len(packed)) == (0, 0, 0)
    assert (rows.dtype, lengths.dtype, packed.dtype) == (np.int64, np.int64, np.uint8)


def test_threads_share_it():
    """Each of 8 threads keeps 50 rows and drops those divisible by 3. All others remain, with their own values."""
    keep = DecodedRows(range(400), 1 << 20)

    def work(first):
        for row in range(first, 400, 8):
            keep.room(row, (row % 40,), np.dtype("int64"), applied=1)[:] = row
            if row % 3 == 0:
                keep.drop(row)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = split(keep.taken())
    assert sorted(found) == [row for row in range(400) if row % 3]
    assert all((values == row).all() and len(values) == row % 40 for row, values in found.items())


def test_memory_is_used_again():
    memory = DecodedBuffer()
    first = memory.first(1000)
    assert np.shares_memory(memory.first(900), first)
    assert len(memory.first(2000)) == 2000
