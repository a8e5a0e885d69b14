"""One object from a file, a mapping or the environment; every mistake is one line; defaults adapt, wishes do not."""

import copy
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tierkv import config as config_module
from tierkv.config import (
    NOT_YET,
    OTHER_ENVIRONMENT,
    Budgets,
    CacheConfig,
    DeviceConfig,
    DiskConfig,
    HostConfig,
    PrefixConfig,
    default_toml,
    load_config,
    resolve,
)
from tierkv.errors import ConfigError
from tierkv.sizes import Size, parse_size

GIB = 2**30

# The contract of DESIGN: every key with its default, as a user would spell it.
CONTRACT = {
    "block_size": 32,
    "device.capacity": "2GiB",
    "host.capacity": "auto",
    "disk.path": "~/.cache/tierkv",
    "disk.capacity": "100GiB",
    "disk.readers": 2,
    "disk.write_batch": 16,
    "disk.write_queue": "256MiB",
    "placement.keep_first": 1,
    "placement.keep_recent": 4,
    "transfer.layers_ahead": 2,
    "attention.path": "auto",
    "attention.cold_read": "auto",
    "prefix.share": True,
    "prefix.persist": False,
    "prefix.write_policy": "second_sighting",
    "prefix.min_tokens": 256,
    "prefix.eviction": "lru",
    "prefix.ttl_seconds": 0,
    "prefix.salt": "",
}

# Another legal value for each key: as TOML text, and what it becomes.
OTHER = {
    "block_size": ("64", 64),
    "device.capacity": ('"40%"', parse_size("40%")),
    "host.capacity": ('"16GiB"', Size(16 * GIB)),
    "disk.path": ('"/data/kv cache"', Path("/data/kv cache")),
    "disk.capacity": ("0", Size(0)),
    "disk.readers": ("4", 4),
    "disk.write_batch": ("1", 1),
    "disk.write_queue": ('"1.5GiB"', Size(3 * GIB // 2)),
    "placement.keep_first": ("0", 0),
    "placement.keep_recent": ("1", 1),
    "transfer.layers_ahead": ("0", 0),
    "attention.path": ('"gathered"', "gathered"),
    "attention.cold_read": ('"stream"', "stream"),
    "prefix.share": ("false", False),
    "prefix.persist": ("false", False),
    "prefix.write_policy": ('"never"', "never"),
    "prefix.min_tokens": ("0", 0),
    "prefix.eviction": ('"s3fifo"', "s3fifo"),
    "prefix.ttl_seconds": ("3600", 3600),
    "prefix.salt": ('"tenant \\"A\\"\\n\\u007f é"', 'tenant "A"\n\x7f é'),
}


def nested(values):
    """Return dotted keys as the nested dict that TOML would give."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (result.setdefault(section, {}) if section else result)[name] = value
    return result


def variable(key):
    return "TIERKV_" + key.replace(".", "__").upper()


def refusal(source=None, environ=None):
    """Return the one-line message with which ``load_config`` refuses."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def toml(folder, text):
    path = folder / "tierkv.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class TestTheContract:
    def test_keys_and_defaults(self):
        config = CacheConfig()
        assert list(config_module._FIELDS) == list(CONTRACT)
        assert load_config(nested(CONTRACT), {}) == config == load_config(environ={})
        assert config.explicit() == {}

    def test_other_values_cover_every_key(self):
        assert list(OTHER) == list(CONTRACT)

    @pytest.mark.parametrize("key", CONTRACT)
    def test_file_mapping_string_path_and_environment_give_the_same_object(self, key, tmp_path):
        text, expected = OTHER[key]
        section, _, name = key.rpartition(".")
        path = toml(tmp_path, f"[{section}]\n{name} = {text}\n" if section else f"{name} = {text}\n")
        from_file = load_config(path, {})
        assert from_file.value(key) == expected
        assert from_file.explicit() == {key: expected}
        assert from_file == load_config(str(path), {})
        assert from_file == load_config(nested({key: tomllib.loads(f"x = {text}")["x"]}), {})
        assert from_file == load_config(nested({key: expected}), {})
        assert from_file == load_config(None, {variable(key): text})
        assert from_file == load_config(None, {"TIERKV_CONFIG": str(path)})
        assert from_file == CacheConfig().replace({key: expected})
        assert hash(from_file) == hash(load_config(path, {}))
        if key != "prefix.persist":
            assert from_file != CacheConfig()

    def test_block_sizes_are_powers_of_two(self):
        for block_size in (16, 32, 64, 128, 256, 512):
            assert CacheConfig(block_size=block_size).block_size == block_size

    def test_it_is_frozen_all_the_way_down(self):
        config = CacheConfig()
        with pytest.raises(ValidationError, match="frozen"):
            config.block_size = 64
        with pytest.raises(ValidationError, match="frozen"):
            config.device.capacity = Size(1)
        with pytest.raises(ValidationError, match="frozen"):
            config.device = DeviceConfig()

    def test_it_survives_copy_and_pickle_with_what_was_set(self):
        config = load_config({"device": {"capacity": "4GiB"}, "disk": {"path": "/x"}}, {})
        for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert other == config
            assert other.explicit() == config.explicit()

    def test_importing_it_loads_no_heavy_library(self):
        code = "import sys, tierkv.config; print({'torch', 'transformers', 'lmdb', 'numpy'} & set(sys.modules))"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "set()"


class TestPrecedence:
    def test_environment_over_file_over_default(self, tmp_path):
        path = toml(tmp_path, "[device]\ncapacity = '1GiB'\n[placement]\nkeep_recent = 9\n")
        config = load_config(path, {"TIERKV_DEVICE__CAPACITY": "3GiB"})
        assert config.device.capacity == Size(3 * GIB)
        assert config.placement.keep_recent == 9
        assert config.placement.keep_first == 1

    def test_environment_over_mapping_which_stays_as_it_was(self):
        source = {"device": {"capacity": "1GiB"}}
        assert load_config(source, {"TIERKV_DEVICE__CAPACITY": "3GiB"}).device.capacity == Size(3 * GIB)
        assert source == {"device": {"capacity": "1GiB"}}

    def test_a_ready_config_is_taken_as_it_is(self):
        config = CacheConfig(block_size=64)
        assert load_config(config, {"TIERKV_BLOCK_SIZE": "16", "TIERKV_NONSENSE": "1"}) is config

    def test_a_given_source_over_tierkv_config(self, tmp_path):
        environ = {"TIERKV_CONFIG": str(tmp_path / "missing.toml")}
        assert load_config({}, environ) == CacheConfig()
        assert load_config(None, {"TIERKV_CONFIG": ""}) == CacheConfig()
        assert "missing.toml (from TIERKV_CONFIG): no such file" in refusal(None, environ)

    def test_the_process_environment_is_the_default(self, monkeypatch):
        monkeypatch.setenv("TIERKV_BLOCK_SIZE", "128")
        assert load_config().block_size == 128

    def test_names_of_other_parts_and_other_prefixes_are_left_alone(self):
        others = dict.fromkeys(OTHER_ENVIRONMENT, "") | {"TIERKVX": "1", "tierkv_block_size": "x", "PATH": "/bin"}
        assert load_config(None, others) == CacheConfig()

    def test_a_mapping_may_hold_ready_sections(self):
        section = DiskConfig(readers=7)
        config = load_config({"disk": section}, {"TIERKV_DISK__WRITE_BATCH": "3"})
        assert config.explicit() == {"disk.readers": 7, "disk.write_batch": 3}
        assert section.write_batch == 16

    def test_replace_sets_dotted_keys_and_keeps_the_rest(self):
        config = load_config({"disk": {"readers": 7}}, {}).replace({"block_size": 64, "disk.write_batch": 3})
        assert config.explicit() == {"block_size": 64, "disk.readers": 7, "disk.write_batch": 3}
        with pytest.raises(ConfigError, match=r'^--device: device.capacity = "x" is not a size'):
            config.replace({"device.capacity": "x"}, origin="--device")
        with pytest.raises(ConfigError, match=r"^unknown key device.capacty \(did you mean device.capacity\?\)"):
            config.replace({"device.capacty": "x"})


class TestEnvironmentValues:
    @pytest.mark.parametrize(
        ("key", "text", "value"),
        [
            ("device.capacity", "4GiB", Size(4 * GIB)),
            ("device.capacity", "1_000", Size(1000)),
            ("device.capacity", "40%", parse_size("40%")),
            ("host.capacity", "auto", "auto"),
            ("host.capacity", "0", Size(0)),
            ("prefix.share", "false", False),
            ("prefix.salt", "123", "123"),
            ("prefix.salt", "true", "true"),
            ("prefix.salt", "2024-01-01", "2024-01-01"),
            ("prefix.salt", "", ""),
            ("prefix.salt", "'quoted'", "quoted"),
            ("prefix.salt", "a\nb = 1", "a\nb = 1"),
            ("prefix.salt", "1\nb = 1", "1\nb = 1"),
            ("disk.path", "/data", Path("/data")),
            ("disk.path", "7", Path("7")),
        ],
    )
    def test_toml_or_else_text(self, key, text, value):
        config = load_config(None, {variable(key): text})
        assert config.value(key) == value
        assert type(config.value(key)) is type(value)

    @pytest.mark.parametrize("text", ["", "x", "64\nx = 1", "64.0", "true", "[64]", "[" * 5000])
    def test_no_text_is_taken_for_a_number(self, text):
        message = refusal(None, {"TIERKV_BLOCK_SIZE": text})
        assert message.startswith("TIERKV_BLOCK_SIZE: block_size = ")
        assert "legal: 16, 32, 64, 128, 256 or 512" in message


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
            ("transfer.layers_ahead", -1, "-1", "legal: a whole number from 0 up"),
            ("attention.path", "fast", '"fast"', 'legal: "auto" or "gathered"'),
            ("attention.cold_read", 1, "1", 'legal: "auto" or "stream"'),
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
        message = refusal(nested({key: value}))
        assert message.startswith(f"configuration mapping: {key} = {shown} is not ")
        assert legal in message

    @pytest.mark.parametrize("value", [4, [], "x", None, [{"capacity": 1}]], ids=repr)
    def test_a_section_that_is_none(self, value):
        message = refusal({"device": value})
        assert message.startswith("configuration mapping: device = ")
        assert "device is a section, write [device]" in message
        assert message == refusal({"device": value}, {"TIERKV_DEVICE__CAPACITY": "1GiB"})

    @pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NOT_YET.items() for value in values])
    def test_what_this_version_cannot_honour_is_refused_not_ignored(self, key, value, monkeypatch):
        message = refusal(nested({key: value}))
        assert message.startswith(f"configuration mapping: {key} = ")
        assert "not available in this version (legal: " in message
        with monkeypatch.context() as patch:  # deleting the line from the table is all it takes
            patch.setattr(config_module, "NOT_YET", {})
            assert load_config(nested({key: value}), {}).value(key) == value

    def test_everything_wrong_is_said_at_once_each_with_its_origin(self, tmp_path):
        path = toml(tmp_path, "block_size = 3\nbloksize = 3\n[device]\ncapacity = 'x'\n[disk]\nreaders = 0\n")
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
            ("TIERKV_CONFIGG", "TIERKV_CONFIG"),
            ("TIERKV_CACHEDIR", "TIERKV_CACHE_DIR"),
        ],
    )
    def test_variables_too(self, name, near):
        assert refusal(None, {name: "1"}) == f"environment: unknown variable {name} (did you mean {near}?)"

    @pytest.mark.parametrize("name", ["TIERKV_", "TIERKV_X\nY", "TIERKV___", "TIERKV_\udc80"], ids=repr)
    def test_odd_names_are_one_printable_line(self, name):
        refusal(None, {name: "1"}).encode()

    @given(st.dictionaries(st.text(max_size=8) | st.sampled_from(list(OTHER)), JUNK, max_size=3))
    def test_any_mapping_is_a_config_or_one_line(self, source):
        try:
            load_config(source, {})
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("block_size = \n", "not valid TOML: Invalid value (at line 1, column 14)"),
            ("[device]\ncapacity = 2GiB\n", "line 2"),
            ("block_size = 32\nblock_size = 32\n", "line 2"),
            ("a = 1\nb = [\n1,", "at line 3, the end of the file"),
            (b"block_size = 32 # \xff\n", "not UTF-8 at byte 18"),
            ("x = " + "[" * 5000, "not valid TOML"),
            ("x = " + "9" * 5000, "not valid TOML"),
        ],
        ids=["value", "bare size", "twice", "end", "utf8", "nesting", "digits"],
    )
    def test_text_that_is_no_toml_says_where(self, tmp_path, text, expected):
        path = toml(tmp_path, text)
        message = refusal(path)
        assert message.startswith(f"{path}: ")
        assert expected in message

    def test_paths_that_are_no_file(self, tmp_path):
        assert refusal(tmp_path / "no.toml") == f"{tmp_path}/no.toml: no such file"
        assert refusal(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
        assert "Not a directory" in refusal(toml(tmp_path, "") / "x")
        assert "cannot be read" in refusal("a\0b")
        assert "cannot be read" in refusal("~no_such_user_here/tierkv.toml")
        assert "one\\nline: no such file" in refusal("one\nline")

    @pytest.mark.parametrize("source", [3, ["x"], b"x", CacheConfig], ids=repr)
    def test_sources_that_are_none(self, source):
        assert "a path, a mapping, a CacheConfig or None" in refusal(source)

    def test_home_byte_order_mark_and_empty_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        toml(tmp_path, b"\xef\xbb\xbfblock_size = 64\r\n")
        assert load_config("~/tierkv.toml", {}).block_size == 64
        toml(tmp_path, "")
        assert load_config("~/tierkv.toml", {}) == CacheConfig()


class TestToml:
    def test_the_default_file_sets_nothing(self):
        config = load_config(tomllib.loads(default_toml()), {})
        assert config == CacheConfig()
        assert config.explicit() == {}

    def test_uncommented_it_is_every_key_at_its_default(self):
        text = re.sub(r"^#(?! )", "", default_toml(), flags=re.MULTILINE)
        assert tomllib.loads(text) == nested(CONTRACT)
        config = load_config(tomllib.loads(text), {})
        assert config == CacheConfig()
        assert list(config.explicit()) == list(CONTRACT)

    def test_every_key_is_preceded_by_its_meaning_and_what_is_legal(self):
        lines = default_toml().splitlines()
        assert max(map(len, lines)) <= 110
        for index, line in enumerate(lines):
            if re.match(r"#\w+ = ", line):
                comment = " ".join(lines[max(i for i in range(index) if not lines[i]) + 1 : index])
                assert re.search(r"^# .*\w.* Legal: .+\.$", comment), line
        assert "Not in this version: " in default_toml()

    def test_every_field_has_a_description_a_section_a_docstring_and_legal_values(self):
        assert all(field.description for field in config_module._FIELDS.values())
        assert all(section.__doc__ for section in config_module._SECTIONS.values())
        assert all(config_module._legal(key) for key in CONTRACT)
        assert all(model.section == name for name, model in config_module._SECTIONS.items())

    @given(st.sets(st.sampled_from(list(OTHER))), st.text(st.characters(codec="utf-8"), max_size=20))
    def test_any_config_reads_back_with_the_same_keys_set(self, keys, salt):
        config = CacheConfig().replace({key: OTHER[key][1] for key in keys})
        if "prefix.salt" in keys:
            config = config.replace({"prefix.salt": salt})
        again = load_config(tomllib.loads(config.as_toml()), {})
        assert again == config
        assert again.explicit() == config.explicit()
        assert again.as_toml() == config.as_toml()


def budgets(source=None, *, cuda=False, device=0, ram=64 * GIB, disk=1000 * GIB):
    return resolve(
        load_config(nested(source or {}), {}),
        cuda=cuda,
        free_device_bytes=device,
        free_ram_bytes=ram,
        free_disk_bytes=disk,
    )


class TestResolve:
    def test_defaults_on_a_cpu_machine(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/me")
        assert budgets() == Budgets(
            device=2 * GIB,
            host=0,
            disk=100 * GIB,
            write_queue=GIB // 4,
            disk_path=Path("/home/me/.cache/tierkv"),
        )

    def test_defaults_on_a_gpu_machine(self):
        result = budgets(cuda=True, device=70 * GIB)
        assert (result.device, result.host, result.notes) == (2 * GIB, 16 * GIB, ())

    def test_the_host_default_takes_at_most_half_of_what_is_free(self):
        result = budgets(cuda=True, device=70 * GIB, ram=10 * GIB)
        assert result.host == 5 * GIB
        assert result.notes == (
            "host.capacity is 5GiB instead of the default 16GiB: at most 50% of the 10GiB of RAM that is left",
        )

    def test_defaults_adapt_with_notes_and_never_exceed_what_is_free(self):
        result = budgets(ram=GIB, disk=10 * GIB)
        assert (result.device, result.disk) == (GIB * 40 // 100, 4 * GIB)
        assert result.device + result.host + result.write_queue <= GIB
        assert [note.split()[0] for note in result.notes] == ["disk.capacity", "device.capacity", "disk.write_queue"]

    def test_a_small_gpu_adapts_to_its_own_memory(self):
        result = budgets(cuda=True, device=GIB)
        assert result.device == GIB * 40 // 100
        assert "device memory" in result.notes[0]

    def test_percentages_resolve_where_the_tier_lies(self):
        shares = {"device.capacity": "50%", "host.capacity": "25%", "disk.capacity": "10%", "disk.write_queue": "1%"}
        result = budgets(shares, cuda=True, device=80 * GIB, ram=64 * GIB, disk=1000 * GIB)
        assert (result.device, result.host, result.disk) == (40 * GIB, 16 * GIB, 100 * GIB)
        assert result.write_queue == 64 * GIB // 100
        assert budgets({"device.capacity": "50%"}, device=80 * GIB).device == 32 * GIB

    @pytest.mark.parametrize(
        ("source", "kwargs", "parts"),
        [
            (
                {"device.capacity": "8GiB"},
                {"ram": 4 * GIB},
                ['device.capacity = "8GiB"', "4GiB of RAM", "legal: up to 4GiB"],
            ),
            ({"device.capacity": "8GiB"}, {"cuda": True, "device": GIB}, ["8GiB", "1GiB of device memory is free"]),
            ({"host.capacity": "65GiB"}, {"cuda": True, "device": 9 * GIB}, ["host.capacity", "64GiB of RAM is free"]),
            (
                {"host.capacity": "60%", "device.capacity": "60%"},
                {},
                ['"60%" (38.39GiB) + host.capacity', "64GiB of RAM"],
            ),
            ({"host.capacity": "63.9GiB", "disk.write_queue": "1GiB"}, {}, ["host.capacity", "+ disk.write_queue"]),
            (
                {"disk.capacity": "2TiB"},
                {},
                ['disk.capacity = "2TiB"', "1000GiB of disk space at ~/.cache/tierkv is free"],
            ),
            ({"host.capacity": "100%"}, {}, ["device.capacity gets nothing", "other keys take 64GiB"]),
            ({"device.capacity": "0.000000001%"}, {}, ["device.capacity gets nothing"]),
            ({}, {"ram": 0}, ["device.capacity gets nothing: 0B of RAM is free"]),
            ({"disk.capacity": "40%"}, {"disk": None}, ['disk.capacity = "40%"', "is unknown", "legal: bytes"]),
            ({"disk.path": "~no_such_user_here/x"}, {}, ['disk.path = "~no_such_user_here/x"', "unknown home"]),
        ],
        ids=repr,
    )
    def test_what_was_set_and_does_not_fit_is_refused(self, source, kwargs, parts):
        with pytest.raises(ConfigError) as caught:
            budgets(source, **kwargs)
        assert "\n" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value)

    def test_the_same_value_as_a_default_adapts_but_not_when_it_was_set(self):
        assert budgets(ram=GIB).device < 2 * GIB
        with pytest.raises(ConfigError, match="does not fit"):
            budgets({"device.capacity": "2GiB"}, ram=GIB)

    def test_what_was_set_gets_all_it_asks_for(self):
        result = budgets({"device.capacity": "3.5GiB", "disk.capacity": "0"}, ram=4 * GIB)
        assert result.device == 7 * GIB // 2

    @pytest.mark.parametrize("source", [{"disk.capacity": 0}, {"disk.capacity": "0%"}])
    def test_a_disk_of_nothing_is_off(self, source):
        result = budgets(source)
        assert (result.disk, result.write_queue, result.disk_path) == (0, 0, None)

    def test_a_full_disk_turns_the_default_off_with_a_note(self):
        result = budgets(disk=0)
        assert (result.disk, result.write_queue, result.disk_path) == (0, 0, None)
        assert result.notes[0].startswith("disk.capacity is 0B instead of the default 100GiB")

    def test_an_unknown_disk_is_taken_at_its_word(self):
        assert budgets(disk=None).disk == 100 * GIB

    @pytest.mark.parametrize("cuda", [False, True])
    def test_a_host_of_nothing_is_off(self, cuda):
        assert budgets({"host.capacity": 0}, cuda=cuda, device=9 * GIB).host == 0

    def test_a_host_that_was_asked_for_exists_without_cuda(self):
        assert budgets({"host.capacity": "4GiB"}).host == 4 * GIB

    def test_relative_paths_start_at_the_working_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert budgets({"disk.path": "store"}).disk_path == tmp_path / "store"

    @given(
        st.sets(st.sampled_from(["device.capacity", "host.capacity", "disk.capacity", "disk.write_queue"])),
        st.decimals("0.1", 100, places=1),
        st.booleans(),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.integers(0, 2**42),
    )
    def test_the_tiers_always_fit_or_it_says_why_not(self, keys, percent, cuda, device, ram, disk):
        try:
            result = budgets(dict.fromkeys(keys, f"{percent}%"), cuda=cuda, device=device, ram=ram, disk=disk)
        except ConfigError:
            return
        assert result.device >= 1
        assert result.device <= (device if cuda else ram)
        assert result.host + result.write_queue + (0 if cuda else result.device) <= ram
        assert result.disk <= disk
        assert (result.disk_path is None) == (result.disk == 0)
