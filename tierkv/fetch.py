"""Fetcher: brings cold tokens of a layer into memory that attention can read. Both readers fetch through it."""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierkv.block_table import Extent
from tierkv.interrupts import deferred_interrupt
from tierkv.scratch import Scratch
from tierkv.tier import Tier, Wire
from tierkv.transfer import Copy, Ticket, TransferEngine

if TYPE_CHECKING:
    import torch

    from tierkv.stores import Stores


class Piece(NamedTuple):
    """Cold tokens of one layer, and where they are wanted.

    Attributes:
        extent: where they lie, below the device.
        keys: ``[kv_heads, tokens, key_dim]`` in the device's scratch, any strides.
        values: ``[kv_heads, tokens, value_dim]``.
    """

    extent: Extent
    keys: "torch.Tensor"
    values: "torch.Tensor"


class Fetcher:
    """Submits fetches, orders the caller behind them and knows which are under way. One step at a time."""

    def __init__(
        self,
        stores: "Stores",
        scratch: Scratch,
        transfers: TransferEngine,
        count_copies: Callable[[Sequence[Copy]], None],
        num_readers: int = 1,
    ) -> None:
        """Make a fetcher over an engine's stores.

        Args:
            stores: where the tokens lie.
            scratch: whose host buffers disk reads pass through, where there are any.
            transfers: runs the fetches.
            count_copies: told of every batch of copies that is submitted.
            num_readers: disk reads of one fetch that run at the same time.
        """
        self.copy_seconds = 0.0
        self._stores = stores
        self._scratch = scratch
        self._transfers = transfers
        self._stalls = transfers.stall_clock()
        self._count_copies = count_copies
        self._num_readers = num_readers
        self._tickets: dict[Hashable, Ticket] = {}

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the caller's later work has stood still behind fetches."""
        return self._stalls.seconds

    def submit(self, key: Hashable, layer: int, buffer: int, pieces: Sequence[Piece]) -> None:
        """Start fetching the pieces of a layer into a buffer of the scratch; ``key`` is how they are waited for."""
        copies = [self._host_copy(layer, piece) for piece in pieces if piece.extent.tier is Tier.HOST]
        copies += self._disk_copies(layer, buffer, [piece for piece in pieces if piece.extent.tier is Tier.DISK])
        if copies:
            with deferred_interrupt():  # a copy under way that nobody knows of could outlive its slots
                self._tickets[key] = self._transfers.submit(copies)
            self._count_copies(copies)

    def order(self, key: Hashable) -> None:
        """Order the caller's later work behind a fetch; none of that name has nothing to wait for.

        Raises:
            RecordError: a cold slice cannot be read back.
            TransferTimeout: the fetch did not finish in time.
        """
        ticket = self._tickets.get(key)
        if ticket is None:
            return
        with self._stalls.waiting():
            self._transfers.order(ticket)

    def settle(self) -> None:
        """Wait for all fetches, those nobody collected too: their slots may be given up afterwards.

        Raises:
            TransferTimeout: one did not end in time: its slots are still being read. Can be tried again.
        """
        for ticket in self._tickets.values():
            self._transfers.settle(ticket)
        self.copy_seconds += sum(ticket.seconds for ticket in self._tickets.values())
        self._tickets = {}

    def _host_copy(self, layer: int, piece: Piece) -> Copy:
        pool, extent = self._stores.slab(Tier.HOST), piece.extent
        sources = pool.views(layer, extent.run, extent.first_token, piece.keys.shape[1])
        pairs = list(zip((piece.keys, piece.values), sources, strict=True))
        return Copy(Wire(Tier.HOST, Tier.DEVICE), piece.keys.nbytes + piece.values.nbytes, pairs)

    def _disk_copies(self, layer: int, buffer: int, pieces: Sequence[Piece]) -> list[Copy]:
        """Spread reads over as many copies as there are readers."""
        if not pieces:
            return []
        targets = [(piece.keys, piece.values) for piece in pieces]
        if self._stores.bounce:
            targets = self._scratch.pieces(layer, buffer, [keys.shape[1] for keys, _ in targets], Tier.HOST)
        share = -(-len(pieces) // self._num_readers)
        return [
            self._disk_copy(layer, pieces[begin : begin + share], targets[begin : begin + share])
            for begin in range(0, len(pieces), share)
        ]

    def _disk_copy(
        self, layer: int, pieces: Sequence[Piece], targets: "Sequence[tuple[torch.Tensor, torch.Tensor]]"
    ) -> Copy:
        store = self._stores.disk_store

        def load() -> None:
            for piece, (keys, values) in zip(pieces, targets, strict=True):
                store.read(layer, piece.extent.run, keys, values, piece.extent.first_token)

        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._stores.bounce:
            for piece, target in zip(pieces, targets, strict=True):
                pairs += zip((piece.keys, piece.values), target, strict=True)
        num_bytes = sum(keys.nbytes + values.nbytes for keys, values in targets)
        return Copy(Wire(Tier.DISK, Tier.DEVICE), num_bytes, pairs, load=load)


def clip(extents: Sequence[Extent], start: int, stop: int) -> Sequence[Extent]:
    """Return the parts of ``extents`` that lie between the positions ``start`` and ``stop``."""
    if not extents or (extents[0].start >= start and extents[-1].stop <= stop):
        return extents
    clipped = []
    for extent in extents:
        begin, end = max(extent.start, start), min(extent.stop, stop)
        if begin < end:
            first = extent.first_token + begin - extent.start
            clipped.append(extent._replace(first_token=first, start=begin, stop=end))
    return clipped
