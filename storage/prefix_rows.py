"""Rows of the prefix store's index: how each is packed, and the seal that tells a damaged one.

A B-tree on disk finds a key by comparing bytes, and knows nothing of flipped bits in what it found. So every row ends
with a checksum over its key and itself: a row that was changed, or belongs to another key, counts as not there.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from tierkv.eviction import GHOST, Entry

_SEAL_BYTES: Final = 8
_NO_PARENT: Final = bytes(32)
_ENTRY: Final = struct.Struct("<B32sQdBQBI")
_PLACE: Final = struct.Struct("<32sQQQQIdI")
_STORED_BYTES: Final = _ENTRY.size + _PLACE.size + _SEAL_BYTES
_ORDER: Final = struct.Struct(">BQ")
_VACANT: Final = struct.Struct(">QBQ")
_RETIRED: Final = struct.Struct(">QQ")
_RETIRED_VALUE: Final = struct.Struct("<Qd")
_EXPIRY: Final = struct.Struct("<d")

ALLOCATED: Final = 0
"""State of a vacant slot that takes room on the disk."""
HOLE: Final = 1
"""State of a vacant slot that takes none."""


@dataclass(slots=True)
class Row(Entry):
    """What the index knows of one block: what the eviction rule needs, and where its record lies.

    Attributes:
        namespace: 32-byte digest.
        slot_bytes: size of the slots of its slab; equals ``num_bytes``.
        slot: number of its slot there.
        stamp: number of the write; the record carries it too.
        payload_bytes: of its record.
        num_tokens: of its record.
        created: wall time of the write, in seconds since 1970.
        found: times it was found, for people to look at.
    """

    namespace: bytes = b""
    slot_bytes: int = 0
    slot: int = 0
    stamp: int = 0
    payload_bytes: int = 0
    num_tokens: int = 0
    created: float = 0.0
    found: int = 0


@dataclass(slots=True)
class SlabCount:
    """Slots of one slab: all up to the highest ever used, those with room on the disk, and those of them without owner."""

    slots: int = 0
    allocated: int = 0
    vacant: int = 0


@dataclass(slots=True)
class State:
    """What the index remembers besides its tables. Every number only grows, but for ``floor`` and the counts."""

    capacity_bytes: int = 0
    policy: str = ""
    clock: int = 0
    floor: int = 0
    stamp: int = 0
    payload_bytes: int = 0
    blocks: int = 0
    queues: dict[int, int] = field(default_factory=dict)
    slabs: dict[int, SlabCount] = field(default_factory=dict)
    sighted: int = 0


def seal(key: bytes, body: bytes) -> bytes:
    """Return ``body`` with a checksum over it and its key."""
    return body + xxhash.xxh3_64_digest(key + body)


def unseal(key: bytes, value: bytes | None) -> bytes | None:
    """Return the body of a sealed value; None if there is none or it is damaged."""
    if value is None or value[-_SEAL_BYTES:] != xxhash.xxh3_64_digest(key + value[:-_SEAL_BYTES]):
        return None
    return value[:-_SEAL_BYTES]


def pack_row(row: Entry) -> bytes:
    """Return the sealed value of an entry; that of a ghost has no place."""
    body = _ENTRY.pack(
        row.parent is not None, row.parent or _NO_PARENT, row.num_bytes, row.cost, row.queue, row.rank, row.hits, row.children
    )  # fmt: skip
    if isinstance(row, Row) and row.stored:
        body += _PLACE.pack(
            row.namespace, row.slot_bytes, row.slot, row.stamp, row.payload_bytes, row.num_tokens, row.created,
            min(row.found, 0xFFFFFFFF),
        )  # fmt: skip
    return seal(row.key, body)


def unpack_row(key: bytes, value: bytes | None) -> Row | None:
    """Return the row of a value; None if there is none or it is damaged."""
    body = unseal(key, value)
    if body is None or len(body) < _ENTRY.size:
        return None
    has_parent, parent, num_bytes, cost, queue, rank, hits, children = _ENTRY.unpack_from(body)
    row = Row(key, parent if has_parent else None, num_bytes, cost, queue, rank, hits, children)
    if queue == GHOST:
        return row
    if len(body) != _ENTRY.size + _PLACE.size:
        return None
    (
        row.namespace, row.slot_bytes, row.slot, row.stamp, row.payload_bytes, row.num_tokens, row.created, row.found
    ) = _PLACE.unpack_from(body, _ENTRY.size)  # fmt: skip
    return row


def unpack_place(key: bytes, value: bytes | None) -> tuple[bytes, int, int, int, int, int, float, int] | None:
    """Return the place of a stored block, in the order of ``Row``'s fields; None where there is none.

    A third of the cost of ``unpack_row``, for a match of hundreds of keys.
    """
    if value is None or len(value) != _STORED_BYTES or unseal(key, value) is None:
        return None
    return _PLACE.unpack_from(value, _ENTRY.size)


def pack_state(key: bytes, state: State) -> bytes:
    """Return the sealed value of the state."""
    fields: dict[str, Any] = {name: getattr(state, name) for name in State.__slots__}
    fields["slabs"] = {size: (count.slots, count.allocated, count.vacant) for size, count in state.slabs.items()}
    return seal(key, json.dumps(fields).encode())


def unpack_state(key: bytes, value: bytes | None) -> State | None:
    """Return the state of a value; None if there is none or it is damaged."""
    body = unseal(key, value)
    if body is None:
        return None
    fields = json.loads(body)
    fields["queues"] = {int(queue): count for queue, count in fields["queues"].items()}
    fields["slabs"] = {int(size): SlabCount(*counts) for size, counts in fields["slabs"].items()}
    return State(**fields)


def order_key(entry: Entry) -> bytes:
    """Return the key under which an entry stands in the order of its queue."""
    return _ORDER.pack(entry.queue, entry.rank) + entry.key


def order_start(queue: int) -> bytes:
    """Return the key that comes before all of a queue, and after all of lower ones."""
    return bytes([queue])


def order_target(key: bytes) -> bytes:
    """Return the block's key out of one from ``order_key``."""
    return key[_ORDER.size :]


def vacant_key(slot_bytes: int, state: int, slot: int) -> bytes:
    """Return the key of a vacant slot: those of a slab side by side, those with room on the disk first."""
    return _VACANT.pack(slot_bytes, state, slot)


def unpack_vacant(key: bytes) -> tuple[int, int, int]:
    """Return slot size, state and slot of a key from ``vacant_key``."""
    slot_bytes, state, slot = _VACANT.unpack(key)
    return slot_bytes, state, slot


def retired_key(slot_bytes: int, slot: int) -> bytes:
    """Return the key of a slot that held a damaged record."""
    return _RETIRED.pack(slot_bytes, slot)


def unpack_retired(key: bytes) -> tuple[int, int]:
    """Return slot size and slot of a key from ``retired_key``."""
    slot_bytes, slot = _RETIRED.unpack(key)
    return slot_bytes, slot


def pack_quarantined(at: bytes, row: Row, now: float) -> bytes:
    """Return the sealed value of a retired slot: which block it held, which write, and when that was noticed."""
    return seal(at, row.key + _RETIRED_VALUE.pack(row.stamp, now))


def pack_expiry(key: bytes, expires: float) -> bytes:
    """Return the sealed value of a pin."""
    return seal(key, _EXPIRY.pack(expires))


def unpack_expiry(key: bytes, value: bytes | None) -> float | None:
    """Return when a pin expires, in seconds since 1970; None where there is none."""
    body = unseal(key, value)
    return None if body is None else float(_EXPIRY.unpack(body)[0])


def pack_manifest(digest: bytes, manifest: Mapping[str, Any]) -> bytes:
    """Return the sealed value of a namespace."""
    return seal(digest, json.dumps(manifest, sort_keys=True).encode())


def unpack_manifest(digest: bytes, value: bytes | None) -> dict[str, Any] | None:
    """Return a namespace's manifest; None where there is none."""
    body = unseal(digest, value)
    return None if body is None else dict(json.loads(body))
