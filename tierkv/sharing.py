"""SharedBlocks: which sealed blocks in memory hold which keys, and which of them nobody uses any more.

A block with a key can be found by any sequence that begins alike. When its last sequence lets go of it, it is kept: it
costs nothing until its room is wanted, and then the eviction rule says which goes first. The book holds unused blocks
only, so a rule never looks at one that a sequence needs.

Pure bookkeeping, no I/O. Not thread-safe: the manager owns it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Final

from tierkv.block_table import Block
from tierkv.eviction import make_policy
from tierkv.eviction_ledger import Entry, MemoryLedger
from tierkv.tier import Tier

_SIZE = 1 << 20
"""All blocks of an engine are of one size, and any will do; rules weigh costs against bytes, so it is a likely one."""

_FEW: Final = 32
"""Blocks that are looked at before a list of all is made."""


class SharedBlocks:
    """An index of blocks by key. ``find`` never returns a block whose bytes are not all there.

    Attributes:
        on_forgotten: told the key of each unused block that goes.
    """

    def __init__(self, eviction: str) -> None:
        """Make an empty index whose unused blocks go by the rule of that name."""
        self._policy = make_policy(eviction)
        self._ledger = MemoryLedger()
        self._blocks: dict[bytes, Block] = {}
        self._ids: dict[bytes, tuple[int, ...]] = {}
        self._unused: dict[Block, None] = {}  # let go of first before the others
        # Those of them that lie on the device or are on their way there, in the same order, and some that were and have
        # left it. None comes there otherwise: only blocks that a sequence holds move up.
        self._maybe_on_device: dict[Block, None] = {}
        self.on_forgotten: Callable[[bytes], None] | None = None

    @property
    def num_unused(self) -> int:
        """Blocks that are kept although no sequence holds them."""
        return len(self._unused)

    @property
    def num_saved(self) -> int:
        """Blocks that would be there a second time if nobody shared."""
        return sum(block.references - 1 for block in list(self._blocks.values()) if block.references > 1)

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, key: bytes, ids: Sequence[int]) -> Block | None:
        """Return the block that holds a key and these ids, or None: equal keys of other ids would be a wrong token."""
        block = self._blocks.get(key)
        return block if block is not None and self._ids[key] == tuple(ids) else None

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def is_kept(self, block: Block) -> bool:
        """Whether a block is unused and kept."""
        return block in self._unused

    def unused_on_device(self) -> Iterator[Block]:
        """Yield unused blocks with a copy on the device, those that were let go of first before the others."""
        first = list(islice(self._maybe_on_device, _FEW))  # nearly always enough, and all may be very many
        yield from self._still_on_device(first)
        if len(first) == _FEW:
            seen = set(first)
            yield from self._still_on_device([block for block in self._maybe_on_device if block not in seen])

    def _still_on_device(self, blocks: Sequence[Block]) -> Iterator[Block]:
        device = Tier.DEVICE
        for block in blocks:
            if device in block.slots:
                yield block
            elif device not in block.arriving:
                self._maybe_on_device.pop(block, None)

    def add(self, block: Block, key: bytes, ids: Sequence[int], parent: bytes | None, cost: float) -> None:
        """Name a full block that a sequence holds; it is sealed by that.

        Args:
            block: it.
            key: its name.
            ids: of its tokens.
            parent: key of the block before it, or None.
            cost: to compute it again, in any measure.

        Raises:
            ValueError: the key is taken, or the block has one or is nobody's.
        """
        if key in self._blocks or block.key is not None or not block.references:
            raise ValueError("a key names one block, and a block in use has one key")
        block.key, block.sealed = key, True
        self._blocks[key], self._ids[key] = block, tuple(ids)
        self._policy.insert(self._ledger, Entry(key, parent, _SIZE, cost))

    def use(self, block: Block) -> None:
        """Give a block to one more sequence. Of a sequence, the last block comes first."""
        block.references += 1
        self._unused.pop(block, None)
        self._maybe_on_device.pop(block, None)
        assert block.key is not None
        entry = self._ledger.find(block.key)
        assert entry is not None
        self._policy.touch(self._ledger, entry)

    def keep(self, block: Block) -> bool:
        """The last sequence let go of a block; return whether it is kept."""
        if block.key is None:
            return False
        self._unused[block] = None
        self._maybe_on_device[block] = None
        return True

    def victim(self, tiers: Collection[Tier] = tuple(Tier)) -> Block | None:
        """Return the unused block that goes first, of those whose highest copy is in ``tiers``; the caller forgets it."""

        def may_go(entry: Entry) -> bool:
            block = self._blocks[entry.key]
            return block in self._unused and block.tier in tiers

        entry = self._policy.victim(self._ledger, may_go) if self._unused else None
        if entry is not None:
            return self._blocks[entry.key]
        # The rule holds a block as long as one that continues it is in use, which may have another copy before it.
        return next((block for block in reversed(self._unused) if block.slots and block.tier in tiers), None)

    def forget(self, block: Block) -> None:
        """An unused block goes; nobody finds its key any more."""
        assert block.key is not None
        entry = self._ledger.find(block.key)
        assert entry is not None
        self._policy.evicted(self._ledger, entry)
        del self._unused[block], self._blocks[block.key], self._ids[block.key]
        self._maybe_on_device.pop(block, None)
        key, block.key = block.key, None
        if self.on_forgotten is not None:
            self.on_forgotten(key)

    def disown(self) -> list[Block]:
        """Forget every key, since what they stood for has changed; return the blocks that were unused."""
        unused = list(self._unused)
        for block in self._blocks.values():
            block.key = None
        self._blocks.clear()
        self._ids.clear()
        self._unused.clear()
        self._maybe_on_device.clear()
        self._ledger = MemoryLedger()
        return unused
