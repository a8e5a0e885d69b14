"""Looking after a prefix store: list, verify, collect, clear, export, import."""

import json
import os
import time

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    OTHER,
    chain,
    check_sound,
    keys_of,
    open_prefixes,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.errors import StoreError
from tierkv.storage.prefix_store import Block


def test_ls(store):
    assert store.ls() == []
    store.namespace(NAMESPACE, {"model": "one", "dtype": "bf16"})
    store.namespace(OTHER, {"model": "another"})
    put_all(store, chain(1, 5))
    put_all(store, chain(2, 5, 8000, OTHER), OTHER)
    store.touch(keys_of(chain(1, 5)))
    store.touch(keys_of(chain(1, 2)))
    store.flush(10)
    big, small = store.ls()
    assert (big.digest, big.manifest, big.blocks, big.num_bytes, big.hits) == (
        OTHER,
        {"model": "another"},
        5,
        40_000,
        0,
    )
    assert (small.blocks, small.num_bytes, small.hits) == (5, 5000, 7)
    assert 0 <= small.newest_seconds <= small.oldest_seconds < 10
    manifest = json.loads((store.path / "namespaces" / f"{OTHER.hex()[:16]}.json").read_text())
    assert manifest == {"digest": OTHER.hex(), "manifest": {"model": "another"}}


def test_verify_tells_progress_and_repairs_only_if_asked(store):
    for number in range(60):
        put_all(store, chain(number, 5))
    (found,) = store.match(NAMESPACE, [chain(7, 1)[0].key])
    store._parts.slabs.write(found.slot_bytes, found.slot, b"TKVX")
    seen = []
    report = store.verify(repair=False, on_progress=lambda done, total: seen.append((done, total)))
    assert report.checked == 300
    assert [key for key, _ in report.bad] == [found.key.hex()]
    assert "is damaged" in report.bad[0][1]
    assert seen == [(256, 300), (300, 300)]
    assert store.stats().damaged == 0
    assert len(store.verify(repair=True).bad) == 1
    assert store.stats().blocks == 295
    assert store.verify(repair=True).bad == []
    check_sound(store)


def test_gc_to_a_budget_by_age_and_of_what_nobody_uses(tmp_path, monkeypatch):
    store = open_prefixes(tmp_path, 16 * MIB)
    for number in range(20):
        put_all(store, chain(number, 6, 20_000))
    before = store.stats()
    report = store.gc()
    assert (report.aged, report.orphans, report.evicted) == (0, 0, 0)
    report = store.gc(budget_bytes=50 * 20_480)
    assert report.evicted == 70
    # The index takes a few pages more or less.
    assert report.freed_bytes == pytest.approx(70 * 20_480, abs=100_000)
    assert store.stats().allocated_bytes == pytest.approx(before.allocated_bytes - 70 * 20_480, abs=100_000)
    store.pin([chain(19, 2)[1].key], None)
    store.flush(10)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 1000)
    put_all(store, chain(100, 2))
    assert store.gc(max_age_seconds=500).aged == 48
    assert read_run(store, chain(19, 6, 20_000), 20_000) == 2
    assert read_run(store, chain(100, 2)) == 2
    check_sound(store)
    store.close()


def test_clear(store):
    store.namespace(NAMESPACE, {"model": "one"})
    store.namespace(OTHER, {"model": "another"})
    put_all(store, chain(1, 5))
    put_all(store, chain(2, 7, 8000, OTHER), OTHER)
    store.pin(keys_of(chain(1, 5)), None)
    store.flush(10)
    assert store.clear(OTHER) == 7
    assert read_run(store, chain(1, 5)) == 5
    assert [info.digest for info in store.ls()] == [NAMESPACE]
    assert len(list((store.path / "namespaces").iterdir())) == 1
    assert store.clear() == 5
    assert store.ls() == []
    assert store.stats().payload_bytes == 0
    check_sound(store)


# -- export and import ------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path):
    with prefixes(tmp_path / "from") as store:
        store.namespace(NAMESPACE, {"model": "one"})
        put_all(store, chain(1, 6, 5000))
        report = store.export(chain(1, 4)[-1].key, tmp_path / "file.tkvx")
        assert report.keys == keys_of(chain(1, 4))
        assert report.num_bytes == (tmp_path / "file.tkvx").stat().st_size
    return tmp_path / "file.tkvx"


def test_a_chain_comes_back_in_another_store(exported, tmp_path):
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.tkvx", "from"]
    for _ in range(2):
        with prefixes(tmp_path / "to") as store:
            report = store.import_(exported)
            assert (report.namespace, report.manifest, report.stored) == (NAMESPACE, {"model": "one"}, 4)
            assert read_run(store, chain(1, 6, 5000), 5000) == 4
            assert store.ls()[0].manifest == {"model": "one"}
            check_sound(store)


def test_what_was_taken_in_stays_a_minute_however_much_others_write(exported, tmp_path):
    keys = keys_of(chain(1, 4))
    with prefixes(tmp_path / "to", 4 * MIB) as store:
        store.pin(keys[:1], None)
        assert store.import_(exported).stored == 4
        for number in range(2, 300):
            put_all(store, chain(number, 6, 5000))
        assert store.stats().evicted
        assert read_run(store, chain(1, 4, 5000), 5000) == 4
        with store._parts.read() as book:
            assert [book.is_pinned(key, time.time() + 61) for key in keys] == [True, False, False, False]
        check_sound(store)


def test_a_chain_larger_than_the_queue(tmp_path):
    with prefixes(tmp_path / "from", 32 * MIB) as store:
        put_all(store, chain(1, 100, 50_000))
        store.export(chain(1, 100)[-1].key, tmp_path / "file.tkvx")
    with prefixes(tmp_path / "to", 32 * MIB, write_queue_bytes=200_000) as store:
        assert store.import_(tmp_path / "file.tkvx").stored == 100
        assert read_run(store, chain(1, 100, 50_000), 50_000) == 100


def test_what_cannot_be_exported(store, tmp_path):
    put_all(store, chain(1, 3))
    with pytest.raises(StoreError, match="is not in"):
        store.export(bytes(32), tmp_path / "file")
    with pytest.raises(StoreError, match="cannot write"):
        store.export(chain(1, 3)[-1].key, tmp_path / "nowhere" / "file")
    (found,) = store.match(NAMESPACE, [chain(1, 1)[0].key])
    store._parts.slabs.write(found.slot_bytes, found.slot, b"TKVX")
    with pytest.raises(StoreError, match="is damaged"):
        store.export(chain(1, 3)[-1].key, tmp_path / "file")
    assert not list(tmp_path.glob("*file*"))


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.integers(0, 255), st.sampled_from(["flip", "cut", "append"]))
def test_a_damaged_file_is_refused_in_one_line(tmp_path_factory, where, bits, kind):
    root = tmp_path_factory.getbasetemp() / "shared-import"
    source = root / "good.tkvx"
    if not source.exists():
        with prefixes(root) as store:
            put_all(store, chain(1, 3, 2000))
            store.export(chain(1, 3)[-1].key, source)
    data = bytearray(source.read_bytes())
    at = int(where * (len(data) - 1))
    if kind == "flip":
        data[at] ^= bits or 1
    elif kind == "cut":
        del data[at:]
    else:
        data += bytes(bits + 1)
    bad = root / "bad.tkvx"
    bad.write_bytes(data)
    with prefixes(root) as store:
        blocks = store.stats().blocks
        with pytest.raises(StoreError) as caught:
            store.import_(bad)
        assert "\n" not in str(caught.value)
        assert store.stats().blocks == blocks


def sealed(data):
    """Give forged contents the checksum of an honest file."""
    return data + xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"bytes": 50', b'"bytes": 40'),
        (b'"bytes": 5128', b'"bytes": -128'),
        (b'"namespace": "', b'"namespace": 1,"'),
        (b'"manifest": {"', b'"manifest": ["'),
        (b'"cost": 1.0', b'"cost": "x"'),
        (b'"key": "', b'"key": "0'),
    ],
)
def test_a_forged_header_is_refused(exported, tmp_path, old, new):
    data = exported.read_bytes()[:-16]
    assert old in data or old == b'"bytes": 50'
    exported.write_bytes(sealed(data.replace(old, new, 1) if old in data else data[:-1]))
    with prefixes(tmp_path / "to") as store:
        with pytest.raises(StoreError) as caught:
            store.import_(exported)
        assert "\n" not in str(caught.value)
        assert store.stats().blocks == 0


def test_bytes_under_another_prompts_name_are_refused(tmp_path):
    one, other = chain(1, 1)[0], chain(2, 1)[0]
    with prefixes(tmp_path / "from") as store:
        put_all(store, [Block(one.key, None, other.token_ids, one.payload)])
        store.export(one.key, tmp_path / "file.tkvx")
    with prefixes(tmp_path / "to") as store:
        with pytest.raises(StoreError, match="not the one that its key names"):
            store.import_(tmp_path / "file.tkvx")
        assert store.stats().blocks == 0


@pytest.mark.parametrize("content", [b"", b"TKVX", b"PK\3\4" + bytes(100), b"TKVX\2\0" + bytes(100)])
def test_what_is_no_export(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with prefixes(tmp_path) as store:
        with pytest.raises(StoreError):
            store.import_(tmp_path / "file")
        with pytest.raises(StoreError, match="cannot read"):
            store.import_(tmp_path / "nowhere")


def test_looking_with_whatever_capacity_it_has(tmp_path):
    with prefixes(tmp_path, 30 * MIB) as store:
        put_all(store, chain(1, 3))
    store = open_prefixes(tmp_path, None)
    assert store.capacity_bytes == 30 * MIB
    assert store.ls()[0].blocks == 3
    assert os.listdir(store.path / "index")  # noqa: PTH208 - its name is enough
    store.close()


def test_looking_at_a_store_that_has_lost_its_capacity_costs_no_block(tmp_path):
    """With a damaged state row the capacity is unknown; nothing may be evicted down to nothing for that."""
    with prefixes(tmp_path) as store:
        for number in range(4):
            put_all(store, chain(number, 5))
        with store._parts.index.write() as tables:
            (key, value) = next(iter(tables.items(b"state", b"")))
            tables.put(b"state", key, bytes(len(value)))
        store._writer.suspect = True
    for _ in range(2):
        with prefixes(tmp_path, None) as store:
            assert store.stats().blocks == 20
            store.touch(keys_of(chain(1, 5)))
            assert store.flush(10)
            assert store.stats().blocks == 20
            assert store.capacity_bytes == 0
    with prefixes(tmp_path) as store:  # whoever knows sets it anew
        assert store.capacity_bytes == 8 * MIB
        assert read_run(store, chain(3, 5)) == 5
        check_sound(store)


def test_looking_at_a_store_leaves_its_rule(tmp_path):
    with prefixes(tmp_path, eviction="cost") as store:
        put_all(store, chain(0, 5))
    with prefixes(tmp_path, None, eviction=None) as store:
        assert store._parts.policy.name == "cost"
    with prefixes(tmp_path, eviction="cost") as store, store._parts.read() as book:
        assert book.state.policy == "cost"


def test_blocks_that_come_while_orphans_are_looked_for_stay(store, monkeypatch):
    put_all(store, chain(0, 3))
    store.flush(10)
    drop_where = type(store._parts).drop_where

    def meanwhile(self, choose, **more):
        put_all(store, chain(1, 4))
        store.flush(10)
        return drop_where(self, choose, **more)

    monkeypatch.setattr(type(store._parts), "drop_where", meanwhile)
    assert store.gc().orphans == 0
    assert read_run(store, chain(1, 4)) == 4
