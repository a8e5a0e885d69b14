"""The record format: what goes in comes out, and nothing else passes."""

import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import RecordError
from tierkv.storage.codec import (
    ALL_LAYERS,
    HEADER_BYTES,
    PAGE_BYTES,
    Expected,
    RecordHeader,
    decode,
    encode,
    page_rounded_bytes,
    record_bytes,
)

HEADER = RecordHeader(namespace=bytes(range(32)), layer=3, stamp=2**63 + 5, num_tokens=2)
IDS = (7, -1)

headers = st.builds(
    RecordHeader,
    namespace=st.binary(min_size=32, max_size=32),
    layer=st.integers(ALL_LAYERS, 2**31 - 1),
    stamp=st.integers(0, 2**64 - 1),
    num_tokens=st.integers(0, 2**32 - 1),
)
token_ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
parts = st.lists(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(bytearray)), max_size=4)


@given(headers, token_ids, parts)
def test_round_trip(header, ids, pieces):
    encoded = encode(header, ids, pieces)
    record = decode(encoded)
    assert record.header == header
    assert record.token_ids == tuple(ids)
    assert bytes(record.payload) == b"".join(pieces)
    assert len(encoded) == record_bytes(sum(map(len, pieces)), len(ids))
    assert record.payload.readonly


@given(headers, token_ids, parts, st.data())
def test_any_flipped_byte_is_found(header, ids, pieces, data):
    damaged = bytearray(encode(header, ids, pieces))
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        decode(damaged)


def test_each_flipped_bit_of_one_record_is_found():
    encoded = encode(HEADER, IDS, [b"payload"])
    for position in range(len(encoded)):
        for bit in range(8):
            damaged = bytearray(encoded)
            damaged[position] ^= 1 << bit
            with pytest.raises(RecordError):
                decode(damaged)


@given(headers, token_ids, parts, st.data())
def test_any_shortening_or_extension_is_found(header, ids, pieces, data):
    encoded = encode(header, ids, pieces)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(RecordError):
        decode(encoded[:cut])
    with pytest.raises(RecordError):
        decode(encoded + data.draw(st.binary(min_size=1, max_size=50)))


@given(st.binary(max_size=400))
def test_noise_is_no_record(noise):
    with pytest.raises(RecordError):
        decode(noise)


def test_a_huge_length_in_a_header_is_refused_before_it_is_used():
    encoded = bytearray(encode(HEADER, IDS, [b"payload"]))
    encoded[16:20] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(RecordError, match="its header says"):
        decode(encoded)


def test_the_layout_on_disk_is_pinned():
    # A format that changes by accident makes every stored prefix unreadable; change FORMAT_VERSION with it.
    encoded = encode(HEADER, IDS, [b"payload"])
    assert encoded[:4] == b"TKVR"
    assert HEADER_BYTES == 96
    expected = "<HHiIIIQQ"
    assert struct.unpack_from(expected, encoded, 4) == (1, 0, 3, 2, 2, 0, 2**63 + 5, 7)
    assert encoded[40:72] == HEADER.namespace
    assert encoded[72:80] == bytes(8)
    assert encoded[80:96].hex() == "0f38d718b739ac42f51093bfc0e045da"
    assert struct.unpack_from("<qq", encoded, 96) == IDS
    assert encoded[112:] == b"payload"


MATCH: dict[str, Any] = {"layer": 3, "stamp": 2**63 + 5, "num_tokens": 2, "token_ids": IDS, "payload_bytes": 7}


def test_the_record_that_was_asked_for_passes():
    encoded = encode(HEADER, IDS, [b"pay", memoryview(b"load")])
    assert bytes(decode(encoded, Expected(namespace=HEADER.namespace, **MATCH)).payload) == b"payload"
    assert decode(encoded, Expected(namespace=HEADER.namespace)).token_ids == IDS


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("namespace", bytes(32), "namespace is another"),
        ("layer", 4, "layer is 3, not 4"),
        ("stamp", 1, "stamp is"),
        ("num_tokens", 32, "number of tokens is 2, not 32"),
        ("token_ids", (7, 0), "token ids"),
        ("payload_bytes", 8, "payload length is 7, not 8"),
    ],
)
def test_another_record_is_refused_in_one_line(name, value, said):
    encoded = encode(HEADER, IDS, [b"payload"])
    with pytest.raises(RecordError, match=said) as caught:
        decode(encoded, Expected(**({"namespace": HEADER.namespace} | MATCH | {name: value})))
    assert "\n" not in str(caught.value)


def test_another_format_version_says_so():
    encoded = bytearray(encode(HEADER, IDS, [b"payload"]))
    encoded[4] = 2
    with pytest.raises(RecordError, match="format version 2"):
        decode(encoded)


@pytest.mark.parametrize(
    ("header", "ids"),
    [
        (RecordHeader(b"short", 0, 0, 0), ()),
        (RecordHeader(bytes(32), 2**31, 0, 0), ()),
        (RecordHeader(bytes(32), 0, -1, 0), ()),
        (RecordHeader(bytes(32), 0, 0, 0), (2**63,)),
    ],
)
def test_what_does_not_fit_a_field_is_refused(header, ids):
    with pytest.raises(ValueError, match=r"namespace digest|does not fit"):
        encode(header, ids, [])


def test_parts_of_any_item_size_are_bytes():
    numbers = memoryview(bytes(range(16))).cast("I")
    assert bytes(decode(encode(HEADER, (), [numbers])).payload) == bytes(range(16))


def test_page_rounding():
    assert page_rounded_bytes(3 * PAGE_BYTES - 24) == 3 * PAGE_BYTES
    assert page_rounded_bytes(3 * PAGE_BYTES - 23) == 4 * PAGE_BYTES
    assert page_rounded_bytes(0) == PAGE_BYTES
    assert page_rounded_bytes(5000, 16384) == 16384


def test_the_format_loads_no_torch_and_no_lmdb():
    code = "import sys, tierkv.storage.codec; print(*({'torch', 'lmdb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
