"""PrefixIndex: the prefix store's tables, in one small LMDB environment that several processes share.

Everything that the store decides it decides in a write transaction here: LMDB's lock makes that one process at a time,
and its commit makes it all or nothing, wherever a process is killed. Payloads never come near it.

- **The map never grows**: ``page_limit`` says how many pages may be in use, so that each commit finds free ones.
- **Damage is found before LMDB maps the file**: LMDB trusts what it reads, and a flipped bit can end the process. A file
  that was not closed cleanly goes through py-lmdb's offline verifier first, which only reads it (``find_damage``).
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import lmdb
import lmdb.verify

from tierkv.errors import StoreError, StoreFull
from tierkv.storage.codec import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

TABLES: Final = (
    b"state", b"entries", b"order", b"vacant", b"retired", b"namespaces", b"pins", b"sighted", b"notes",
)  # fmt: skip
STATE, ENTRIES, ORDER, VACANT, RETIRED, NAMESPACES, PINS, SIGHTED, NOTES = TABLES

_MAX_READERS: Final = 512
LOCK_BYTES: Final = 65536
"""More than LMDB's lock file has with so many readers."""

_SAFE_SHARE: Final = 0.3
"""Of a small map: a transaction may write every page anew while those of the two before it are not free yet."""
_MOST_PAGES_WRITTEN: Final = 6000
"""In a large one: more than three transactions ever write."""


class IndexBroken(StoreError):
    """LMDB found its own file damaged. Nothing can be saved of it."""


class Tables:
    """The tables as one transaction sees them. Belongs to the thread that began it; values are copies."""

    __slots__ = ("_handles", "_transaction")

    def __init__(self, transaction: "lmdb.Transaction[bytes]", handles: "dict[bytes, lmdb._Database]") -> None:
        self._transaction = transaction
        self._handles = handles

    def get(self, table: bytes, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        return self._transaction.get(key, db=self._handles[table])

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        """Set the value of a key."""
        self._transaction.put(key, value, db=self._handles[table])

    def delete(self, table: bytes, key: bytes) -> bool:
        """Delete a key; say whether it was there."""
        return self._transaction.delete(key, db=self._handles[table])

    def items(self, table: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values from ``start`` on, ascending. Whoever changes the table stops iterating."""
        with self._transaction.cursor(self._handles[table]) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from cursor

    def count(self, table: bytes) -> int:
        """Return the number of keys."""
        return self._transaction.stat(self._handles[table])["entries"]

    def pages(self) -> int:
        """Return the pages that all tables take."""
        stats = [self._transaction.stat(handle) for handle in self._handles.values()]
        return sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    def clear(self, table: bytes) -> None:
        """Delete all keys."""
        self._transaction.drop(self._handles[table], delete=False)


class PrefixIndex:
    """An open index. Any thread may begin a transaction; a write waits for those of all processes.

    Attributes:
        map_bytes: most bytes that its file can have.
        page_limit: pages that the tables may take before something must be evicted.
    """

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Open or make it.

        Args:
            path: directory; made if it is missing.
            map_bytes: bound of its file, the same for all processes; 0: as the file says.

        Raises:
            StoreError: it cannot be opened.
        """
        self._path = path
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            self._environment = lmdb.open(
                str(path), map_size=map_bytes, mode=0o600, max_dbs=len(TABLES), max_readers=_MAX_READERS,
                max_spare_txns=4, lib_version=0,
            )  # fmt: skip
            try:
                self._environment.reader_check()
                with self._environment.begin(write=True) as transaction:
                    self._handles = {name: self._environment.open_db(name, transaction) for name in TABLES}
            except BaseException:
                self._environment.close()
                raise
        except (lmdb.Error, OSError) as error:
            raise StoreError(f"cannot open the prefix index {path}: {error}") from error
        self.map_bytes = self._environment.info()["map_size"]
        self.page_limit = page_limit(self.map_bytes)

    @contextmanager
    def read(self) -> Iterator[Tables]:
        """See the tables as they are now. Keep it short: pages are not used again meanwhile.

        Raises:
            StoreError: LMDB failed.
        """
        with self._translated(), self._environment.begin() as transaction:
            yield Tables(transaction, self._handles)

    @contextmanager
    def write(self) -> Iterator[Tables]:
        """Change the tables; committed at the end of the block, given up if it raises.

        Raises:
            StoreFull: the map is full; nothing was changed.
            StoreError: LMDB failed; nothing was changed.
        """
        with self._translated(), self._environment.begin(write=True) as transaction:
            yield Tables(transaction, self._handles)

    def forget_dead_readers(self) -> None:
        """Let pages be used again that killed processes were reading.

        Raises:
            StoreError: LMDB failed.
        """
        with self._translated():
            self._environment.reader_check()

    def copy_to(self, path: Path) -> None:
        """Write a copy without free pages to a directory, which is made anew.

        Raises:
            StoreError: LMDB failed.
            OSError: the directory cannot be made.
        """
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        with self._translated():
            self._environment.copy(str(path), compact=True)

    def close(self) -> None:
        """Close it. No transaction may be open in this process."""
        self._environment.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull(f"the prefix index {self._path} is full: {error}") from error
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError) as error:
            raise IndexBroken(f"the prefix index {self._path} is damaged: {error}; restart to begin anew") from error
        except lmdb.Error as error:
            raise StoreError(f"the prefix index {self._path} failed: {error}") from error


def page_limit(map_bytes: int) -> int:
    """Return how many pages the tables may take in a map of that size, so that every commit finds free ones."""
    pages = map_bytes // PAGE_BYTES
    return max(int(_SAFE_SHARE * pages), pages - _MOST_PAGES_WRITTEN)


def find_damage(path: Path) -> str:
    """Say what is wrong with an index that nobody has open; empty where LMDB can be trusted with it.

    Reads the whole file, about 0.3 s for 100,000 blocks.
    """
    verify = cast("Callable[[str], list[str]]", lmdb.verify.verify)
    try:
        problems = verify(str(path))
    except Exception as error:  # noqa: BLE001 - whatever a broken file does to its parser, it is broken
        return f"{type(error).__name__}: {error}"
    return problems[0] if problems else ""
