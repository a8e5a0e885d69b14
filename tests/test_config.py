"""One object from a file, a mapping or the environment, and back to a file that explains every key."""

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

from tierkv.config import FIELDS, SECTIONS, WORDING, CacheConfig, DeviceConfig, DiskConfig, load_config
from tierkv.config_sources import OTHER_ENVIRONMENT
from tierkv.config_toml import as_toml, default_toml
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
    "transfer.layers_ahead": "auto",
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
    "prefix.persist": ("true", True),
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
        assert list(FIELDS) == list(CONTRACT)
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
        others = dict.fromkeys(OTHER_ENVIRONMENT, "") | {"TIERKVX": "1", "tierkvx": "x", "PATH": "/bin"}
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
            ("prefix.share", "true", True),
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

    @pytest.mark.parametrize(
        ("key", "text", "shown"),
        [
            ("device.capacity", "1e9", "1e9 is not a size: a whole number of bytes has no point and no exponent"),
            ("device.capacity", "1.50", "1.50 is not a size: a whole number of bytes has no point and no exponent"),
            ("block_size", "3.2e1", "3.2e1 is not possible"),
        ],
    )
    def test_a_number_is_shown_as_it_was_written(self, key, text, shown, tmp_path):
        section, _, name = key.rpartition(".")
        path = toml(tmp_path, f"[{section}]\n{name} = {text}\n" if section else f"{name} = {text}\n")
        for message in (refusal(None, {variable(key): text}), refusal(path)):
            assert f": {key} = {shown} " in message
        assert '"2026-01-01" is not a size' in refusal(None, {"TIERKV_DEVICE__CAPACITY": "2026-01-01"})


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
        assert refusal("") == "the configuration file has no name; give the path of a tierkv.toml"
        assert refusal("/dev/zero") == "/dev/zero: more than 1 MiB, which is no configuration"

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

    def test_every_field_has_a_description_a_section_a_docstring_and_legal_values(self):
        assert all(field.description for field in FIELDS.values())
        assert all(section.__doc__ for section in SECTIONS.values())
        assert all(WORDING.legal(key) for key in CONTRACT)
        assert all(model.section == name for name, model in SECTIONS.items())

    @given(st.sets(st.sampled_from(list(OTHER))), st.text(st.characters(codec="utf-8"), max_size=20))
    def test_any_config_reads_back_with_the_same_keys_set(self, keys, salt):
        config = CacheConfig().replace({key: OTHER[key][1] for key in keys})
        if "prefix.salt" in keys:
            config = config.replace({"prefix.salt": salt})
        again = load_config(tomllib.loads(as_toml(config)), {})
        assert again == config
        assert again.explicit() == config.explicit()
        assert as_toml(again) == as_toml(config)
