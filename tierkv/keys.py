"""Keys: names of blocks that depend on every token up to their end, and on nothing of the process that makes them.

    key(i) = sha256(key(i-1) || ids of block i),    key(-1) = digest of the namespace

Ids are hashed as little-endian int64, so that no process, platform or PYTHONHASHSEED has a say. The namespace holds all
that decides KV besides the ids; who knows neither it nor its salt cannot guess a key. Equal keys mean equal KV but for
rounding; whoever serves a stored block compares its ids as well, and so a collision would be a miss.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

KEY_BYTES = 32


def namespace_digest(parts: Mapping[str, Any]) -> bytes:
    """Return the 32-byte digest of everything besides ids that decides KV: model, weights, dtype, layout, salt.

    Args:
        parts: JSON values by name; their order does not matter.

    Raises:
        TypeError: a value is none that JSON knows.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def chain_keys(start: bytes, ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the key of every full block of a sequence.

    Args:
        start: the namespace's digest, or the key of the block before the first of ``ids``.
        ids: token ids.
        block_size: tokens in a block; what is left over at the end has no key.
    """
    keys = []
    key = start
    for begin in range(0, len(ids) - block_size + 1, block_size):
        key = hashlib.sha256(key + struct.pack(f"<{block_size}q", *ids[begin : begin + block_size])).digest()
        keys.append(key)
    return keys
