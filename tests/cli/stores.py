"""What the tests of ``tierkv store`` share: a store with something in it, and ways to damage one."""

from pathlib import Path

from tests.storage.prefixes import (
    NAMESPACE,
    chain,
    files_below,
    prefixes,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = {"model": "/models/tiny-135M", "kv": {"dtype": "bfloat16", "block_size": 4}}
COMMANDS = (
    ["ls"],
    ["stats"],
    ["verify"],
    ["gc"],
    ["clear", "--yes"],
    ["export", "ab", "{tmp}/out"],
    ["import", "{tmp}/in"],
)


def branch():
    """A block that continues the first of chain 1 in another way."""
    from tierkv.keys import chain_keys
    from tierkv.storage.prefix_store import Block

    first = chain(1, 1)[0].key
    return Block(chain_keys(first, [7, 7, 7, 7], 4)[0], first, (7, 7, 7, 7), (bytes(1000),))


def snapshot(folder):
    return {path: path.read_bytes() for path in files_below(folder)}


def damage(root, block, namespace=NAMESPACE):
    """Flip one byte of a block's record in its slab."""
    with prefixes(root, None) as store:
        (found,) = store.match(namespace, [block.key])
        path = store._parts.slabs.path(found.slot_bytes)
    flip(path, found.slot * found.slot_bytes + 150)


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def words(text):
    return " ".join(text.split())
