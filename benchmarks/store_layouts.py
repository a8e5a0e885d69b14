"""Slab files or LMDB values: how fast the same records are read back, beside a plain read of one file.

Every reader copies the payload into memory of its own, so all move the same bytes as far as a cache that serves them:
raw reads check nothing, the two stores check each record completely.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tierkv.benchmarks.machine import drop_page_cache
from tierkv.storage.codec import ALL_LAYERS, Expected, RecordHeader, decode, encode, record_bytes
from tierkv.storage.disk import LmdbStore
from tierkv.storage.prefix_slab import slot_bytes_of
from tierkv.storage.prefix_store import Block, Found, PrefixStore

TOKENS: Final = 256
NAMESPACE: Final = hashlib.sha256(b"store_layouts").digest()
THREADS: Final = (1, 2)
_MIB: Final = 1 << 20

Read = Callable[[int, memoryview], None]
"""Reads the payload of a block into memory of the caller's."""


def measure(folder: Path, num_blocks: int, block_bytes: int, rounds: int = 5, *, cold: bool = True) -> dict[str, Any]:
    """Write the same records three ways, then read them back in a shuffled order; the ways take turns.

    Args:
        folder: where the files go; three times ``num_blocks * block_bytes``, removed afterwards.
        num_blocks: records.
        block_bytes: payload of each.
        rounds: timed passes of each way, after one that is not.
        cold: drop the page cache before each pass.

    Returns:
        Medians and all passes in MB/s by way and number of threads, and the share of pages that stayed in the cache.
    """
    ids = tuple(range(TOKENS))
    keys = [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(num_blocks)]
    place = Path(tempfile.mkdtemp(dir=folder, prefix="store-layouts-"))
    try:
        with ExitStack() as stack:
            readers = {
                "preadv": _raw(stack, place / "raw", num_blocks, block_bytes),
                "slab": _slab(stack, place / "slab", keys, ids, block_bytes),
                "lmdb": _lmdb(stack, place / "lmdb", keys, ids, block_bytes),
            }
            passes: dict[str, list[float]] = {f"{name}-{threads}": [] for name in readers for threads in THREADS}
            stayed = 0.0
            for turn in range(1 + rounds):
                for name, read in readers.items():
                    for threads in THREADS:
                        if cold:
                            stayed = max(stayed, drop_page_cache(place))
                        seconds = _read_all(read, num_blocks, block_bytes, threads, seed=turn)
                        if turn:
                            passes[f"{name}-{threads}"].append(num_blocks * block_bytes / seconds / 1e6)
    finally:
        shutil.rmtree(place)
    return {
        "num_blocks": num_blocks,
        "block_bytes": block_bytes,
        "page_cache": "dropped" if cold else "warm",
        "share_of_pages_that_stayed": round(stayed, 4),
        "median_mb_per_second": {name: round(statistics.median(rates)) for name, rates in passes.items()},
        "mb_per_second": {name: [round(rate) for rate in rates] for name, rates in passes.items()},
    }


def _read_all(read: Read, num_blocks: int, block_bytes: int, threads: int, seed: int) -> float:
    """Read every block once, in an order of its own for each seed; return the seconds."""
    order = list(range(num_blocks))
    random.Random(seed).shuffle(order)
    errors: list[BaseException] = []
    targets = [memoryview(bytearray(block_bytes)) for _ in range(threads)]

    def work(part: int) -> None:
        try:
            for number in order[part::threads]:
                read(number, targets[part])
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that measures
            errors.append(error)

    workers = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    if errors:
        raise errors[0]
    return seconds


def _payload(number: int, num_bytes: int) -> bytes:
    return random.Random(number).randbytes(num_bytes)


def _raw(stack: ExitStack, path: Path, num_blocks: int, block_bytes: int) -> Read:
    size = slot_bytes_of(record_bytes(block_bytes, TOKENS))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    stack.callback(os.close, descriptor)
    for number in range(num_blocks):
        os.pwrite(descriptor, _payload(number, size), number * size)
    os.fsync(descriptor)

    def read(number: int, target: memoryview) -> None:
        if os.preadv(descriptor, [target], number * size) != len(target):
            raise OSError("a short read")

    return read


def _slab(stack: ExitStack, path: Path, keys: Sequence[bytes], ids: tuple[int, ...], block_bytes: int) -> Read:
    size = slot_bytes_of(record_bytes(block_bytes, len(ids)))
    capacity = 2 * len(keys) * size + 64 * _MIB
    store = PrefixStore.open(path, capacity, write_queue_bytes=8 * size)
    stack.callback(store.close)
    for number, key in enumerate(keys):
        block = Block(key, None, ids, [_payload(number, block_bytes)])
        while not store.put(NAMESPACE, block):
            time.sleep(0.001)
    store.flush(600)
    found: list[Found] = [one for key in keys for one in store.match(NAMESPACE, [key])]
    if len(found) != len(keys):
        raise OSError("the store has shed blocks; give it more room")

    def read(number: int, target: memoryview) -> None:
        def use(payload: memoryview) -> None:
            target[:] = payload

        store.read(found[number], ids, block_bytes, use)

    return read


def _lmdb(stack: ExitStack, path: Path, keys: Sequence[bytes], ids: tuple[int, ...], block_bytes: int) -> Read:
    size = slot_bytes_of(record_bytes(block_bytes, len(ids)))
    capacity = 2 * len(keys) * size + 64 * _MIB
    store = LmdbStore(path, capacity, write_batch=16, write_queue_bytes=8 * size, durable=True)
    stack.callback(store.close)
    for number, key in enumerate(keys):
        header = RecordHeader(NAMESPACE, ALL_LAYERS, number, len(ids))
        store.put(key, encode(header, ids, [_payload(number, block_bytes)]))
    store.flush(600)

    def read(number: int, target: memoryview) -> None:
        expected = Expected(
            namespace=NAMESPACE, layer=ALL_LAYERS, stamp=number, num_tokens=len(ids), token_ids=ids,
            payload_bytes=block_bytes,
        )  # fmt: skip

        def use(value: memoryview) -> None:
            target[:] = decode(value, expected).payload

        store.get(keys[number], use)

    return read


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--block-bytes", type=int, default=_MIB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    record = measure(
        arguments.folder, arguments.blocks, arguments.block_bytes, arguments.rounds, cold=not arguments.warm
    )
    if arguments.json:
        print(json.dumps(record, indent=2))
        return
    for name, rate in record["median_mb_per_second"].items():
        print(f"{name:10} {rate:6} MB/s   {min(record['mb_per_second'][name])} to {max(record['mb_per_second'][name])}")


if __name__ == "__main__":
    main()
