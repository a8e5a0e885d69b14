"""``tierkv store pin`` and ``unpin``: prefixes that no eviction may take."""

from typing import Annotated, Any

import typer

from tierkv.cli.console import Failed, out, print_json, reserve_stdout
from tierkv.cli.store_open import JsonOption, PathOption, chains_of, only_one, opened, parse_duration

_ADVICE = "tierkv store ls --blocks lists them"
_FLUSH_SECONDS = 30.0

LeafArgument = Annotated[
    str,
    typer.Argument(
        metavar="LEAF_KEY_PREFIX",
        show_default=False,
        help="Beginning of the key of a chain's last block, in hexadecimal digits; as many as only one begins with.",
    ),
]

PIN_EPILOG = """[bold]Examples[/bold]

tierkv store ls --blocks

tierkv store pin 9c41

tierkv store pin 9c41 --for 7d
"""


def pin(
    leaf: LeafArgument,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", show_default=False, help="Until then: 30m, 12h, 7d. Default: for good."
        ),
    ] = None,
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a prefix, from its first block to the given last one, from being evicted.

    For all processes, also after a restart. Blocks that are too old (prefix.ttl_seconds) and `clear` take it all the same.
    """
    seconds = None if duration is None else parse_duration(duration, "--for")
    _change(leaf, path, as_json, {"pinned": True, "seconds": seconds})


UNPIN_EPILOG = """[bold]Examples[/bold]

tierkv store unpin 9c41
"""


def unpin(leaf: LeafArgument, path: PathOption = None, as_json: JsonOption = False) -> None:
    """Let a prefix be evicted again."""
    _change(leaf, path, as_json, {"pinned": False})


def _change(leaf: str, path: str | None, as_json: bool, wanted: dict[str, Any]) -> None:
    with reserve_stdout(as_json), opened(path) as found:
        store = found.store
        chains = {chain.leaf: chain for chain in chains_of(store)}
        key = only_one("leaf key", leaf, list(chains), _ADVICE)
        if wanted["pinned"]:
            store.pin([key], wanted["seconds"])
        else:
            store.unpin([key])
        if not store.flush(_FLUSH_SECONDS):
            raise Failed(f"{store.path} could not be written to: {store.failed or 'its disk does not answer'}")
        result = {"path": str(store.path), "key": key.hex(), "tokens": chains[key].tokens, **wanted}
    if as_json:
        print_json(result)
    else:
        done = "pinned" if wanted["pinned"] else "may be evicted again"
        out.print(f"{key.hex()[:16]}: {result['tokens']:,} tokens, {done}", soft_wrap=True)
