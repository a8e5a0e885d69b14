"""The prefix store where bytes rot: a miss, an error at open, or an empty store. Never wrong bytes, never a crash."""

import logging
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.prefixes import MIB, NAMESPACE, chain, check_sound, files_below, keys_of, prefixes, put_all, read_run
from tierkv.errors import RecordError, StoreError
from tierkv.storage.prefix_store import PrefixStore

CAPACITY = 5 * MIB
CHAINS = 14
SIZE = 3000


def make(root):
    """Make a store with everything in it: chains, room of evicted ones, pins, sighted keys, a retired slot."""
    with prefixes(root, CAPACITY) as store:
        store.namespace(NAMESPACE, {"model": "m"})
        for number in range(8):
            put_all(store, chain(number, 6, SIZE))
        store.gc(budget_bytes=30 * 4096)
        for number in range(8, CHAINS):
            put_all(store, chain(number, 6, SIZE))
        (found,) = store.match(NAMESPACE, [chain(9, 6, SIZE)[0].key])
        flip(store._parts.slabs.path(found.slot_bytes), found.slot * found.slot_bytes + 200)
        assert len(store.verify(repair=True).bad) == 1
        store.sighted(keys_of(chain(99, 5)))
        store.pin(keys_of(chain(CHAINS - 1, 2)), None)
        store.touch(keys_of(chain(CHAINS - 2, 6)))


def flip(path, offset, bits=0x10):
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def read_all(store):
    """Read whatever is there; wrong bytes fail."""
    return sum(read_run(store, chain(number, 6, SIZE), SIZE) for number in range(CHAINS))


def use(root):
    """Do with a store what a process does, then check it; a one-line refusal is fine. Say how many blocks it had."""
    try:
        store = PrefixStore.open(root, CAPACITY, write_queue_bytes=MIB)
    except StoreError as error:
        assert "\n" not in str(error)
        return -1
    try:
        blocks = read_all(store)
        store.ls()
        for block in chain(1000, 6, SIZE):
            store.put(NAMESPACE, block)
        store.flush(10)
        store.verify(repair=True)
        assert read_all(store) <= blocks
        for block in chain(1000, 6, SIZE):
            store.put(NAMESPACE, block)
    finally:
        store.close()
    with prefixes(root, CAPACITY) as store:
        check_sound(store, exact=False)
        assert read_run(store, chain(1000, 6, SIZE), SIZE) == 6
    return blocks


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    root = tmp_path_factory.mktemp("image")
    make(root)
    return root


@pytest.fixture
def copy(image, tmp_path):
    shutil.copytree(image, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_an_undamaged_copy_is_complete(copy):
    assert use(copy) > 50


damages = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.none()),
    st.tuples(st.just("zeros"), st.floats(0, 1), st.integers(1, 9000)),
    st.tuples(st.just("swap"), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just("append"), st.none(), st.integers(1, 9000)),
)


def damage(path, kind, where, what):
    data = bytearray(path.read_bytes())
    at = int((where or 0) * (len(data) - 1))
    if kind == "flip":
        data[at] ^= what
    elif kind == "cut":
        del data[at:]
    elif kind == "zeros":
        data[at : at + what] = bytes(len(data[at : at + what]))
    elif kind == "append":
        data += b"\xa5" * what
    else:
        one, other = at // 4096 * 4096, int(what * (len(data) - 1)) // 4096 * 4096
        data[one : one + 4096], data[other : other + 4096] = data[other : other + 4096], data[one : one + 4096]
    path.write_bytes(data)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["data.mdb", "data.mdb", "data.mdb", "slab-4096.bin", "slab-4096.bin", ""]),
    st.integers(0, 100),
    st.lists(damages, min_size=1, max_size=4),
    st.booleans(),
)
def test_any_damage_of_any_file(image, tmp_path_factory, name, which, script, unclean):
    root = tmp_path_factory.mktemp("rot")
    shutil.copytree(image, root, dirs_exist_ok=True)
    files = [path for path in files_below(root) if path.stat().st_size and name in ("", path.name)]
    if unclean:  # as a killed process leaves it
        (root / "prefix" / "index.digest").unlink()
    path = files[which % len(files)]
    for kind, where, what in script:
        if path.exists() and path.stat().st_size:
            damage(path, kind, where, what)
    use(root)
    shutil.rmtree(root)


def test_each_byte_of_a_records_header_and_some_of_its_payload(copy):
    blocks = chain(CHAINS - 1, 6, SIZE)
    with prefixes(copy, CAPACITY) as store:
        (found,) = store.match(NAMESPACE, [blocks[0].key])
        path, start = store._parts.slabs.path(found.slot_bytes), found.slot * found.slot_bytes
        for offset in [*range(96 + 8 * len(blocks[0].token_ids)), 200, 2000, 96 + 32 + SIZE - 1]:
            flip(path, start + offset)
            assert "is damaged" in store._reader.check(found)
            flip(path, start + offset)
            assert store._reader.check(found) == ""
        flip(path, start)
        with pytest.raises(RecordError, match="is damaged"):
            store.read(found, blocks[0].token_ids, SIZE, bytes)
        assert store.stats().damaged == 1


def test_a_damaged_record_is_taken_out_with_its_chain_and_its_slot_is_not_used_again(copy):
    blocks = chain(CHAINS - 1, 6, SIZE)
    with prefixes(copy, CAPACITY) as store:
        found = store.match(NAMESPACE, keys_of(blocks))
        slot = found[2].slot
        flip(store._parts.slabs.path(found[2].slot_bytes), slot * found[2].slot_bytes + 500)
        assert read_run(store, blocks, SIZE) == 2
        assert store.stats().damaged == 1
        assert len(store.match(NAMESPACE, keys_of(blocks))) == 2  # at once
        store.flush(10)
        check_sound(store)
        put_all(store, blocks)
        for number in range(200, 220):
            put_all(store, chain(number, 6, SIZE))
        assert read_run(store, blocks, SIZE) == 6
        with store._parts.read() as book:
            assert slot not in [row.slot for row in book.all_rows() if row.slot_bytes == found[2].slot_bytes]
        assert store.gc().retired == 2  # this one and that of the image
        check_sound(store)


def test_records_that_were_swapped_are_misses(copy):
    one, other = chain(CHAINS - 1, 1, SIZE)[0], chain(CHAINS - 2, 1, SIZE)[0]
    with prefixes(copy, CAPACITY) as store:
        first, second = (store.match(NAMESPACE, [block.key])[0] for block in (one, other))
        path = store._parts.slabs.path(first.slot_bytes)
        data = bytearray(path.read_bytes())
        places = [slice(found.slot * 4096, found.slot * 4096 + 4096) for found in (first, second)]
        data[places[0]], data[places[1]] = data[places[1]], data[places[0]]
        path.write_bytes(data)
        assert read_run(store, [one], SIZE) == read_run(store, [other], SIZE) == 0
        assert store.stats().damaged == 2


def test_a_slab_of_another_store_or_of_another_day(copy, tmp_path_factory):
    root = tmp_path_factory.mktemp("another")
    make(root)
    shutil.copyfile(root / "prefix" / "slab-4096.bin", copy / "prefix" / "slab-4096.bin")
    assert use(copy) == 0


def test_an_index_of_yesterday(tmp_path):
    with prefixes(tmp_path, CAPACITY) as store:
        put_all(store, chain(0, 6, SIZE))
    shutil.copytree(tmp_path / "prefix", tmp_path / "yesterday")
    with prefixes(tmp_path, CAPACITY) as store:
        store.clear()
        put_all(store, chain(1, 6, SIZE))
    for name in ("index/data.mdb", "index.digest"):
        shutil.copyfile(tmp_path / "yesterday" / name, tmp_path / "prefix" / name)
    with prefixes(tmp_path, CAPACITY) as store:
        assert read_run(store, chain(0, 6, SIZE), SIZE) == 0
        assert read_run(store, chain(1, 6, SIZE), SIZE) == 0
        put_all(store, chain(1, 6, SIZE))
        assert read_run(store, chain(1, 6, SIZE), SIZE) == 6
        store.flush(10)
        check_sound(store, exact=False)


@pytest.mark.parametrize("noise", [b"x", b"noise" * 10_000, bytes(65536)])
def test_an_index_that_is_none_is_moved_aside_and_one_such_is_kept(copy, caplog, noise):
    data = copy / "prefix" / "index" / "data.mdb"
    for turn in range(3):
        data.write_bytes(noise)
        with prefixes(copy, CAPACITY) as store:
            assert store.stats().blocks == 0
            put_all(store, chain(turn, 6, SIZE))
            check_sound(store)
    assert [path.name for path in sorted((copy / "prefix").glob("index.*"))] == ["index.damaged-3", "index.digest"]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 3
    with prefixes(copy, CAPACITY) as store:
        assert read_run(store, chain(2, 6, SIZE), SIZE) == 6
        store.gc()
        assert not list((copy / "prefix").glob("index.damaged-*"))


def test_an_index_or_a_slab_that_is_gone(copy):
    shutil.rmtree(copy / "prefix" / "index")
    assert use(copy) == 0
    (copy / "prefix" / "slab-4096.bin").unlink()
    assert use(copy) == 0


def test_an_index_that_lmdb_finds_damaged_is_not_trusted_again(copy, caplog):
    with prefixes(copy, CAPACITY) as store:
        store._writer.broken = True
    with prefixes(copy, CAPACITY) as store:
        assert "LMDB found it so" in store._parts.folder.moved
        assert store.stats().blocks == 0


def test_rows_that_rot_while_the_store_is_open(copy, caplog):
    key = chain(CHAINS - 1, 1)[0].key
    with prefixes(copy, CAPACITY) as store:
        with store._parts.index.write() as tables:
            value = bytearray(tables.get(b"entries", key))
            value[40] ^= 1
            tables.put(b"entries", key, bytes(value))
        assert store.match(NAMESPACE, [key]) == []
        store.touch([key])
        assert not store.flush(10)
        assert "restart to repair" in store.stats().failed
        assert store.verify(repair=False).bad == [(key.hex(), "its row in the index is damaged; restart to repair it")]
    with prefixes(copy, CAPACITY) as store:
        assert "was mended" in caplog.text
        check_sound(store)
        assert read_all(store) > 40


def test_manifests_are_for_people_and_their_damage_changes_nothing(copy):
    (path,) = (copy / "prefix" / "namespaces").iterdir()
    path.write_bytes(b"\xff" * 100)
    with prefixes(copy, CAPACITY) as store:
        assert store.ls()[0].manifest == {"model": "m"}
        store.namespace(NAMESPACE, {"model": "m"})
        assert '"model": "m"' in path.read_text()


def test_a_digest_is_not_believed_for_another_file(copy):
    os.utime(copy / "prefix" / "index" / "data.mdb", (0, 0))
    with prefixes(copy, CAPACITY) as store:
        assert store._parts.folder.clean
    data = copy / "prefix" / "index" / "data.mdb"
    flip(data, data.stat().st_size - 1)
    with prefixes(copy, CAPACITY) as store:
        assert not store._parts.folder.clean
