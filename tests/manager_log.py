"""A log of what a manager decides, to compare two that should decide the same."""

from dataclasses import dataclass, field
from typing import Any

from tierkv.block_table import BlockTable
from tierkv.moves import Room


@dataclass
class Log:
    """Every call of a manager that changes something, with its answer. Tables and blocks are numbered as they come."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    tables: dict[BlockTable, int] = field(default_factory=dict)

    def watch(self, manager):
        for name in (
            "open",
            "begin",
            "commit",
            "background",
            "complete",
            "share",
            "publish",
            "crop",
            "release",
            "resize",
        ):
            setattr(manager, name, self._wrap(getattr(manager, name), getattr(self, f"_{name}")))
        for name in ("fail", "rollback", "fork", "disown_shared", "freeze"):
            setattr(manager, name, self._refuse)

    def _wrap(self, method, describe):
        def call(*args, **kwargs):
            before = args[0].length if describe == self._crop else None
            answer = method(*args, **kwargs)
            event = describe(*args, answer=answer, before=before)
            if event is not None:
                self.events.append(event)
            return answer

        return call

    def _refuse(self, *args, **kwargs):
        raise AssertionError("nothing fails here, and no sequence is forked")

    def _number(self, table):
        return self.tables.setdefault(table, len(self.tables))

    def _open(self, *, answer, before):
        return ("open", self._number(answer))

    def _begin(self, tables, count, *, answer, before):
        asked = ("begin", [self._number(table) for table in tables], count)
        if isinstance(answer, Room):
            return (*asked, "room", describe(answer.moves))
        return (*asked, "step", [[place(block) for block in table.blocks] for table in tables])

    def _commit(self, step, *, answer, before):
        return ("commit", [self._number(table) for table in step.tables], step.stop)

    def _background(self, tables, *, answer, before):
        return ("background", describe(answer))

    def _complete(self, move, *, answer, before):
        return ("complete", *describe([move])[0])

    def _share(self, table, keys, ids, *, answer, before):
        return ("share", self._number(table), answer, [place(block) for block in table.blocks])

    def _publish(self, table, index, key, ids, parent, cost, *, answer, before):
        return ("publish", self._number(table), index, cost, parent is None, place(answer))

    def _crop(self, table, length, *, answer, before):
        return ("crop", self._number(table), length) if before != length else None

    def _release(self, table, *, answer, before):
        return ("release", self._number(table))

    def _resize(self, tier, slots, *, answer, before):
        return ("resize", tier, slots, describe(answer.moves) if answer else [])


def place(block):
    return (block.uid, block.sealed, sorted(block.slots.items()))


def describe(moves):
    return [
        (move.wire.label, move.source.uid, move.target.uid, move.source_slot, move.slot, move.evicts) for move in moves
    ]


def common(real, mine):
    """Return how many events from the first on are the same."""
    return next(
        (at for at, (one, other) in enumerate(zip(real.events, mine.events, strict=False)) if one != other),
        min(len(real.events), len(mine.events)),
    )


def difference(real, mine):
    at = common(real, mine)
    lines = (f"real: {real.events[at : at + 3]}", f"mine: {mine.events[at : at + 3]}")
    return "\n".join((f"event {at}", *lines, f"before: {real.events[max(0, at - 3) : at]}"))
