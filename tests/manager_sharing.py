"""Blocks that sequences of the simulated world share by key, and those that nobody holds any more."""

from tests.manager_memory import MAX_SEQUENCES, Memory, Row
from tierkv.block_table import Block


class Sharing(Memory):
    """Publishes the blocks of some sequences, begins others with them, and forgets every key."""

    def _idle(self) -> list[Row]:
        return [row for row in self.rows if row.forward is None and row not in self.waiting]

    def kept_blocks(self) -> list[Block]:
        shared = self.manager.shared
        known = dict.fromkeys(
            block
            for key in self.published
            if (block := shared.find(key, self.published[key][-self.size :])) is not None
        )
        return [block for block in known if shared.is_kept(block)]

    def _key(self, tokens: list[int]) -> bytes:
        return repr(tokens).encode()

    def publish(self) -> None:
        """Give keys to the full blocks of one sequence, from the first on."""
        idle = self._idle()
        if not idle:
            return
        row = idle[self.pick(len(idle))]
        parent = None
        for index in range(len(row.tokens) // self.size):
            tokens = row.tokens[: (index + 1) * self.size]
            key = self._key(tokens)
            before = row.table.blocks[index]
            after = self.manager.publish(row.table, index, key, tokens[-self.size :], parent, cost=1.0 + index)
            assert row.table.blocks[index] is after
            if after is not before:
                self.note("two became one")
            self.published[key] = tokens
            parent = key

    def share(self) -> None:
        """Begin a sequence, or go on with one, with blocks that were published."""
        tokens = list(self.published.values())
        idle = [row for row in self._idle() if not len(row.tokens) % self.size]
        if not tokens:
            return
        wanted = tokens[self.pick(len(tokens))]
        fitting = [row for row in idle if row.tokens == wanted[: len(row.tokens)] and len(row.tokens) < len(wanted)]
        if fitting and self.pick(2):
            row = fitting[self.pick(len(fitting))]
        elif len(self.rows) < MAX_SEQUENCES:
            row = Row(self.manager.open())
            self.rows.append(row)
        else:
            return
        ends = range(len(row.tokens) + self.size, len(wanted) + 1, self.size)
        kept = self.manager.shared.num_unused
        found = self.manager.share(row.table, [self._key(wanted[:end]) for end in ends], wanted[len(row.tokens) :])
        row.tokens += wanted[len(row.tokens) : len(row.tokens) + found * self.size]
        if found:
            self.note("shared")
        if self.manager.shared.num_unused < kept:
            self.note("used again")

    def disown(self) -> None:
        self.manager.disown_shared()
        self.published.clear()
