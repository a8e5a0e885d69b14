"""World: a manager on simulated memory, everything that can be asked of it, and what must hold at any time."""

from collections import Counter

import pytest

from tests.manager_checks import Checks
from tests.manager_memory import LAYERS, MAX_ROUNDS, MAX_SEQUENCES, Forward, Row
from tierkv.block_table import BlockTable
from tierkv.errors import CapacityError
from tierkv.moves import Step
from tierkv.tier import Tier


class World(Checks):
    """What a user of the manager does, in any order, checked against the tokens of each sequence."""

    # -- steps ----------------------------------------------------------------------------------------------------

    def _choose_rows(self) -> list[Row]:
        """Return some idle sequences of equal length."""
        idle = self._idle()
        if not idle:
            return []
        length = len(idle[self.pick(len(idle))].tokens)
        equal = [row for row in idle if len(row.tokens) == length]
        chosen = [row for row in equal if self.pick(4)]
        return chosen or equal[:1]

    def _begin(self, *, insist: bool) -> None:
        """Ask for a step; where it insists, run the moves that it waits for and ask again."""
        rows = self._choose_rows()
        count = 1 + self.pick((1, self.size, 3 * self.size, 6 * self.size)[self.pick(4)])
        if not rows or len(rows[0].tokens) + count > self.longest:
            return
        self.waiting.update(rows)
        rounds = 0
        while not self._ask(rows, count) and insist:
            hurry = self.pick(6) == 5  # asks again before every move was reported
            while self.flights:
                self.finish_some()
                # Others that take the room as soon as it is made could go on for ever.
                if rounds < MAX_ROUNDS // 4 and self.pick(6) == 5:
                    self._meddle()
                if hurry:
                    break
            rounds += 1
            assert rounds < MAX_ROUNDS, "room is never made"
        self.waiting.difference_update(rows)
        if rows[0].forward is None and self.pick(2):  # refused: sooner or later some sequence ends
            self.release()

    def _ask(self, rows: list[Row], count: int) -> bool:
        """Ask once; return whether there is an answer, a step or a refusal."""
        tables = [row.table for row in rows]
        before = [(row.table, list(row.table.blocks), row.table.length) for row in self.rows]
        copies = self._copies_needed(tables)
        self._in_begin = True
        try:
            outcome = self.manager.begin(tables, count)
        except CapacityError:
            self.note("capacity error")
            assert not self.manager.moves, "room that is on its way was not waited for"
            assert before == [(row.table, list(row.table.blocks), row.table.length) for row in self.rows]
            assert not self._must_fit(tables, count, copies)
            return True
        finally:
            self._in_begin = False
        if isinstance(outcome, Step):
            self._opened(outcome, rows, count)
            return True
        self._start(outcome.moves)
        assert self.manager.moves, "told to wait for nothing"
        return False

    def _meddle(self) -> None:
        """Do something with other sequences while some wait for room."""
        verbs = (
            self.release, self.crop, self.fork, self.select, self.begin_once, self.commit, self.background, self.publish,
            self.share,
        )  # fmt: skip
        verbs[self.pick(len(verbs))]()

    def begin_once(self) -> None:
        self._begin(insist=False)

    def begin_insisting(self) -> None:
        self._begin(insist=True)

    def begin_and_commit(self) -> None:
        self._begin(insist=True)
        self.commit()

    def _copies_needed(self, tables: list[BlockTable]) -> int:
        """Count tail copies by the rule as it is written: k of r holders append to a tail."""
        appending = Counter(table.tail for table in tables if table.tail is not None)
        copies = 0
        for tail, k in appending.items():
            last_may_keep = (
                k == tail.references and not tail.sealed and not tail.arriving and [*tail.slots] == [Tier.DEVICE]
            )
            copies += k - 1 if last_may_keep else k
        return copies

    def _must_fit(self, tables: list[BlockTable], count: int, copies: int) -> bool:
        """Return whether a step certainly has room once everything that may move has moved. No copy is under way."""
        manager, device = self.manager, self.manager.pools[Tier.DEVICE]
        new = [table.blocks_for(table.length + count) - len(table.blocks) for table in tables]
        hard, total = (copies, copies) if copies else (sum(number > 0 for number in new), sum(new))
        running = {block for row in self.rows if row.forward for block in row.table.blocks}
        room = {tier: pool.free for tier, pool in manager.pools.items()}
        for block in self.kept_blocks():  # they are forgotten before anything is refused
            for tier, slot in block.slots.items():
                pool = manager.pools[tier]
                room[tier] += slot < pool.num_slots and not pool.frozen
        for block in self.used_blocks():
            for tier, slot in block.slots.items():
                pool = manager.pools[tier]
                if tier is not block.tier and block not in running and slot < pool.num_slots and not pool.frozen:
                    room[tier] += 1
        fixed = running | {table.tail for table in tables if table.tail is not None}
        movable = sum(
            block not in fixed and block.slots.get(Tier.DEVICE, device.num_slots) < device.num_slots
            for block in self.used_blocks()
        )
        below = room[Tier.HOST] + room[Tier.DISK]
        return total <= room[Tier.DEVICE] + below and hard <= room[Tier.DEVICE] + min(movable, below)

    def _opened(self, step: Step, rows: list[Row], count: int) -> None:
        assert step.start == len(rows[0].tokens)
        assert step.stop == step.start + count
        new = [[self._next_token + row * count + at for at in range(count)] for row in range(len(rows))]
        self._next_token += count * len(rows)
        for index, row in enumerate(rows):  # now and then somebody computes what another one has computed
            equal = [one.tokens for one in self.rows if one.tokens[: len(row.tokens)] == row.tokens]
            longer = [tokens[len(row.tokens) :] for tokens in equal if len(tokens) > len(row.tokens)]
            if longer and self.pick(2):
                same = longer[self.pick(len(longer))][:count]
                new[index][: len(same)] = same
        forward = Forward(step, rows, new)
        for row in rows:
            row.forward = forward
        self._check_forward(forward)
        self.note("step")
        if len(rows) > 1:
            self.note("step of several rows")
        if self.flights:
            self.note("step with moves in flight")
        if any(row.forward not in (None, forward) for row in self.rows):
            self.note("two open steps")
        for tier in {extent.tier for extents in step.writes for extent in extents}:
            self.note(f"home {tier.label}")
        for tier in {extent.tier for extents in step.reads for extent in extents}:
            self.note(f"reads {tier.label}")

    def _check_forward(self, forward: Forward) -> None:
        """Read what the step reads; see that nobody else sees where it writes."""
        step = forward.step
        for row, reads, writes in zip(forward.rows, step.reads, step.writes, strict=True):
            self._check_reads(reads, row.tokens)
            for tier, slot, _ in set(self._places(writes, step.start, step.stop)):
                blocks = {block for block in self.live_blocks() if block.slots.get(tier) == slot}
                assert len(blocks) == 1
                block = blocks.pop()
                assert block in row.table.blocks
                assert block.references == 1
                assert not block.sealed
                assert block.slots == {tier: slot}, "a second copy would go stale"
                assert not block.arriving
                for move in self.flights:
                    assert self._is_stale(move) or (move.wire.source, move.source_slot) != (tier, slot)
                    assert (move.wire.destination, move.slot) != (tier, slot)

    def _forwards(self) -> list[Forward]:
        return list(dict.fromkeys(row.forward for row in self.rows if row.forward is not None))

    def _choose_forward(self) -> Forward | None:
        forwards = self._forwards()
        return forwards[self.pick(len(forwards))] if forwards else None

    def _write(self, forward: Forward) -> None:
        layer, step = forward.written, forward.step
        self._check_forward(forward)
        for new, extents in zip(forward.new, step.writes, strict=True):
            for token, (tier, slot, at) in zip(new, self._places(extents, step.start, step.stop), strict=True):
                self.memory.setdefault((tier, slot), self._blank())[layer][at] = token * LAYERS + layer
        forward.written += 1

    def write(self) -> None:
        forward = self._choose_forward()
        if forward and not forward.step.torn and forward.written < LAYERS:
            self._write(forward)

    def read(self) -> None:
        forward = self._choose_forward()
        if forward and not forward.step.torn:
            self._check_forward(forward)

    def commit(self) -> None:
        forward = self._choose_forward()
        if forward is None:
            return
        if forward.step.torn:
            with pytest.raises(ValueError, match="only be rolled back"):
                self.manager.commit(forward.step)
            return
        while forward.written < LAYERS:
            self._write(forward)
        self._check_forward(forward)
        for row, new, extents in zip(forward.rows, forward.new, forward.step.writes, strict=True):
            self._check_reads(extents, new, forward.step.start)
            row.tokens += new
            row.forward = None
        self.manager.commit(forward.step)
        if self.pick(2):
            self._start(self.manager.background(forward.step.tables))

    def rollback(self) -> None:
        forward = self._choose_forward()
        if forward is not None:
            self._rollback(forward)

    def _rollback(self, forward: Forward) -> None:
        self.note(f"torn after {forward.written} layers")
        self.manager.rollback(forward.step)
        for row in forward.rows:
            row.forward = None

    # -- verbs between steps --------------------------------------------------------------------------------------

    def open(self) -> None:
        for _ in range(1 + self.pick(2)):
            if len(self.rows) < MAX_SEQUENCES:
                self.rows.append(Row(self.manager.open()))

    def _crop(self, row: Row) -> None:
        length = self.pick(len(row.tokens) + 1)
        if self.pick(2):  # most crops take back a few tokens, as assisted decoding does
            length = max(0, len(row.tokens) - self.pick(2 * self.size))
        self.manager.crop(row.table, length)
        del row.tokens[length:]

    def crop(self) -> None:
        """Crop one sequence, or all of one length alike."""
        idle = self._idle()
        if not idle:
            return
        row = idle[self.pick(len(idle))]
        length = len(row.tokens)
        self._crop(row)
        if self.pick(2):
            for other in idle:
                if other is not row and len(other.tokens) == length:
                    self.manager.crop(other.table, len(row.tokens))
                    del other.tokens[len(row.tokens) :]

    def _fork(self, row: Row) -> None:
        if len(self.rows) < MAX_SEQUENCES:
            self.rows.append(Row(self.manager.fork(row.table), list(row.tokens)))

    def fork(self) -> None:
        idle = self._idle()
        if idle:
            self._fork(idle[self.pick(len(idle))])

    def _release(self, row: Row) -> None:
        self.manager.release(row.table)
        self.rows.remove(row)

    def release(self) -> None:
        idle = self._idle()
        if idle:
            self._release(idle[self.pick(len(idle))])

    def select(self) -> None:
        """Reorder sequences of one length as beam search does: some are forked, the others released."""
        rows = self._choose_rows()
        chosen = [rows[self.pick(len(rows))] for _ in rows]
        for row, times in Counter(chosen).items():
            for _ in range(times - 1):
                self._fork(row)
        for row in rows:
            if row not in chosen:
                self._release(row)

    def background(self) -> None:
        rows = self._choose_rows()
        self._start(self.manager.background([row.table for row in rows]))

    # -- tiers ----------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        self.manager.freeze(Tier.DISK)
        self.note("freeze")

    def resize(self) -> None:
        """Change the size of a tier; open steps are torn by that. Often it is not carried through at once."""
        tier = Tier.HOST if not self.pick(4) else Tier.DEVICE
        self.shrinking[tier] = self.pick(self.largest[tier] + 1) if self.pick(2) else self.largest[tier]
        self.continue_resize()

    def continue_resize(self) -> None:
        for tier, num_slots in list(self.shrinking.items()):
            for _ in range(MAX_ROUNDS):
                before = self.manager.pools[tier].num_slots
                try:
                    room = self.manager.resize(tier, num_slots)
                except CapacityError:
                    self.note("cannot shrink")
                    assert not self.manager.moves
                    assert self.manager.pools[tier].num_slots == before
                    del self.shrinking[tier]
                    if self.manager.pools[tier].used_from(before):  # an earlier request is still being carried through
                        self.shrinking[tier] = before
                    break
                if room is None:
                    del self.shrinking[tier]
                    assert not self.manager.pools[tier].used_from(num_slots)
                    self.note(f"resized {tier.label}")
                    break
                self._start(room.moves)
                assert self.manager.moves, "told to wait for nothing"
                if not self.pick(3):
                    return
                while self.flights:
                    self.finish_some()
            else:
                pytest.fail("a tier never shrinks")

    def end(self) -> None:
        """Tear the steps, end the moves and the sequences in any order: nothing is left."""
        for forward in self._forwards():
            self._rollback(forward)
        while self.rows or self.flights:
            if self.rows and (self.pick(2) or not self.flights):
                self._release(self.rows[self.pick(len(self.rows))])
            else:
                self.finish_some()
            self.check()
        self.disown()
        self.check()
        for pool in self.manager.pools.values():
            assert pool.used == 0
            assert pool.free == (0 if pool.frozen else pool.num_slots)
            for _ in range(2):
                slots = pool.allocate(pool.free)
                assert sorted(slots) == list(range(len(slots)))
                for slot in slots:
                    pool.release(slot)
