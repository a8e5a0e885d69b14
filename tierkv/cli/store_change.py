"""``tierkv store``: what changes a store, and what takes prefixes out of it and in: gc, clear, export, import."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.console import BadInput, Failed, check_savable, err, out, print_json, reserve_stdout
from tierkv.cli.progress import Progress
from tierkv.cli.store_open import JsonOption, PathOption, chains_of, only_one, opened, parse_duration
from tierkv.errors import StoreError
from tierkv.sizes import format_bytes

_LEAVES_ADVICE = "tierkv store ls --blocks lists them"

GC_EPILOG = """[bold]Examples[/bold]

tierkv store gc

tierkv store gc --budget 20GiB

tierkv store gc --max-age 7d --json
"""


def gc(
    path: PathOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="Evict blocks, those first that the store's rule says, until the records take no more: 512MiB, 20GiB.",
        ),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(metavar="DURATION", show_default=False, help="Forget blocks that are older: 30m, 12h, 7d, 2w."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give back the room that nobody uses; forget old blocks, or those above a budget, if asked for.

    Pinned blocks stay, with all that they continue. The store's capacity stays as it is: a budget is reached once, and later
    writes may use the room again.
    """
    budget_bytes = None if budget is None else options.size_bytes(budget, "--budget")
    seconds = None if max_age is None else parse_duration(max_age, "--max-age")
    with reserve_stdout(as_json), opened(path) as found:
        store, progress = found.store, Progress()
        with progress.stage("gc", "collecting"):
            report = store.gc(budget_bytes=budget_bytes, max_age_seconds=seconds)
        result: dict[str, Any] = {
            "path": str(store.path),
            "aged": report.aged,
            "orphans": report.orphans,
            "evicted": report.evicted,
            "retired": report.retired,
            "freed_bytes": report.freed_bytes,
            "blocks": store.stats().blocks,
            "allocated_bytes": store.allocated_bytes,
        }
    if as_json:
        print_json(result)
        return
    gone = f"{report.aged:,} too old, {report.evicted:,} above the budget, {report.orphans:,} of broken chains"
    out.print(f"forgotten: {gone}", soft_wrap=True)
    if report.retired:
        out.print(f"{report.retired:,} slots of damaged records may be used again")
    out.print(
        f"freed {format_bytes(report.freed_bytes)}; {result['blocks']:,} blocks remain, {format_bytes(result['allocated_bytes'])} "
        f"on disk",
        soft_wrap=True,
    )


CLEAR_EPILOG = """[bold]Examples[/bold]

tierkv store clear

tierkv store clear --namespace 3fa9 --yes
"""


def clear(
    path: PathOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            show_default=False,
            help="Only this one: the beginning of its digest, as tierkv store ls shows it.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forget all blocks, or those of one namespace, pinned ones too.

    Asks first where somebody can answer, and needs --yes elsewhere. Living conversations lose nothing; later ones compute
    their prompts again.
    """
    if not yes and not sys.stdin.isatty():
        raise BadInput("clear forgets what is kept, and nobody can be asked here; add --yes")
    with reserve_stdout(as_json), opened(path) as found:
        store = found.store
        infos = store.ls()
        digest = None
        if namespace is not None:
            digest = only_one(
                "namespace digest", namespace, [one.digest for one in infos], "tierkv store ls lists them"
            )
        chosen = [info for info in infos if digest in (None, info.digest)]
        if not yes:
            what = "all of" if digest is None else f"namespace {digest.hex()[:16]} of"
            size = f"{sum(one.blocks for one in chosen):,} blocks, {format_bytes(sum(one.num_bytes for one in chosen))}"
            _confirm(f"Forget {what} {store.path} ({size})?")
        before = store.allocated_bytes
        with Progress().stage("clear", "clearing"):
            number = store.clear(digest)
        result: dict[str, Any] = {
            "path": str(store.path),
            "namespace": None if digest is None else digest.hex(),
            "cleared": number,
            "freed_bytes": max(0, before - store.allocated_bytes),
        }
    if as_json:
        print_json(result)
    else:
        out.print(f"forgotten: {number:,} blocks; freed {format_bytes(result['freed_bytes'])}", soft_wrap=True)


def _confirm(question: str) -> None:
    # On stderr, since stdout is the result's; and without typer's own prompt, which ends with a traceback on Ctrl-D.
    err.print(f"{question} [y/N] ", end="", soft_wrap=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        err.print()
    if answer.strip().lower() not in {"y", "yes"}:
        raise Failed("not confirmed; nothing was forgotten")


EXPORT_EPILOG = """[bold]Examples[/bold]

tierkv store ls --blocks

tierkv store export 9c41 manual.tkvx
"""


def export(
    leaf: Annotated[
        str,
        typer.Argument(
            metavar="LEAF_KEY_PREFIX",
            show_default=False,
            help="Beginning of the key of a chain's last block, in hexadecimal digits; as many as only one begins with.",
        ),
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", show_default=False, help="Written whole, in place of one that is there.")
    ],
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a prefix, from its first block to the given last one, to one file that another store can import.

    The file holds the token ids of the prompt, in plain. Every record is checked while it is read.
    """
    with reserve_stdout(as_json), opened(path) as found:
        store = found.store
        chains = {chain.leaf: chain for chain in chains_of(store)}
        key = only_one("leaf key", leaf, list(chains), _LEAVES_ADVICE)
        check_savable(file, "FILE")
        if Path(file).resolve().is_relative_to(store.path.resolve()):
            raise BadInput(f"FILE {file} lies in the store itself; give a file outside of {store.path}")
        with Progress().stage("export", f"writing {file}"):
            report = store.export(key, file)
        result = {
            "path": str(store.path),
            "file": file,
            "key": key.hex(),
            "namespace": report.namespace.hex(),
            "blocks": len(report.keys),
            "tokens": chains[key].tokens,
            "bytes": report.num_bytes,
        }
    if as_json:
        print_json(result)
    else:
        out.print(f"{file}: {result['blocks']:,} blocks, {format_bytes(report.num_bytes)}", soft_wrap=True)


IMPORT_EPILOG = """[bold]Examples[/bold]

tierkv store import manual.tkvx

tierkv store import manual.tkvx --path /mnt/ssd/kv --json
"""


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False, help="From tierkv store export.")],
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a prefix in that another store has exported. What is there already stays.

    Its blocks are pinned for a minute. The whole file is checked, and keys are computed again from its token ids.
    It can still hold wrong KV under the right
    name: [bold]take files only from whom you would take the model's weights.[/bold]
    """
    with reserve_stdout(as_json), opened(path) as found:
        store = found.store
        if not store.capacity_bytes:
            raise Failed(
                f"{store.path} has lost its index and with it its capacity; a run with that disk.path sets it anew"
            )
        with Progress().stage("import", f"reading {file}"):
            try:
                report = store.import_(file)
            except StoreError as error:
                raise _refusal(file, error) from None
        result = {
            "path": str(store.path),
            "file": file,
            "namespace": report.namespace.hex(),
            "blocks": len(report.keys),
            "stored": report.stored,
            "bytes": report.num_bytes,
        }
    if as_json:
        print_json(result)
    else:
        out.print(f"{report.stored:,} of the {len(report.keys):,} blocks of {file} are in the store", soft_wrap=True)
    if report.stored < len(report.keys):
        room = f"a capacity of {format_bytes(store.capacity_bytes)}"
        raise Failed(f"only {report.stored:,} of {len(report.keys):,} blocks are stored: {result['path']} has {room}")


def _refusal(file: str, error: StoreError) -> Exception:
    """Say whose fault it is that a file could not be taken in: the file's, or that of the store's disk."""
    from tierkv.storage.prefix_export import read_chain

    try:
        read_chain(Path(file), lambda _namespace, _block: False)
    except StoreError as own:
        return BadInput(f"{own}; give a file from tierkv store export")
    return Failed(str(error))
