"""``tierkv store``: look at the prefixes that are kept on disk. What changes them lies in ``store_change``."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import store_change, store_pin
from tierkv.cli.console import Failed, print_json, reserve_stdout
from tierkv.cli.progress import Progress
from tierkv.cli.store_open import (
    Chain,
    JsonOption,
    Opened,
    PathOption,
    chains_of,
    opened,
    parts_of,
    reader_of,
)
from tierkv.cli.store_show import print_namespaces, print_stats, print_verified

if TYPE_CHECKING:
    from tierkv.storage.prefix_store import NamespaceInfo, PrefixStore, VerifyReport

app = typer.Typer(name="store", rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    """Look after the prefixes that are kept on disk ([bold]prefix.persist = true[/bold]).

    All of it may be done while other processes use the store, and nothing of it changes the store's capacity. An index
    that turns out damaged is mended when the store is opened, by these commands as by any program, with a warning.

    Exit codes: 0 done, 1 failed, 2 bad usage, or no store that can be used at --path.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


LS_EPILOG = """[bold]Examples[/bold]

tierkv store ls

tierkv store ls --path /mnt/ssd/kv --blocks

tierkv store ls --json | jq '.namespaces[0].blocks'
"""


@app.command("ls", epilog=LS_EPILOG)
def ls(
    path: PathOption = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Also list the chains of blocks, each by its last one, the newest first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List what is kept: for each namespace (a model with its dtype and block size) blocks, bytes, ages and hits.

    Bytes are those of the KV. A chain counts all blocks from the first on, also those that it shares with others.
    """
    with reserve_stdout(as_json), opened(path) as found:
        namespaces = [_describe(info) for info in found.store.ls()]
        chains = chains_of(found.store) if blocks else []
        result: dict[str, Any] = {"path": str(found.store.path), "namespaces": namespaces}
        if blocks:
            result["leaves"] = [_describe_chain(chain) for chain in chains]
    if as_json:
        print_json(result)
    else:
        print_namespaces(result)


STATS_EPILOG = """[bold]Examples[/bold]

tierkv store stats

tierkv store stats --path /mnt/ssd/kv --json
"""


@app.command("stats", epilog=STATS_EPILOG)
def stats(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Show how much is kept and how full the store is, with the counters that outlive processes.

    Hits are those of the blocks that are there now. What one process has hit, missed and shed since it began is in
    engine.stats() there.
    """
    with reserve_stdout(as_json), opened(path) as found:
        result = _totals(found.store)
    if as_json:
        print_json(result)
    else:
        print_stats(result)


VERIFY_EPILOG = """[bold]Examples[/bold]

tierkv store verify

tierkv store verify --repair

tierkv store verify --json | jq .bad

[bold]Exit codes[/bold]

0  all records are whole, or --repair took out those that were not

1  a record is damaged and still there; or the index was, and opening the store has mended it

2  bad usage, or no store that can be used
"""


@app.command("verify", epilog=VERIFY_EPILOG)
def verify(
    path: PathOption = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Take damaged records out, and all that continue them. They are computed again."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every record and check it from its first byte to its last.

    A damaged record never gives wrong tokens: whoever reads it notices, and computes. This finds all of them at once.
    What another process evicts meanwhile is not damaged.
    """
    with reserve_stdout(as_json), opened(path) as found:
        result = _verify(found, repair=repair)
    if as_json:
        print_json(result)
    else:
        print_verified(result)
    left = result["bad"] - result["repaired"]
    if left:
        again = "--repair could not take them out; look at its file system" if repair else "--repair takes them out"
        raise Failed(f"{result['path']} holds damaged records ({left:,}); {again}")
    if result["warnings"] and not repair:
        raise Failed(f"the index in {result['path']} was damaged; it is mended, and what was lost is computed again")


# -- what is found --------------------------------------------------------------------------------------------------------


def _describe(info: "NamespaceInfo") -> dict[str, Any]:
    kv = info.manifest.get("kv")
    kv = kv if isinstance(kv, dict) else {}
    oldest, newest = (info.oldest_seconds, info.newest_seconds) if info.blocks else (None, None)
    return {
        "digest": info.digest.hex(),
        "model": info.manifest.get("model") or info.manifest.get("class"),
        "dtype": kv.get("dtype", info.manifest.get("dtype")),
        "block_size": kv.get("block_size", info.manifest.get("block_size")),
        "blocks": info.blocks,
        "bytes": info.num_bytes,
        "oldest_seconds": oldest,
        "newest_seconds": newest,
        "hits": info.hits,
        "manifest": info.manifest,
    }


def _describe_chain(chain: Chain) -> dict[str, Any]:
    return {
        "key": chain.leaf.hex(),
        "namespace": chain.namespace.hex(),
        "blocks": chain.blocks,
        "tokens": chain.tokens,
        "bytes": chain.num_bytes,
        "age_seconds": max(0.0, time.time() - chain.created),
        "hits": chain.hits,
        "pinned": chain.pinned,
    }


def _totals(store: "PrefixStore") -> dict[str, Any]:
    from tierkv.storage.prefix_index import ENTRIES, PINS, RETIRED

    namespaces, now = store.ls(), time.time()
    with parts_of(store).read() as book:
        state = book.state
        pins = [key for key, _ in book.tables.items(PINS) if book.is_pinned(key, now)]
        pinned = sum(book.tables.get(ENTRIES, key) is not None for key in pins)
        damaged_slots = book.tables.count(RETIRED)
    allocated, capacity = store.allocated_bytes, store.capacity_bytes
    return {
        "path": str(store.path),
        "namespaces": len(namespaces),
        "blocks": state.blocks,
        "bytes": state.payload_bytes,
        "capacity_bytes": capacity or None,  # it goes with an index that is lost; the next run sets it anew
        "allocated_bytes": allocated,
        "fill": round(allocated / capacity, 4) if capacity else None,
        "reusable_bytes": sum(size * count.vacant for size, count in state.slabs.items()),
        "index_bytes": parts_of(store).index.map_bytes,
        "eviction": state.policy,
        "hits": sum(info.hits for info in namespaces),
        "pinned": pinned,
        "damaged_slots": damaged_slots,
    }


def _verify(found: Opened, *, repair: bool) -> dict[str, Any]:
    store, progress = found.store, Progress()
    with progress.stage("verify", "checking records", store.stats().blocks) as stage:
        so_far = 0

        def advance(checked: int, _total: int) -> None:
            nonlocal so_far
            stage.advance(checked - so_far)
            so_far = checked

        report = store.verify(repair=repair, on_progress=advance)
    left = _still_damaged(store, report) if repair else len(report.bad)
    return {
        "path": str(store.path),
        "checked": report.checked,
        "bad": len(report.bad),
        "repaired": len(report.bad) - left,
        "seconds": round(report.seconds, 3),
        "damaged": [{"key": key, "reason": _reason(key, text, store)} for key, text in report.bad],
        "warnings": found.warnings,
    }


def _still_damaged(store: "PrefixStore", report: "VerifyReport") -> int:
    """Return how many of the records that were bad are there yet: the disk may have refused, or the index be damaged."""
    from tierkv.errors import StoreError
    from tierkv.storage.prefix_reader import found_of

    left, places = 0, []
    with parts_of(store).read() as book:
        for key, _ in report.bad:
            try:
                row = book.find(bytes.fromhex(key))
            except StoreError:
                left += 1
            else:
                places += [found_of(row)] if row is not None and row.stored else []
    return left + sum(bool(reader_of(store).check(place)) for place in places)


def _reason(key: str, text: str, store: "PrefixStore") -> str:
    return text.removeprefix(f"block {key} in {store.path} is damaged: ")


app.command("gc", epilog=store_change.GC_EPILOG)(store_change.gc)
app.command("clear", epilog=store_change.CLEAR_EPILOG)(store_change.clear)
app.command("export", epilog=store_change.EXPORT_EPILOG)(store_change.export)
app.command("import", epilog=store_change.IMPORT_EPILOG)(store_change.import_)
app.command("pin", epilog=store_pin.PIN_EPILOG)(store_pin.pin)
app.command("unpin", epilog=store_pin.UNPIN_EPILOG)(store_pin.unpin)
