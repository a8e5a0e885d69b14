"""Long-context runs: tasks at growing length with several caches, each cache at each length in a process of its own.

    Session     opens the folder and asks a first process what there is to do
    run         for each length and cache: a process, and in it every sample; each row is on disk before the next begins
    summary     what the rows come to; see ``longcontext_summary``

The reference runs first at every length, as the tokens of all others are compared with its own. A cache that is refused or
runs out of memory has rows with ``error``; a process that ends is replaced, and what it was at is such a row.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tierkv.benchmarks.longcontext_rows import ROWS_FILE, SETTINGS_FILE, Key, Row, RowLog, compare
from tierkv.benchmarks.longcontext_settings import Settings, is_exact, is_tiered
from tierkv.benchmarks.restore_process import Child
from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.benchmarks.longcontext_wires import Rates

CHILD: Final = "tierkv.benchmarks.longcontext_child"
MOST_ENDS: Final = 2
"""Times in a row that a process may end before the rest of its cache and length is given up."""
TRACE_FILE: Final = "trace.json"
_TIERS: Final = ".tiers"
_EMPTY: Final[Row] = {
    "score": None, "output": None, "tokens": None, "ttft_seconds": None, "ttft_seconds_all": None,
    "inter_token_seconds": None, "tokens_per_second": None, "new_tokens": None, "tier_peak_bytes": None,
    "tier_capacity_bytes": None, "tier_blocks": None, "moved_bytes": None, "stall_seconds": None, "copy_seconds": None,
    "prefix_hit_ratio": None, "prefix_tokens": None, "read_path": None, "block_size": None, "peak_rss_bytes": None,
    "rss_before_bytes": None, "peak_rss_since": None, "peak_device_memory_bytes": None, "wires": None, "error": None,
}  # fmt: skip
"""What every row has, in this order; None where a cache has no such thing."""

OnRow = Callable[[Row], None]
OnPart = Callable[[str, int, int], None]


class Session:
    """One run in one folder. Use as a context manager.

    Attributes:
        facts: about the model and the machine.
        left_out: caches that cannot run here, and why.
        rates: what plain copies reach on this machine, by wire; None where no wire is to be measured.
        plan: the rows that there will be, by length: their ``task``, ``sample``, ``depth`` and ``prompt_tokens``.
        log: the rows that there are.
    """

    def __init__(self, settings: Settings, folder: Path, *, resume: bool, child: str = CHILD) -> None:
        """Open the folder, load the model and find out what there is to do.

        Args:
            settings: what is asked for.
            folder: for rows and disk tiers; made where it is missing.
            resume: go on with the rows that are there.
            child: the module that runs samples.

        Raises:
            ConfigError: something cannot be done as it is asked for; nothing has been computed.
            UnsupportedModel: the model is none that caches can be compared with.
        """
        self.settings = settings
        self.folder = folder
        self._module = child
        self._spare: Child | None = None
        self.log = RowLog(folder, settings.record(), resume=resume)
        try:
            self._find_out()
        except BaseException as error:
            if not self.log.rows:  # what was refused leaves no trace that would forbid another try
                for name in (SETTINGS_FILE, ROWS_FILE):
                    with suppress(OSError):
                        (folder / name).unlink()
            self._close(error)
            raise

    @property
    def caches(self) -> list[str]:
        """The caches that run, the reference first."""
        return [cache for cache in self.settings.caches if cache not in self.left_out]

    @property
    def keys(self) -> list[Key]:
        """All rows that there will be, in the order in which they are run."""
        return [
            Key(cache, length, one["task"], one["sample"])
            for length in self.settings.lengths
            for cache in self.caches
            for one in self.plan[length]
        ]

    @property
    def missing(self) -> list[Key]:
        """The rows that there will be and are not yet."""
        return [key for key in self.keys if key not in self.log.rows]

    @property
    def trace(self) -> dict[str, Any] | None:
        """One decoded token of tierkv at the longest length, as ``longcontext_trace`` makes it, or None."""
        try:
            found = json.loads((self.folder / TRACE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def run(self, on_row: OnRow, on_part: OnPart, stop: Callable[[], bool] = lambda: False) -> None:
        """Run what is missing.

        Args:
            on_row: told each row when it is kept.
            on_part: told the cache, the length and the number of rows before each process begins.
            stop: asked after each row whether to end here.

        Raises:
            OSError: a row cannot be kept.
        """
        for length in self.settings.lengths:
            for cache in self.caches:
                keys = [key for key in self.missing if (key.length, key.cache) == (length, cache)]
                if not keys:
                    continue
                on_part(cache, length, len(keys))
                for row in self._part(cache, length, keys):
                    on_row(row)
                    if stop():
                        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def _find_out(self) -> None:
        if not self.log.rows:
            (self.folder / TRACE_FILE).unlink(missing_ok=True)  # of another run
        self._spare = self._start("what there is to do")
        self.facts: dict[str, Any] = self._load(self._spare)
        limit, longest = self.facts["limit"], max(self.settings.lengths)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"--lengths: {longest:,} tokens are more than the {limit:,} that {self.facts['model']} was made for; give at "
                f"most that, or a model whose max_position_embeddings is at least {longest:,}"
            )
        self.left_out: dict[str, str] = self._spare.ask("left_out", caches=list(self.settings.caches))
        plan = self._spare.ask("plan", **self._plan_arguments())
        self.plan: dict[int, list[dict[str, Any]]] = {int(length): items for length, items in plan.items()}
        to_come = any(is_tiered(key.cache) for key in self.missing)
        self.rates: Rates | None = self._spare.ask("wires", folder=str(self.folder)) if to_come else None

    def _load(self, child: Child) -> Any:
        return child.ask("load", model=self.settings.model, dtype=self.settings.dtype, folder=str(self.folder))

    def _start(self, name: str) -> Child:
        return Child(name, self._module)

    def _plan_arguments(self) -> dict[str, Any]:
        asked = asdict(self.settings)
        names = ("tasks", "lengths", "samples", "seed", "max_new_tokens")
        return {name: list(asked[name]) if isinstance(asked[name], tuple) else asked[name] for name in names}

    def _part(self, cache: str, length: int, keys: list[Key]) -> Iterator[Row]:
        """Run one cache at one length; yield its rows, each kept."""
        ended, share, refused = 0, None, ""
        child: Child | None = None
        try:
            for key in keys:
                if not refused and child is None:
                    try:
                        child, share = self._begin(cache, length)
                    except TierKVError as error:
                        refused = str(error)
                if refused:
                    yield self._keep(key, {"error": refused}, share)
                    continue
                assert child is not None
                try:
                    answer = child.ask("sample", task=key.task, sample=key.sample, trace=key == self._traced)
                    ended = 0
                    self._keep_trace(answer.pop("trace"))
                except TierKVError as error:  # a sample answers its errors itself: the process is gone
                    child.close()
                    child, ended, answer = None, ended + 1, {"error": str(error)}
                    if ended >= MOST_ENDS:
                        refused = f"not tried, as {ended} samples before it ended their process: {error}"
                yield self._keep(key, answer, share)
        finally:
            if child is not None:
                child.close()

    def _begin(self, cache: str, length: int) -> tuple[Child, float | None]:
        """Start a process for a cache at a length, or take the one that there is.

        Raises:
            TierKVError: tierkv refuses, or the process ended.
        """
        name = f"{cache} at {length:,} tokens"
        if self._spare is not None:
            child, self._spare = self._spare, None
            child.name = name
        else:
            child = self._start(name)
            try:
                self._load(child)
            except BaseException:
                child.close()
                raise
        arguments = {"folder": str(self.folder / _TIERS), "plan": self._plan_arguments(), "rates": self.rates}
        try:
            return child, child.ask("begin", cache=cache, length=length, **arguments)["share"]
        except BaseException:
            child.close()
            raise

    def _keep(self, key: Key, answer: Mapping[str, Any], share: float | None) -> Row:
        planned = next(one for one in self.plan[key.length] if (one["task"], one["sample"]) == (key.task, key.sample))
        row: Row = {
            **key._asdict(), **planned, "dtype": self.settings.dtype, "exact": is_exact(key.cache), **_EMPTY, **answer,
            "memory_share": share,
        }  # fmt: skip
        compare(row, self.log.rows)
        self.log.append(row)
        return row

    @property
    def _traced(self) -> Key | None:
        """The row whose last token is watched: the last of tierkv's first cache at the longest length."""
        cache = next(filter(is_tiered, self.caches), None)
        keys = [key for key in self.keys if (key.cache, key.length) == (cache, max(self.settings.lengths))]
        return keys[-1] if keys else None

    def _keep_trace(self, trace: dict[str, Any] | None) -> None:
        if trace is not None:
            trace["otherData"] |= {"cache": self._traced.cache if self._traced else "", "model": self.facts["model"]}
            (self.folder / TRACE_FILE).write_text(json.dumps(trace), encoding="utf-8")

    def _close(self, error: BaseException | None) -> None:
        try:
            if self._spare is not None:
                self._spare.__exit__(type(error) if error else None, error, None)
                self._spare = None
        finally:
            shutil.rmtree(self.folder / _TIERS, ignore_errors=True)
            self.log.close()
