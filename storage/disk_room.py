"""What fits into an LMDB store of bounded file bytes. Pure arithmetic, with terms that were measured.

``tests/storage/test_disk_room.py`` churns full stores and holds these promises to account.
"""

from collections.abc import Sequence

from tierkv.storage.codec import PAGE_BYTES, page_rounded_bytes


def map_bytes(capacity_bytes: int) -> int:
    """Return the largest map whose files stay within ``capacity_bytes`` of allocated blocks.

    Beside the data there are the lock file and the file system's own block lists (ext4 counts them as the file's).
    """
    return max(0, capacity_bytes - capacity_bytes // 512 - 65536) // PAGE_BYTES * PAGE_BYTES


def usable_sets(capacity_bytes: int, record_sizes: Sequence[int], write_batch: int) -> int:
    """Return how many sets of records, one of each size, a store of this capacity always has room for.

    Any mix of overwrites and deletes, in any order, fits as long as no more sets are live. Keys of at most 64 bytes.
    Pages freed by the two latest commits wait for reuse, 3 batches at most as measured, and a read under way holds back
    one batch more; the index takes up to a page for 25 records; sizes that differ leave gaps, 5 % in the worst mix
    found. About twice that is set aside.
    """
    pages = map_bytes(capacity_bytes) // PAGE_BYTES
    record_pages = [page_rounded_bytes(size) // PAGE_BYTES for size in record_sizes]
    waiting = (4 * write_batch + 8) * (max(record_pages) + 1) + 32
    filled = 0.99 if len(set(record_pages)) == 1 else 0.9
    return max(0, int((pages - waiting) * filled / (sum(record_pages) + len(record_pages) / 20)))


def usable_records(capacity_bytes: int, record_bytes: int, write_batch: int) -> int:
    """Return how many records of ``record_bytes`` a store of this capacity always has room for (``usable_sets``)."""
    return usable_sets(capacity_bytes, [record_bytes], write_batch)
