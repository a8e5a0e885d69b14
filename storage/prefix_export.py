"""A chain of blocks as one file, to take elsewhere. Nothing in it is unpickled or believed without a check.

    magic "TKVX", format version (u16), bytes of the header (u32)
    header: JSON with the namespace's digest and manifest, and for each block its key, parent, cost and record's bytes
    the records, one after another (``storage.codec``)
    xxh3_128 of all before

Keys are computed again from the token ids when it is read, so a file cannot put bytes under another prompt's name. It
can still hold wrong KV under the right name: take files only from whom you would take the model's weights.
"""

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from tierkv.errors import StoreError
from tierkv.keys import chain_keys
from tierkv.storage.codec import ALL_LAYERS, Expected, Record, decode, encode, record_bytes
from tierkv.storage.prefix_index import NAMESPACES
from tierkv.storage.prefix_open import OpenStore
from tierkv.storage.prefix_queue import Block
from tierkv.storage.prefix_rows import Row, unpack_manifest

MAGIC: Final = b"TKVX"
FORMAT_VERSION: Final = 1

_START: Final = struct.Struct("<4sHI")
_CHECKSUM_BYTES: Final = 16
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What a file holds, or what of it was taken in.

    Attributes:
        namespace: 32-byte digest.
        manifest: of the namespace.
        keys: of the blocks, first block first.
        num_bytes: of the file.
        stored: how many of the blocks are in the store now.
    """

    namespace: bytes
    manifest: dict[str, Any]
    keys: list[bytes]
    num_bytes: int
    stored: int


def chain_of(store: OpenStore, leaf: bytes) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of a block and all that it continues, first block first, and their namespace's manifest.

    Raises:
        StoreError: one of them is not stored.
    """
    chain: list[Row] = []
    key: bytes | None = leaf
    with store.read() as book:
        while key is not None:
            row = book.find(key)
            if row is None or not row.stored or len(chain) > book.state.blocks:
                raise StoreError(f"block {key.hex()} is not in {store.folder.path}; export one that `ls` counts")
            chain.append(row)
            key = row.parent
        digest = chain[0].namespace
        manifest = unpack_manifest(digest, book.tables.get(NAMESPACES, digest)) or {}
    return chain[::-1], manifest


def write_chain(
    path: Path, rows: Sequence[Row], manifest: dict[str, Any], read: Callable[[Row, Callable[[Record], None]], None]
) -> ExportReport:
    """Write blocks to a file, in place of one that is there.

    Args:
        path: of the file; whoever looks sees all of it or none.
        rows: of the blocks, first block first.
        manifest: of their namespace.
        read: calls its second argument with the checked record of a row.

    Raises:
        StoreError: the file cannot be written, or a block cannot be read.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with os.fdopen(os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            header = {
                "namespace": rows[0].namespace.hex(),
                "manifest": manifest,
                "blocks": [_describe(row) for row in rows],
            }
            text = json.dumps(header, sort_keys=True).encode()
            out = _Summed(file)
            out.write(_START.pack(MAGIC, FORMAT_VERSION, len(text)))
            out.write(text)
            for row in rows:
                read(row, lambda record: out.write(encode(record.header, record.token_ids, [record.payload])))
            out.write(out.checksum.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        new.replace(path)
    except StoreError:
        new.unlink(missing_ok=True)
        raise
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return ExportReport(rows[0].namespace, manifest, [row.key for row in rows], size, len(rows))


def read_chain(path: Path, put: Callable[[bytes, Block], bool]) -> ExportReport:
    """Check a file, and hand its blocks over, first block first.

    Args:
        path: of the file.
        put: called with the namespace and a block, whose payload is its own; says whether it was taken. The first that
            is not ends it, since others continue it.

    Raises:
        StoreError: the file cannot be read, or anything in it is not as it should be.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(file, path)
            keys, stored = [], 0
            key = namespace = bytes.fromhex(header["namespace"])
            for number, one in enumerate(header["blocks"]):
                record = _read_record(file, one["bytes"], namespace)
                own = _own_key(key, record, one["key"])
                keys.append(own)
                if stored == number:
                    parent = key if number else None
                    block = Block(own, parent, record.token_ids, (record.payload,), float(one["cost"]))
                    stored += put(namespace, block)
                key = own
            return ExportReport(namespace, header["manifest"], keys, path.stat().st_size, stored)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise StoreError(f"{path} is damaged: {error}") from error


class _Summed:
    """A file that is written to, and the checksum of what was."""

    def __init__(self, file: BinaryIO) -> None:
        self.checksum = xxhash.xxh3_128()
        self._file = file

    def write(self, data: bytes) -> None:
        self.checksum.update(data)
        self._file.write(data)


def _describe(row: Row) -> dict[str, Any]:
    return {"key": row.key.hex(), "cost": row.cost, "bytes": record_bytes(row.payload_bytes, row.num_tokens)}


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Check the file as a whole and return its header; the file then stands before the first record."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(_START.size)
    if len(start) < _START.size or start[:4] != MAGIC:
        raise StoreError(f"{path} is no exported prefix; it does not begin with {MAGIC!r}")
    _, version, header_bytes = _START.unpack(start)
    if version != FORMAT_VERSION:
        raise StoreError(f"{path} has format {version}; this tierkv reads {FORMAT_VERSION}, export it again")
    checksum = xxhash.xxh3_128(start)
    remaining = size - _START.size - _CHECKSUM_BYTES
    while remaining > 0 and (chunk := file.read(min(remaining, _CHUNK_BYTES))):
        checksum.update(chunk)
        remaining -= len(chunk)
    if remaining or file.read() != checksum.digest():
        raise StoreError(f"{path} is damaged: its checksum does not match its {size} bytes")
    file.seek(_START.size)
    header = dict(json.loads(file.read(header_bytes)))
    sizes = [int(one["bytes"]) for one in header["blocks"]]
    if not isinstance(header["manifest"], dict) or any(one <= 0 for one in sizes):
        raise StoreError(f"{path} is damaged: its header cannot be understood")
    if _START.size + header_bytes + sum(sizes) + _CHECKSUM_BYTES != size:
        raise StoreError(f"{path} is damaged: its blocks do not fill its {size} bytes")
    return header


def _read_record(file: BinaryIO, num_bytes: int, namespace: bytes) -> Record:
    return decode(file.read(num_bytes), Expected(namespace=namespace, layer=ALL_LAYERS))


def _own_key(parent: bytes, record: Record, said: str) -> bytes:
    """Return the key of a block, computed from the one before it and its token ids."""
    num_tokens = len(record.token_ids)
    keys = chain_keys(parent, record.token_ids, num_tokens) if num_tokens else []
    if record.header.num_tokens != num_tokens or [key.hex() for key in keys] != [said]:
        raise ValueError(f"block {said} is not the one that its key names")
    return keys[0]
