"""The record: how KV bytes are framed on disk. Pure bytes; nothing here is ever unpickled or evaluated.

A record is a header of 96 bytes, the token ids (int64), then the payload; every number is little-endian::

    offset  bytes  field
         0      4  magic "TKVR"
         4      2  format version
         6      2  zero
         8      4  layer: position in the layout, or ALL_LAYERS
        12      4  tokens that the payload holds
        16      4  number of token ids
        20      4  zero
        24      8  stamp: tells two writes under one key apart (a generation, a block's uid)
        32      8  payload bytes
        40     32  namespace digest: everything besides tokens that decides the payload
        72      8  zero
        80     16  xxh3_128 of bytes 0 to 79, the token ids and the payload

The payload of KV bytes is canonical and knows nothing of memory order: ``[layer, K|V, kv_head, token, dim]``. The
checksum finds damage, it does not authenticate: whoever can write the file can also forge a record.
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import xxhash

from tierkv.errors import RecordError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes in one contiguous piece."""

MAGIC: Final = b"TKVR"
FORMAT_VERSION: Final = 1
NAMESPACE_BYTES: Final = 32

ALL_LAYERS: Final = -1
"""``RecordHeader.layer`` of a record that spans all layers of a block."""

PAGE_BYTES: Final = min(mmap.PAGESIZE, 32768)
"""Bytes of one LMDB page: the operating system's page, up to LMDB's own limit."""

# What LMDB puts before a value that has pages of its own: 16 bytes in the 0.9 file format, 24 in the 1.0 format.
_VALUE_OVERHEAD_BYTES: Final = 24
_FIELDS: Final = struct.Struct("<4sH2xiII4xQQ32s8x")
_CHECKSUM_BYTES: Final = 16
_TOKEN_ID_BYTES: Final = 8
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says about itself, lengths and checksum aside.

    Attributes:
        namespace: 32-byte digest of everything besides tokens that decides the payload.
        layer: position of the layer in the layout, or ``ALL_LAYERS``.
        stamp: unsigned 64-bit number that tells two writes under one key apart.
        num_tokens: tokens whose KV the payload holds.
    """

    namespace: bytes
    layer: int
    stamp: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a reader knows about the record it asked for; None means that it does not know.

    Attributes:
        payload_bytes: exact length of the payload, so that a reader may copy it without another check.
    """

    namespace: bytes
    layer: int | None = None
    stamp: int | None = None
    num_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    payload_bytes: int | None = None


class Record(NamedTuple):
    """A record that passed every check. ``payload`` is a read-only view into the buffer it was decoded from."""

    header: RecordHeader
    token_ids: tuple[int, ...]
    payload: memoryview


def record_bytes(payload_bytes: int, num_token_ids: int = 0) -> int:
    """Return the length of a record with this payload."""
    return HEADER_BYTES + _TOKEN_ID_BYTES * num_token_ids + payload_bytes


def page_rounded_bytes(value_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Return the file bytes that LMDB takes for a value, its index entry aside.

    A value of at most ``n * page_bytes - 24`` bytes takes ``n`` pages; the next byte costs another page.
    """
    return -(-(value_bytes + _VALUE_OVERHEAD_BYTES) // page_bytes) * page_bytes


def encode(header: RecordHeader, token_ids: Sequence[int], parts: Sequence[Buffer]) -> bytes:
    """Frame ``parts``, joined, as one record. Each part is read twice (checksum, copy) and copied once.

    Args:
        header: its numbers must fit their fields.
        token_ids: the tokens' ids, or nothing where ids do not identify the record.
        parts: pieces of the payload, in order; any contiguous buffers.

    Raises:
        ValueError: the header cannot be written as it is.
    """
    if len(header.namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace digest has {NAMESPACE_BYTES} bytes, not {len(header.namespace)}")
    payload_bytes = sum(memoryview(part).nbytes for part in parts)
    try:
        ids = struct.pack(f"<{len(token_ids)}q", *token_ids)
        fields = fields_of(header, payload_bytes, len(token_ids))
    except struct.error as error:
        raise ValueError(f"{header} does not fit the record's fields: {error}") from error
    checksum = xxhash.xxh3_128(fields)
    checksum.update(ids)
    for part in parts:
        checksum.update(part)
    return b"".join([fields, checksum.digest(), ids, *parts])


def fields_of(header: RecordHeader, payload_bytes: int, num_token_ids: int = 0) -> bytes:
    """Return how a record begins: everything before its checksum."""
    return _FIELDS.pack(
        MAGIC, FORMAT_VERSION, header.layer, header.num_tokens, num_token_ids, header.stamp, payload_bytes, header.namespace,
    )  # fmt: skip


def decode_known(buffer: Buffer, fields: bytes, payload_bytes: int) -> memoryview:
    """Check a record whose every field is known, and return its payload without copying it.

    The same checks as ``decode``, at a third of the cost: for records that are read at every token.

    Args:
        buffer: exactly one record.
        fields: what ``fields_of`` returned for it.
        payload_bytes: of the payload.

    Raises:
        RecordError: anything at all is not as it should be.
    """
    view = memoryview(buffer)
    if len(view) == HEADER_BYTES + payload_bytes and view[: _FIELDS.size] == fields:
        checksum = xxhash.xxh3_128(fields)
        checksum.update(view[HEADER_BYTES:])
        if checksum.digest() == view[_FIELDS.size : HEADER_BYTES]:
            return view[HEADER_BYTES:]
    decode(buffer)  # says what is damaged, if anything is
    raise RecordError("not the record that was asked for: its layer, stamp or namespace is another")


def decode(buffer: Buffer, expect: Expected | None = None) -> Record:
    """Check a record from its first byte to its last and take it apart without copying the payload.

    Args:
        buffer: exactly one record.
        expect: what the caller knows about it. Compared last, so that damage is never reported as a wrong record.

    Raises:
        RecordError: anything at all is not as it should be; one line says what.
    """
    view = memoryview(buffer).toreadonly().cast("B")
    if len(view) < HEADER_BYTES:
        raise RecordError(f"damaged record: {len(view)} bytes are shorter than a header of {HEADER_BYTES}")
    magic, version, layer, num_tokens, num_ids, stamp, payload_bytes, namespace = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        raise RecordError(f"damaged record: it begins with {magic!r}, not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise RecordError(f"record of format version {version}; this tierkv reads version {FORMAT_VERSION}")
    if len(view) != record_bytes(payload_bytes, num_ids):
        message = f"its header says {record_bytes(payload_bytes, num_ids)} bytes"
        raise RecordError(f"damaged record: {message}, {len(view)} were found")
    checksum = xxhash.xxh3_128(view[: _FIELDS.size])
    checksum.update(view[HEADER_BYTES:])
    if checksum.digest() != view[_FIELDS.size : HEADER_BYTES]:
        raise RecordError("damaged record: its checksum does not match its bytes")
    payload_start = HEADER_BYTES + _TOKEN_ID_BYTES * num_ids
    record = Record(
        RecordHeader(namespace, layer, stamp, num_tokens),
        struct.unpack_from(f"<{num_ids}q", view, HEADER_BYTES),
        view[payload_start:],
    )
    if expect is not None:
        _compare(record, expect)
    return record


def _compare(record: Record, expect: Expected) -> None:
    """Raise RecordError unless the record is the one that was asked for."""
    header = record.header
    for name, found, wanted in (
        ("namespace", header.namespace, expect.namespace),
        ("layer", header.layer, expect.layer),
        ("stamp", header.stamp, expect.stamp),
        ("number of tokens", header.num_tokens, expect.num_tokens),
        ("payload length", len(record.payload), expect.payload_bytes),
        ("token ids", record.token_ids, expect.token_ids),
    ):
        if wanted is not None and found != wanted:
            shown = f"is {found}, not {wanted!r}" if isinstance(found, int) else "is another"
            raise RecordError(f"not the record that was asked for: its {name} {shown}")
