"""How soon the first token comes: after a restart, from memory and from nothing, for tierkv and what one would do otherwise.

    cold          the whole prompt is computed, with the chunk size that is fastest here
    in process    tierkv finds the prompt in memory; transformers' recipe copies a filled cache
    restart       a store or file is opened that this process has not opened, its pages dropped from the page cache

Every contender has a process of its own, so that none profits from what another has loaded, and one works at a time. They
take turns run by run, in an order that turns round, and so does a plain read of as many bytes from the same disk.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tierkv.benchmarks.machine import drop_page_cache
from tierkv.benchmarks.restore_process import Child
from tierkv.benchmarks.restore_raw import WAYS, read_bytes_per_second, write_file
from tierkv.benchmarks.restore_report import Times, row_of

CHUNKS: Final = (None, 512, 1024, 2048)
"""``prefill_chunk_size`` that the cold prefill is tried with."""
STEPS: Final = 8
OPPONENTS: Final = ("torch_load", "safetensors")
FOREIGN: Final = {"kvboost": "kvboost", "llama_cpp": "llama.cpp"}
"""Engines of their own that keep KV over a restart: the package, and what it is called."""

Children = Mapping[str, Child]
Folders = Mapping[str, Path]
Advance = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        model: as ``load_model`` takes it.
        dtype: of the model and of K and V.
        runs: timed runs of each contender.
        prefills: times that a whole prompt is computed: by the stock cache, and by tierkv with and without writing.
        block_size: tokens, of tierkv's blocks.
        folder: where files go.
    """

    model: str
    dtype: str
    runs: int
    prefills: int
    block_size: int
    folder: Path

    @property
    def steps(self) -> int:
        """How often ``measure`` calls ``advance``."""
        return len(CHUNKS) + 3 * self.prefills + (2 + 2 + len(OPPONENTS)) * self.runs


@contextmanager
def contenders(plan: Plan, threads: int) -> Iterator[tuple[Children, dict[str, Any]]]:
    """Start the processes and load the model in each; give them, and the facts that the first told.

    Raises:
        ConfigError: there is no such model.
        UnsupportedModel: it cannot be compared.
    """
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        facts: dict[str, Any] = {}
        for name in ("stock", "tierkv", *OPPONENTS):
            children[name] = stack.enter_context(Child(name, "tierkv.benchmarks.restore_child", name))
            children[name].send("load", model=plan.model, dtype=plan.dtype, threads=threads)
            if not facts:  # it may convert the model's file, which the others then find
                facts = children[name].receive()
        for name in ("tierkv", *OPPONENTS):
            children[name].receive()
        yield children, facts


def left_out() -> list[dict[str, str]]:
    """Say which contenders do not take part, and why."""
    return [{"contender": name, "reason": _why_not(package, name)} for package, name in FOREIGN.items()]


def _why_not(package: str, name: str) -> str:
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return f"{name} is installed, and is not driven from here: it has to be measured by itself"


def measure(
    tokens: int, plan: Plan, children: Children, facts: Mapping[str, Any], advance: Advance = lambda: None
) -> dict[str, Any]:
    """Measure one prompt length.

    Args:
        tokens: of the prompt.
        plan: the rest.
        children: from ``contenders``.
        facts: from ``contenders``.
        advance: called ``plan.steps`` times.

    Returns:
        The row; see ``row_of``.

    Raises:
        TierKVError: a contender failed.
    """
    folders = {name: plan.folder / f"{name}-{tokens}" for name in (*children, "raw")}
    for name, folder in folders.items():
        folder.mkdir()
        if name != "raw":
            children[name].ask("begin", tokens=tokens, folder=str(folder), block_size=plan.block_size)
    times = Times(tokens=tokens, kv_bytes=tokens * facts["kv_bytes_per_token"])
    _cold(times, plan, children["stock"], folders, advance)
    _write_behind(times, plan, children["tierkv"], advance)
    _in_process(times, plan, children, advance)
    _restarts(times, plan, children, folders, advance)
    for child in children.values():
        child.ask("close")
    return {"dtype": facts["dtype"], "block_size": plan.block_size, **row_of(times)}


def _cold(times: Times, plan: Plan, stock: Child, folders: Folders, advance: Advance) -> None:
    for chunk in CHUNKS:
        times.chunks[chunk] = stock.ask("cold", chunk=chunk)["seconds"]
        advance()
    times.chunk = min(times.chunks, key=lambda chunk: times.chunks[chunk])
    for _ in range(plan.prefills):
        times.note("cold", stock.ask("cold", chunk=times.chunk))
        advance()
    stock.ask("save", folders={kind: str(folders[kind]) for kind in OPPONENTS})


def _write_behind(times: Times, plan: Plan, tierkv: Child, advance: Advance) -> None:
    for number in range(plan.prefills):
        for persist in turned([True, False], number):
            answer = tierkv.ask("prefill", persist=persist)
            times.note("prefill_kept" if persist else "prefill", answer)
            advance()


def _in_process(times: Times, plan: Plan, children: Children, advance: Advance) -> None:
    stock, tierkv = children["stock"], children["tierkv"]
    tierkv.ask("hold")
    tierkv.ask("again")  # the first of each is not timed
    stock.ask("copied")
    for number in range(plan.runs):
        for name, child, question in turned([("warm_process", tierkv, "again"), ("deepcopy", stock, "copied")], number):
            times.note(name, child.ask(question))
            advance()
    times.decode_step = tierkv.ask("step_seconds", steps=STEPS)


def _restarts(times: Times, plan: Plan, children: Children, folders: Folders, advance: Advance) -> None:
    raw = folders["raw"] / "bytes"
    write_file(raw, times.kv_bytes)
    for number in range(plan.runs):
        for name in turned(["raw", "tierkv", *OPPONENTS], number):
            if name == "raw":
                for way, threads in WAYS:
                    left = drop_page_cache(raw.parent)
                    rate = read_bytes_per_second(raw, way, threads)
                    times.note_raw(f"{way}, {threads} reader{'s'[: threads - 1]}", rate, left)
            elif name == "tierkv":
                times.note("warm_restart", children[name].ask("restart"))
            else:
                times.note(name, children[name].ask("restart"))
            advance()


def turned(items: Sequence[T], number: int) -> Sequence[T]:
    """Return the order of a round: every other one runs backwards, so that nobody always follows the same neighbour."""
    return items[::-1] if number % 2 else items
