"""What the commands of ``tierkv store`` share: how a store is opened, its chains of blocks, and how ages are written.

A store is opened with the capacity that it has, and beside whatever processes use it: the commands take part in its
locks like any other user of it.
"""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierkv.cli.console import BadInput
from tierkv.cli.process import nothing_to_clean_up
from tierkv.config import load_config

if TYPE_CHECKING:
    from tierkv.storage.prefix_open import OpenStore
    from tierkv.storage.prefix_reader import PrefixReader
    from tierkv.storage.prefix_store import PrefixStore

PathOption = Annotated[
    str | None,
    typer.Option(
        "--path", metavar="FOLDER", show_default=False, help="The disk.path of the store. Default: that of your config."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

QUEUE_BYTES: Final = 256 << 20
"""An import reads ahead of the disk by so much."""

_WAIT_SECONDS: Final = 30.0
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([smhdw])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SHOWN_DIGITS: Final = 16


@dataclass(frozen=True)
class Opened:
    """An open store.

    Attributes:
        store: it.
        warnings: what opening it found damaged and mended, or had to give up, a sentence each.
    """

    store: "PrefixStore"
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Chain:
    """A block that no other continues, with all that it continues.

    Attributes:
        leaf: key of that block.
        namespace: its digest.
        blocks: in the chain, those shared with other chains included.
        tokens: of all of them.
        num_bytes: of their KV.
        created: wall time at which the leaf was written.
        hits: times the leaf was found.
        pinned: whether the chain is kept from being evicted.
    """

    leaf: bytes
    namespace: bytes
    blocks: int
    tokens: int
    num_bytes: int
    created: float
    hits: int
    pinned: bool


@contextmanager
def opened(path: str | None) -> Iterator[Opened]:
    """Open the store of ``--path``, or of the user's config, and close it afterwards.

    Raises:
        BadInput: there is none, or it cannot be used.
    """
    config = load_config()
    root = config.disk.path if path is None else _folder(path)
    with nothing_to_clean_up():
        from tierkv.errors import StoreError
        from tierkv.storage.prefix_folder import PrefixFolder
        from tierkv.storage.prefix_store import PrefixStore

    warnings = _Collected()
    logger = logging.getLogger("tierkv.storage")
    logger.addHandler(warnings)
    try:
        folder = PrefixFolder(root)
        if not folder.exists:
            raise BadInput(_no_store(folder.path))
        store = PrefixStore.open(
            root,
            None,
            eviction=None,
            write_queue_bytes=QUEUE_BYTES,
            wait_seconds=_WAIT_SECONDS,
        )
    except StoreError as error:
        raise BadInput(str(error)) from None
    except OSError as error:
        raise BadInput(f"{root}: {error.strerror or error}; give the --path of a folder with a prefix store") from None
    finally:
        logger.removeHandler(warnings)
    try:
        yield Opened(store, warnings.messages)
    finally:
        store.close()


@dataclass(eq=False)
class _Collected(logging.Handler):
    """Remembers what is logged while a store is opened; whoever handles warnings still prints them."""

    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _folder(path: str) -> Path:
    if not path.strip():
        raise BadInput("--path is empty; give the disk.path of a prefix store")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(f"--path {path}: there is no such user; give the disk.path of a prefix store") from None


def _no_store(folder: Path) -> str:
    advice = "give the --path of one; a run with prefix.persist = true makes it"
    if (folder.parent / "format.json").exists():
        advice = f"did you mean --path {folder.parent.parent}?"
    return f"there is no prefix store in {folder}; {advice}"


# -- what the store's own methods do not say ------------------------------------------------------------------------------


def parts_of(store: "PrefixStore") -> "OpenStore":
    """Return index and slabs of a store, to look at only."""
    return store._parts  # noqa: SLF001 - the store lists namespaces, not blocks


def reader_of(store: "PrefixStore") -> "PrefixReader":
    """Return what checks single records of a store."""
    return store._reader  # noqa: SLF001 - the store checks all records, not one


def chains_of(store: "PrefixStore") -> list[Chain]:
    """Return all chains, the newest first; those of one moment, though others write meanwhile.

    Raises:
        StoreError: the index cannot be read.
    """
    now = time.time()
    links: dict[bytes, tuple[bytes | None, int, int]] = {}
    with parts_of(store).read() as book:
        leaves = []
        for row in book.all_rows():
            links[row.key] = row.parent, row.num_tokens, row.payload_bytes
            if not row.children:
                leaves.append((row, book.is_pinned(row.key, now)))
    sums: dict[bytes, tuple[int, int, int]] = {}
    found = [
        Chain(row.key, row.namespace, *_sum_up(row.key, links, sums), row.created, row.found, pinned)
        for row, pinned in leaves
    ]
    return sorted(found, key=lambda chain: (-chain.created, chain.leaf))


def _sum_up(
    leaf: bytes, links: dict[bytes, tuple[bytes | None, int, int]], sums: dict[bytes, tuple[int, int, int]]
) -> tuple[int, int, int]:
    """Return blocks, tokens and bytes from the first block on to ``leaf``; ``sums`` remembers those of all before it."""
    path = []
    at: bytes | None = leaf
    while at is not None and at in links and at not in sums:
        path.append(at)
        sums[at] = 0, 0, 0  # until it is known; a circle, which only damage makes, ends here
        at = links[at][0]
    blocks, tokens, num_bytes = (0, 0, 0) if at is None else sums.get(at, (0, 0, 0))
    for key in reversed(path):
        _, own_tokens, own_bytes = links[key]
        blocks, tokens, num_bytes = blocks + 1, tokens + own_tokens, num_bytes + own_bytes
        sums[key] = blocks, tokens, num_bytes
    return blocks, tokens, num_bytes


def only_one(kind: str, start: str, known: list[bytes], advice: str) -> bytes:
    """Return the one of ``known`` whose hexadecimal digits begin with ``start``.

    Args:
        kind: what they are called: ``leaf key``.
        start: as the user gave it.
        known: all there are.
        advice: how to see them.

    Raises:
        BadInput: none or several do; the message names those, or what comes near.
    """
    digits = start.strip().lower()
    if not re.fullmatch(r"[0-9a-f]{1,64}", digits):
        raise BadInput(f"{start!r} is no beginning of a {kind} (legal: 1 to 64 hexadecimal digits); {advice}")
    fitting = [one for one in known if one.hex().startswith(digits)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadInput(f"{len(fitting)} {kind}s begin with {digits}: {_few(fitting)}; give more digits")
    if not known:
        raise BadInput(f"no {kind} begins with {digits}: the store is empty")
    near = sorted(known, key=lambda one: (-_common(one.hex(), digits), one))
    raise BadInput(f"no {kind} begins with {digits}; the nearest: {_few(near, 3)}; {advice}")


def _few(keys: list[bytes], most: int = 5) -> str:
    return ", ".join([key.hex()[:_SHOWN_DIGITS] for key in keys[:most]] + ["..."] * (len(keys) > most))


def _common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- ages -----------------------------------------------------------------------------------------------------------------


def parse_duration(text: str, option: str) -> float:
    """Read a duration like ``30m`` as seconds.

    Raises:
        BadInput: it is none.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise BadInput(f"{option}: {text!r} is not a duration (legal: 30s, 45m, 12h, 7d, 2w)")
    return seconds


def format_age(seconds: float | None) -> str:
    """Return an age in the largest unit of which there are two or more: ``36h``."""
    if seconds is None:
        return ""
    unit = next((unit for unit in ("d", "h", "m") if seconds >= 2 * _SECONDS[unit]), "s")
    return f"{int(seconds // _SECONDS[unit])}{unit}"
