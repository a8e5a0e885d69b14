"""PrefixOffers: what of the full blocks goes to the prefix store, and when. Decoding never waits for it."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierkv.errors import StoreError
from tierkv.payload import WHOLE, Piece, pack
from tierkv.storage.codec import record_bytes
from tierkv.storage.prefix_store import Block

if TYPE_CHECKING:
    from tierkv.config import PrefixConfig
    from tierkv.layout import BlockLayout
    from tierkv.storage.prefix_store import PrefixStore
    from tierkv.stores import Stores

_POLL_SECONDS: Final = 0.002
_MOST_WAITING: Final = 65536
"""Blocks that wait at most; a store that takes none for so long does not get the oldest any more."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    namespace: bytes
    key: bytes
    parent: bytes | None
    ids: tuple[int, ...]
    cost: float
    piece: Piece


class PrefixOffers:
    """Between forwards and the store's queue. Called by the thread inside the engine's gate.

    What is offered waits as a reference, not as bytes: a block that is gone before the queue has room for it is shed.

    Attributes:
        shed: blocks that should have been written and were not.
    """

    def __init__(self, layout: "BlockLayout", stores: "Stores", config: "PrefixConfig", store: "PrefixStore") -> None:
        """Write blocks of ``stores`` to ``store`` as ``config`` says."""
        self._layout = layout
        self._stores = stores
        self._config = config
        self._store = store
        self._record_bytes = record_bytes(layout.block_bytes, layout.block_size)
        self._backlog: deque[_Waiting] = deque()
        self.shed = 0

    @property
    def waiting(self) -> int:
        """Blocks that wait for room in the store's queue."""
        return len(self._backlog)

    def offer(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        new: range,
        ids: Sequence[int],
        costs: Sequence[float],
        pieces: Sequence[Sequence[Piece]],
    ) -> None:
        """Take blocks into account that have become full.

        Args:
            namespace: digest of all that decides KV besides the ids.
            keys: of the sequence.
            new: which of them are offered.
            ids: of their tokens, one after another.
            costs: to compute each again.
            pieces: where the bytes of each lie now.
        """
        if self._config.write_policy == "never":
            return
        wanted = [True] * len(new)
        if self._config.write_policy == "second_sighting":
            wanted = self._store.sighted([keys[index] for index in new])
        size = self._layout.block_size
        for number, index in enumerate(new):
            if not wanted[number]:
                continue
            parent = keys[index - 1] if index else None
            block_ids = tuple(ids[number * size : (number + 1) * size])
            where = pieces[number]
            if len(where) == 1 and where[0].into == WHOLE:
                where[0].block.sealed = True  # it waits: whoever crops into it gets a copy to write to
                if len(self._backlog) == _MOST_WAITING:
                    self._backlog.popleft()
                    self.shed += 1
                self._backlog.append(_Waiting(namespace, keys[index], parent, block_ids, costs[number], where[0]))
            else:  # a row that is shifted by its padding: its last block is still written to, so now or never
                self._put(namespace, Block(keys[index], parent, block_ids, (), costs[number]), where)

    def drain(self, wait_seconds: float = 0.0) -> None:
        """Hand over what the queue has room for; wait so long for more room."""
        deadline = time.monotonic() + wait_seconds
        while self._backlog:
            if self._store.room < self._record_bytes:
                if time.monotonic() >= deadline or self._store.failed is not None:
                    break
                time.sleep(_POLL_SECONDS)
                continue
            first = self._backlog.popleft()
            if not self._store.wants(first.namespace, first.key, first.parent):
                continue  # another row, or another process, was faster
            if first.piece.block.slots:
                block = Block(first.key, first.parent, first.ids, (), first.cost)
                self._put(first.namespace, block, [first.piece])
            else:
                self.shed += 1
        if wait_seconds:
            self.shed += len(self._backlog)
            self._backlog.clear()

    def _put(self, namespace: bytes, block: Block, pieces: Sequence[Piece]) -> None:
        payload: bytearray | None = None
        if self._store.room >= self._record_bytes:
            try:
                payload = pack(self._layout, self._stores, pieces)
            except StoreError:  # a spilled block that cannot be read: whoever needs it will hear of it
                payload = None
        if payload is None:
            self.shed += 1
            return
        whole = Block(block.key, block.parent, block.token_ids, (payload,), block.cost)
        self.shed += not self._store.put(namespace, whole)
