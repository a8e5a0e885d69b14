"""Every mistake is one line: the key, the value, where it came from, what is legal and what was probably meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import FIELDS, CacheConfig, DeviceConfig, HostConfig, PrefixConfig, load_config
from tierkv.errors import ConfigError
from tierkv.sizes import Size

GIB = 2**30


def setting(key, value):
    """Return a mapping, shaped as TOML would be, that sets one key."""
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def refusal(source=None, environ=None):
    """Return the one-line message with which ``load_config`` refuses."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


SIZES = 'legal: "512MiB", "1.5GiB", "2GB", a whole number of bytes, or "40%" of what is free'


class TestIllegalValues:
    @pytest.mark.parametrize(
        ("key", "value", "shown", "legal"),
        [
            ("block_size", 48, "48", "legal: 16, 32, 64, 128, 256 or 512"),
            ("block_size", 8, "8", "legal: 16, 32"),
            ("block_size", 1024, "1024", "legal: 16, 32"),
            ("block_size", 32.0, "32.0", "legal: 16, 32"),
            ("block_size", True, "true", "legal: 16, 32"),
            ("block_size", "32", '"32"', "legal: 16, 32"),
            ("block_size", {"a": 1}, "{'a': 1}", "legal: 16, 32"),
            ("device.capacity", 0, "0", SIZES),
            ("device.capacity", "0%", '"0%"', SIZES),
            ("device.capacity", "auto", '"auto"', SIZES),
            ("device.capacity", "lots", '"lots"', SIZES),
            ("device.capacity", 1.5, "1.5", SIZES),
            ("device.capacity", {"x": 1}, "{'x': 1}", SIZES),
            ("device.capacity", True, "true", SIZES),
            ("host.capacity", "Auto", '"Auto"', 'legal: "auto", "512MiB"'),
            ("host.capacity", -1, "-1", 'legal: "auto", "512MiB"'),
            ("disk.capacity", "120%", '"120%"', SIZES),
            ("disk.path", "", '""', "legal: the path of a folder"),
            ("disk.path", 3, "3", "legal: the path of a folder"),
            ("disk.path", "a\0b", '"a\\u0000b"', "legal: the path of a folder"),
            ("disk.readers", 0, "0", "legal: a whole number from 1 to 64"),
            ("disk.write_batch", 0, "0", "legal: a whole number from 1 to 4096"),
            ("disk.write_queue", 0, "0", SIZES),
            ("placement.keep_first", -1, "-1", "legal: a whole number from 0 up"),
            ("placement.keep_recent", 0, "0", "legal: a whole number from 1 up"),
            ("transfer.layers_ahead", -1, "-1", 'legal: "auto", or a whole number from 0 up'),
            ("transfer.layers_ahead", True, "true", 'legal: "auto", or a whole number from 0 up'),
            ("transfer.layers_ahead", "two", '"two"', 'legal: "auto", or a whole number from 0 up'),
            ("attention.path", "fast", '"fast"', 'legal: "auto", "paged" or "gathered"'),
            ("attention.cold_read", 1, "1", 'legal: "auto", "stream", "compute" or "promote"'),
            ("prefix.share", "yes", '"yes"', "legal: false or true"),
            ("prefix.share", 1, "1", "legal: false or true"),
            ("prefix.write_policy", "", '""', 'legal: "always", "second_sighting" or "never"'),
            ("prefix.min_tokens", -1, "-1", "legal: a whole number from 0 up"),
            ("prefix.eviction", "fifo", '"fifo"', 'legal: "lru", "s3fifo" or "cost"'),
            ("prefix.ttl_seconds", 1.5, "1.5", "legal: a whole number from 0 up"),
            ("prefix.salt", 3, "3", "legal: text"),
            ("prefix.salt", "\udc80", '"\\udc80"', "legal: text"),
        ],
        ids=repr,
    )
    def test_key_value_and_legal_values_are_named(self, key, value, shown, legal):
        message = refusal(setting(key, value))
        assert message.startswith(f"configuration mapping: {key} = {shown} is not ")
        assert legal in message

    @pytest.mark.parametrize("value", [4, [], "x", None, [{"capacity": 1}]], ids=repr)
    def test_a_section_that_is_none(self, value):
        message = refusal({"device": value})
        assert message.startswith("configuration mapping: device = ")
        assert "device is a section, write [device]" in message
        assert message == refusal({"device": value}, {"TIERKV_DEVICE__CAPACITY": "1GiB"})

    def test_everything_wrong_is_said_at_once_each_with_its_origin(self, tmp_path):
        path = tmp_path / "tierkv.toml"
        path.write_text("block_size = 3\nbloksize = 3\n[device]\ncapacity = 'x'\n[disk]\nreaders = 0\n")
        message = refusal(path, {"TIERKV_DISK__READERS": "99", "TIERKV_NOPE": "1", "TIERKV_BLOCK_SIZE": "64"})
        file_part, _, rest = message.partition("; TIERKV_DISK__READERS: ")
        assert file_part.startswith(f'{path}: device.capacity = "x"')
        assert file_part.endswith("; unknown key bloksize (did you mean block_size?)")
        assert rest.startswith("disk.readers = 99 is not possible")
        assert "; environment: unknown variable TIERKV_NOPE (known: TIERKV_BLOCK_SIZE, " in rest

    def test_constructors_raise_the_same_lines(self):
        with pytest.raises(ConfigError, match=r"^device.capacity = 0 is not possible"):
            DeviceConfig(capacity=0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^unknown key prefix.sahre \(did you mean prefix.share\?\)$"):
            PrefixConfig(sahre=True)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match=r'^block_size = 3 .*; host.capacity = "x" is not a size'):
            CacheConfig(block_size=3, host={"capacity": "x"})  # type: ignore[arg-type]
        assert HostConfig(capacity="1GiB").capacity == Size(GIB)  # type: ignore[arg-type]

    def test_long_and_multi_line_values_stay_one_short_line(self):
        assert len(refusal({"device": {"capacity": "a\n" * 10_000}})) < 250


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=6), inner, max_size=2),
)


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ({"capacity": 1}, "unknown key capacity (did you mean device.capacity, host.capacity or disk.capacity?)"),
            ({"capcity": 1}, "unknown key capcity (did you mean device.capacity, host.capacity or disk.capacity?)"),
            ({"device": {"keep_recent": 1}}, "unknown key device.keep_recent (did you mean placement.keep_recent?)"),
            (
                {"placement": {"keep_recnt": 1}},
                "unknown key placement.keep_recnt (did you mean placement.keep_recent?)",
            ),
            ({"placement": {"keep-first": 1}}, "unknown key placement.keep-first (did you mean placement.keep_first?)"),
            ({"placement": {"Keep_First": 1}}, "unknown key placement.Keep_First (did you mean placement.keep_first?)"),
            ({"disk": {"block_size": 1}}, "unknown key disk.block_size (did you mean block_size?)"),
            ({"blocksize": 1}, "unknown key blocksize (did you mean block_size?)"),
            ({"device_capacity": 1}, "unknown key device_capacity (did you mean device.capacity?)"),
            ({"device.capacity": 1}, 'unknown key "device.capacity" (did you mean device.capacity?)'),
            ({"TIERKV_DEVICE__CAPACITY": 1}, "unknown key TIERKV_DEVICE__CAPACITY (did you mean device.capacity?)"),
            (
                {"host": {"TIERKV_HOST__CAPACITY": 1}},
                "unknown key host.TIERKV_HOST__CAPACITY (did you mean host.capacity?)",
            ),
            ({"disk__readers": 1}, "unknown key disk__readers (did you mean disk.readers?)"),
            ({"plcement": {"x": 1}}, "unknown section [plcement] (did you mean [placement]?)"),
            ({"Device": {}}, "unknown section [Device] (did you mean [device]?)"),
            ({"zzzzz": {}}, "unknown section [zzzzz] (known: [device], [host], [disk], "),
            ({"disk": {"zzzzz": 1}}, "unknown key disk.zzzzz (known: disk.path, disk.capacity, disk.readers, "),
            ({"zzzzz": 1}, "unknown key zzzzz (known: block_size, [device], [host], "),
            ({1: 2}, "unknown key 1 (known: "),
            ({"a\nb": 2}, 'unknown key "a\\nb" ('),
            ({"": 2}, 'unknown key "" ('),
            ({"device": {"": 2}}, 'unknown key device."" ('),
        ],
        ids=repr,
    )
    def test_the_nearest_right_spelling_is_offered(self, source, expected):
        assert expected in refusal(source)

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("TIERKV_DEVICE_CAPACITY", "TIERKV_DEVICE__CAPACITY"),
            ("TIERKV_CAPACITY", "TIERKV_DEVICE__CAPACITY, TIERKV_HOST__CAPACITY or TIERKV_DISK__CAPACITY"),
            ("TIERKV_DEVICE", "TIERKV_DEVICE__CAPACITY"),
            ("TIERKV_PLACEMENT", "TIERKV_PLACEMENT__KEEP_FIRST or TIERKV_PLACEMENT__KEEP_RECENT"),
            ("TIERKV_device__capacity", "TIERKV_DEVICE__CAPACITY"),
            ("TIERKV_BLOCKSIZE", "TIERKV_BLOCK_SIZE"),
            ("tierkv_block_size", "TIERKV_BLOCK_SIZE"),
            ("tierkv_host_capacity", "TIERKV_HOST__CAPACITY"),
            ("Tierkv_Config", "TIERKV_CONFIG"),
            ("TIERKV_CONFIGG", "TIERKV_CONFIG"),
            ("TIERKV_CACHEDIR", "TIERKV_CACHE_DIR"),
        ],
    )
    def test_variables_too(self, name, near):
        assert refusal(None, {name: "1"}) == f"environment: unknown variable {name} (did you mean {near}?)"

    @pytest.mark.parametrize("name", ["TIERKV_", "TIERKV_X\nY", "TIERKV___", "TIERKV_\udc80"], ids=repr)
    def test_odd_names_are_one_printable_line(self, name):
        refusal(None, {name: "1"}).encode()

    @given(st.dictionaries(st.text(max_size=8) | st.sampled_from(list(FIELDS)), JUNK, max_size=3))
    def test_any_mapping_is_a_config_or_one_line(self, source):
        try:
            load_config(source, {})
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1
