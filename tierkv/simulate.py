"""Simulation: an engine that serves many sessions, in virtual time.

It is the engine's ``TierManager`` that decides, asked in the engine's order: what memory and the prefix store hold of a
prompt is taken, the rest is prefilled, the answer is decoded, full blocks are named and offered to the store, and at the
end the sequence is released. Only the executor differs: moves take virtual time on wires (``tierkv.virtual``).

    admit     a request joins while the device has room for all that the batch may come to, or when nothing runs. It waits
              until its prefix was read, and is prefilled in an iteration of its own
    decode    an iteration is one token of every sequence. Between block boundaries nothing changes, so many are taken in
              one jump: up to the next boundary, end of an answer, or arrival
    promote   what lies below the device moves up in the background, a few blocks a token

Left out of what an engine does: scratch buffers (budgets should leave room for them), and computing a prefix that would
be read more slowly. An engine has one step for all rows of a batch; here each has its own, as their lengths differ.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierkv.cost import CostModel
from tierkv.errors import CapacityError
from tierkv.manager import TierManager
from tierkv.simulate_batch import Batch, Row, cold_blocks
from tierkv.simulate_outcome import Counts, Outcome
from tierkv.simulate_prefix import Prefixes
from tierkv.simulate_requests import Source, Turn
from tierkv.simulate_setup import LEAST_SLOTS, Setup
from tierkv.simulate_speed import Speed
from tierkv.simulate_steps import Steps
from tierkv.tier import Tier
from tierkv.virtual import VirtualMover, VirtualWires

if TYPE_CHECKING:
    from tierkv.block_table import Block, BlockTable, Extent


class SimulatedManager(TierManager):
    """The manager of a simulation. All its sequences are of the batch, and nobody reads what its steps say of places."""

    def _is_idle(self, table: "BlockTable") -> bool:  # noqa: ARG002
        return False

    def _extents(self, table: "BlockTable", start: int, stop: int) -> "tuple[Extent, ...]":  # noqa: ARG002
        return ()


class Simulation:
    """One run, from empty tiers.

    Attributes:
        steps: the manager, its executor, the clock and the counters.
        prefixes: what is known of prompts.
    """

    def __init__(
        self, cost: CostModel, setup: Setup, source: Source, *, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        """Set up empty tiers.

        Args:
            cost: of the model on the machine.
            setup: tiers and settings.
            source: of requests.
            advance: told how many more requests are done.
        """
        wires = VirtualWires(cost)
        manager = SimulatedManager(
            cost.block_size, setup.slots, setup.slots_per_segment, setup.keep, promoted=setup.promoted,
            eviction=setup.eviction,
        )  # fmt: skip
        self.steps = Steps(manager, VirtualMover(manager, wires), wires, Counts())
        self.prefixes = Prefixes(cost, setup, self.steps)
        self._manager, self._wires, self._counts = manager, wires, self.steps.counts
        self._setup = setup
        self._source = source
        self._advance = advance
        self._block_bytes, self._size = cost.block_bytes, cost.block_size
        self._speed = Speed(cost, wires, setup.read)
        self._batch = Batch(manager, self._counts.inter_token)
        self._queue: deque[Turn] = deque()
        self._blocked = False  # the first of the queue waits for others of the batch to end

    def run(self) -> Outcome:
        """Serve all requests; may be called once."""
        began = time.perf_counter()
        while True:
            while (coming := self._source.next_seconds()) is not None and coming <= self._wires.now:
                if (turn := self._source.take()) is not None:
                    self._queue.append(turn)
            if self._queue and len(self._batch) < self._setup.batch and not self._blocked:
                self._admit()
            elif self._batch:
                self._decode()
            elif coming is None:
                break
            else:
                self._wires.run_to(coming)
        wires, store = self._wires, self.prefixes.store
        return Outcome(
            self._counts, wires.now, time.perf_counter() - began, self._block_bytes, wires.num_blocks, wires.streamed_bytes,
            wires.busy_seconds, self.prefixes.held.most, store.peak_blocks if store else 0, store.num_shed if store else 0,
        )  # fmt: skip

    # -- requests -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Serve the first of the queue up to its first token, or find that it has to wait or can never be served."""
        turn = self._queue[0]
        longest = -(-(turn.input_tokens + max(1, turn.output_tokens)) // self._size)
        if reason := self._why_never(turn, longest):
            self._refuse(self._queue.popleft(), reason)
            return
        found = self.prefixes.find(turn)
        if self._batch and not self._has_room(longest, found):
            self._blocked = True
            return
        self._queue.popleft()
        began, row = self._wires.now, Row(turn, self._manager.open(), longest)
        findable = min(self._source.known_blocks(turn) * self._size, turn.input_tokens - 1)
        try:
            known = self.prefixes.begin(row, found)
            self._prefill(row)
        except CapacityError:
            self._manager.release(row.table)
            self._refuse(turn, "the device could not take the next block")
            return
        counts, now = self._counts, self._wires.now
        counts.requests += 1
        counts.prompt_tokens += turn.input_tokens
        counts.output_tokens += min(1, turn.output_tokens)
        counts.findable_tokens += findable
        for tier, tokens in known.items():
            counts.found_tokens[tier] += tokens
        counts.ttft.add(now - turn.arrival_seconds)
        counts.service.add(now - began)
        if row.left > 0:
            self._batch.join(row, now)
        else:
            self._end(row)

    def _why_never(self, turn: Turn, longest: int) -> str:
        if turn.input_tokens < 1:
            return "the prompt is empty"
        slots = sum(pool.num_slots for pool in self._manager.pools.values())
        if longest > slots:
            return f"longer than all tiers together, which hold {slots:,} blocks of {self._size} tokens"
        return ""

    def _refuse(self, turn: Turn, reason: str) -> None:
        self._counts.refused[reason] += 1
        self._advance(1)
        self._source.ended(turn, self._wires.now)

    def _has_room(self, longest: int, found: "Sequence[Block]") -> bool:
        """Whether the device can hold everything that the batch and one more request may come to."""
        in_use = sum(1 for block in found if block.references)
        wanted = self._batch.num_blocks() + self._batch.blocks_to_come() + longest - in_use
        return wanted + LEAST_SLOTS * (len(self._batch) + 1) <= self._setup.slots[Tier.DEVICE]

    def _end(self, row: Row) -> None:
        """A request was answered; its row has left the batch or never was in it."""
        self._source.published(row.turn, row.named * self._size)
        self._manager.release(row.table)
        self._blocked = False
        turn = row.turn
        if turn.session is not None and row.named:
            self.prefixes.held.hold(turn.session, turn.names.keys[row.named - 1])
        self._counts.sessions += turn.ends_session
        self._advance(1)
        self._source.ended(turn, self._wires.now)

    # -- forwards -------------------------------------------------------------------------------------------------

    def _prefill(self, row: Row) -> None:
        """Compute what is left of a prompt."""
        table = row.table
        past, count = table.length, row.turn.input_tokens - table.length
        first = len(table.blocks)
        self.steps.begin(row, count)
        cold = Counter(block.tier for block in cold_blocks(table.blocks[:first]))
        below = Counter(block.tier for block in cold_blocks(table.blocks[first:]))
        seconds = self._speed.prompt(count, past, cold, below)
        delay = self._speed.stream(cold, 1)
        self._speed.settle(below)
        self._counts.stall_seconds += delay
        self._wires.run_to(self._wires.now + delay + seconds)
        self.steps.commit(row)
        self.steps.reap()
        self.steps.background([table])
        self.prefixes.publish(row)
        self._source.published(row.turn, row.named * self._size)

    def _decode(self) -> None:
        """Take one jump: as many tokens of every sequence as nothing can change in between."""
        batch, wires = self._batch, self._wires
        self._begin_steps()
        if not batch:
            return
        cold = batch.cold_blocks()
        count = min(row.coming for row in batch.rows)
        seconds = self._speed.token(batch.tokens + len(batch), cold, len(batch))
        if not self._blocked and len(batch) < self._setup.batch and (coming := self._source.next_seconds()) is not None:
            count = min(count, max(1, -int(-(coming - wires.now) // seconds)))
        rises = 1
        if cold:
            count, rises = self._promote(count)
        if count > 1:
            # KV grows, and blocks come up one after another. Each is read where it was until the token after that.
            up = 1 - (rises + 1) / (2 * count)
            cold = {tier: number - batch.rising(tier) * up for tier, number in cold.items()}
            seconds = self._speed.token(batch.tokens + len(batch) * (count + 1) / 2, cold, len(batch))
        delay = self._speed.stream(cold, count)
        self._counts.stall_seconds += delay
        batch.note_tokens(wires.now + delay, seconds, count)
        wires.run_to(wires.now + delay + count * seconds)
        self._counts.output_tokens += count * len(batch)
        full = batch.advance(count)
        self.steps.reap()
        if tables := [row.table for row in batch.rows if row in full or row.cold]:
            self.steps.background(tables)
        for row in full:
            self.prefixes.publish(row)
            if not row.left:
                batch.leave(row)
                self._end(row)

    def _begin_steps(self) -> None:
        """Let every row have a step."""
        for row in [one for one in self._batch.rows if one.step is None]:
            room = self._size - row.table.length % self._size
            try:
                self.steps.begin(row, min(room, row.left, self._setup.longest_jump))
            except CapacityError:
                self._counts.refused["cut short: the device could not take the next block"] += 1
                self._batch.leave(row)
                self._end(row)

    def _promote(self, count: int) -> tuple[int, int]:
        """Do what happens in the background between ``count`` tokens.

        Returns:
            How many of them to take in one jump, and over how many of those blocks come up.
        """
        rows = [row for row in self._batch.rows if row.cold]
        rows.sort(key=lambda row: all(block.arriving for block in row.cold))  # those that wait first: sooner found
        tables = [row.table for row in rows]
        waiting = {block for row in rows for block in row.cold if not block.arriving}
        if Tier.HOST not in self._setup.promoted:
            waiting = {block for block in waiting if block.tier in self._setup.promoted}
        calls, idle = 0, False
        while waiting and calls < count - 1:
            moves = self.steps.background(tables)
            if moves:
                waiting.difference_update(move.source for move in moves)
            elif any(move.evicts for move in self._manager.moves):
                break  # they have made room by the next token
            elif idle:  # once may have made room, by giving up clean copies
                return count, 1
            idle = not moves
            calls += 1
        return (calls + 1 if waiting else count), calls + 1
