"""What always holds of the simulated world, whatever was done to it."""

from collections import Counter

from tests.manager_memory import LAYERS
from tests.manager_sharing import Sharing
from tierkv.block_table import Block
from tierkv.tier import Tier


class Checks(Sharing):
    """Budgets, references, the manager's books, and the bytes of every copy."""

    def used_blocks(self) -> dict[Block, None]:
        return dict.fromkeys(block for row in self.rows for block in row.table.blocks)

    def live_blocks(self) -> dict[Block, None]:
        return self.used_blocks() | dict.fromkeys(self.kept_blocks())

    def check(self) -> None:
        """Budgets, references and the book-keeping, after every operation."""
        manager = self.manager
        assert manager.moves == set(self.flights)
        holders = Counter(block for row in self.rows for block in row.table.blocks)
        kept = self.kept_blocks()
        assert len(kept) == manager.shared.num_unused
        assert not holders.keys() & set(kept)
        holders.update(dict.fromkeys(kept, 0))
        references: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        census = {tier: [0, 0] for tier in Tier}
        arriving: dict[Block, dict[Tier, int]] = {}
        for block, count in holders.items():
            assert block.references == count
            assert block.slots, "a live block without a readable copy"
            for tier, slot in block.slots.items():
                references[tier][slot] += 1
                assert references[tier][slot] == 1, "two blocks in one slot"
                census[tier][tier is not min(block.slots)] += 1
        for move in self.flights:
            references[move.wire.source][move.source_slot] += 1
            references[move.wire.destination][move.slot] += 1
            if move.tail_of is None:
                arriving.setdefault(move.target, {})[move.wire.destination] = move.slot
        for block in holders.keys() | arriving.keys():
            assert block.arriving == arriving.get(block, {})
        for tier, pool in manager.pools.items():
            assert pool.used == len(references[tier])
            assert all(pool.references(slot) == count for slot, count in references[tier].items())
            above = len(pool.used_from(pool.num_slots))
            assert pool.frozen or pool.free == pool.num_slots - pool.used + above >= 0
            assert not above or tier in self.shrinking, "more slots are used than the tier has"
            assert not manager.places._primary[tier].keys() & manager.places._clean[tier].keys()
        assert manager.census() == {tier: tuple(counts) for tier, counts in census.items()}
        for row in self.rows:
            length = row.forward.step.stop if row.forward else len(row.tokens)
            assert row.table.length == len(row.tokens)
            assert 0 <= len(row.table.blocks) * self.size - length < self.size, "waste of a block or more"

    def check_contents(self) -> None:
        """Every copy of every block holds the tokens of every sequence that it belongs to."""
        for key, tokens in self.published.items():
            block = self.manager.shared.find(key, tokens[-self.size :])
            for place in block.slots.items() if block else ():
                for layer, there in enumerate(self.memory.get(place, self._blank())):
                    assert there == [token * LAYERS + layer for token in tokens[-self.size :]]
        for row in self.rows:
            self._check_reads(list(row.table.extents(0, len(row.tokens), self.manager.slots_per_segment)), row.tokens)
            for index, block in enumerate(row.table.blocks):
                tokens = row.tokens[index * self.size : (index + 1) * self.size]
                for place in block.slots.items():
                    held = self.memory.get(place, self._blank())
                    for layer in range(LAYERS):
                        assert held[layer][: len(tokens)] == [token * LAYERS + layer for token in tokens]
