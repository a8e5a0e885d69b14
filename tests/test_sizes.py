"""Sizes round-trip, resolve exactly, name the legal spellings; cgroup limits are found."""

from decimal import Decimal
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.sizes import LEGAL_SIZES, Size, format_bytes, free_memory, parse_size, show

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("1.5 GiB", 3 * GIB // 2),
        ("2GB", 2_000_000_000),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("3KiB", 3072),
        ("3kB", 3000),
        ("3KB", 3000),
        ("7B", 7),
        ("7", 7),
        ("0", 0),
        (0, 0),
        (1234, 1234),
        (2**63 - 1, 2**63 - 1),
        ("0.0001KiB", 0),
        ("1.1GiB", 1_181_116_006),
    ],
    ids=repr,
)
def test_sizes_in_bytes(text, size_bytes):
    assert parse_size(text) == Size(size_bytes)
    assert parse_size(text).resolve(1) == size_bytes


@pytest.mark.parametrize(
    ("text", "free_bytes", "size_bytes"),
    [("40%", 1000, 400), ("100%", 2**62 + 1, 2**62 + 1), ("0%", 1000, 0), ("33.3%", 10, 3), ("12.5 %", 1000, 125)],
)
def test_percentages_resolve_against_what_is_free_and_round_down(text, free_bytes, size_bytes):
    assert parse_size(text).resolve(free_bytes) == size_bytes


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "lots", "GiB", "-1GiB", "+1GiB", "1e9", "1,5GiB", "1.GiB", ".5GiB", "1GiB ", " 1GiB", "1GiB\n",
        "1  GiB", "%", "1.5", "1.5B", "101%", "100.1%", "-1%", "1XiB", "٣GiB", "9" * 25, "9999999999999TiB",
        -1, 2**63, True, False, 1.5, None, [], {"a": 1}, b"1GiB",
    ],
    ids=repr,
)  # fmt: skip
def test_everything_else_is_refused_on_one_line_with_the_legal_spellings(value):
    with pytest.raises(ConfigError) as caught:
        parse_size(value)
    assert LEGAL_SIZES in str(caught.value)
    assert str(caught.value).startswith(show(value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [2**63, 12345678901234567890123456, "9" * 26, "9" * 26 + "GiB", "8388608TiB"], ids=repr
)
def test_what_is_too_large_says_how_much_is_not(value):
    with pytest.raises(ConfigError, match="is too large; the largest size is 9223372036854775807 bytes"):
        parse_size(value)


@pytest.mark.parametrize(
    ("typo", "meant"), [("2gb", "2GB"), ("2gib", "2GiB"), ("2G", "2GiB"), ("1.5m", "1.5MiB"), ("3Kb", "3kB")]
)
def test_a_near_miss_of_a_unit_says_what_was_meant(typo, meant):
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
        parse_size(typo)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (3 * GIB // 2, "1.5GiB"), (2 * 10**9, "2GB"), (2**33, "8GiB")],
)  # fmt: skip
def test_sizes_print_in_their_shortest_exact_spelling(size_bytes, text):
    assert str(Size(size_bytes)) == text


@given(st.integers(0, 2**63 - 1))
def test_every_number_of_bytes_survives_printing_and_parsing(size_bytes):
    assert (
        parse_size(str(Size(size_bytes))) == Size(size_bytes) == parse_size(size_bytes) == parse_size(str(size_bytes))
    )


@given(st.decimals(0, 100, places=4))
def test_every_percentage_survives_printing_and_parsing(percent):
    assert parse_size(str(Size(percent=percent))) == Size(percent=percent)


@given(st.integers(0, 2**53), st.sampled_from(["KiB", "MiB", "GiB", "kB", "MB", "GB"]), st.integers(0, 99))
def test_fractions_of_units_are_exact_and_rounded_down(whole, unit, hundredths):
    unit_bytes = {"K": 1, "k": 1, "M": 2, "G": 3}[unit[0]]
    unit_bytes = (1024 if "i" in unit else 1000) ** unit_bytes
    expected = (whole * 100 + hundredths) * unit_bytes // 100
    if expected < 2**63:
        assert parse_size(f"{whole}.{hundredths:02}{unit}").size_bytes == expected


@given(st.integers(0, 2**62), st.decimals(0, 100, places=2))
def test_a_percentage_never_exceeds_what_is_free(free_bytes, percent):
    assert 0 <= Size(percent=percent).resolve(free_bytes) <= free_bytes


@given(st.one_of(st.text(max_size=12), st.from_regex(r"\A[0-9.]{1,6} ?[kKMGT%iB]{0,3}\Z")))
def test_text_is_a_size_or_a_config_error_and_nothing_else(text):
    try:
        size = parse_size(text)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert parse_size(str(size)) == size


def test_a_size_is_a_value():
    assert parse_size("1GiB") == parse_size("1024MiB") == parse_size(parse_size(GIB))
    assert parse_size("40%") == parse_size("40.0%") != parse_size("41%")
    assert len({parse_size("40%"), parse_size("40.0%"), parse_size("1GiB"), parse_size(GIB)}) == 2
    assert parse_size("0%").is_zero
    assert parse_size("0").is_zero
    assert not parse_size("1%").is_zero
    with pytest.raises(AttributeError):
        parse_size("1GiB").size_bytes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("size_bytes", "percent"), [(-1, None), (2**63, None), (0, Decimal(101)), (0, Decimal(-1)), (1, Decimal(1))]
)
def test_an_impossible_size_cannot_be_made(size_bytes, percent):
    with pytest.raises(ConfigError, match="is not a size"):
        Size(size_bytes, percent)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (4 * GIB - 1, "3.99GiB"), (100 * GIB, "100GiB"), (2**41, "2TiB")],
)
def test_format_bytes_rounds_down(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('a\n"b\x7f\ud800', '"a\\n\\"b\\u007f\\ud800"'),
        ("é", '"é"'),
        (True, "true"),
        (3, "3"),
        (Path("/x"), '"/x"'),
        (Size(GIB), '"1GiB"'),
        ([1, 2], "[1, 2]"),
    ],
)
def test_values_are_shown_as_toml_on_one_line(value, text):
    assert show(value) == text


def test_long_values_are_cut():
    assert len(show("x" * 1000)) == 60
    assert len(show("x" * 1000, longest=None)) == 1002


def tree(root: Path, files: dict[str, object]) -> Path:
    """Write a fake ``proc`` and ``sys``."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


UNLIMITED_V1 = 9223372036854771712


class TestFreeMemory:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        """Let the machine have 1 GiB available."""
        memory = psutil.virtual_memory()._replace(available=GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def test_without_cgroups_the_machine_decides(self, tmp_path):
        assert free_memory(tmp_path) == GIB

    def test_on_this_machine_it_is_a_positive_number(self):
        assert 0 < free_memory() <= GIB

    def test_v2_limit_less_usage(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user.slice/me",
                "sys/fs/cgroup/user.slice/me/memory.max": 1000,
                "sys/fs/cgroup/user.slice/me/memory.current": 400,
            },
        )
        assert free_memory(root) == 600

    def test_v2_the_tightest_ancestor_decides(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/a/b/c",
                "sys/fs/cgroup/a/memory.max": 900,
                "sys/fs/cgroup/a/memory.current": 850,
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.current": 800,
                "sys/fs/cgroup/a/b/c/memory.max": 1000,
                "sys/fs/cgroup/a/b/c/memory.current": 10,
            },
        )
        assert free_memory(root) == 50

    def test_v2_a_soft_limit_counts(self, tmp_path):
        files = {"memory.max": "max", "memory.high": 500, "memory.current": 100}
        root = tree(tmp_path, {"proc/self/cgroup": "0::/", **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}})
        assert free_memory(root) == 400

    def test_v2_droppable_page_cache_is_free(self, tmp_path):
        files = {
            "memory.max": 1000,
            "memory.current": 900,
            "memory.stat": "anon 200\ninactive_file 600\nactive_file 100",
        }
        root = tree(tmp_path, {"proc/self/cgroup": "0::/", **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}})
        assert free_memory(root) == 700

    def test_v2_in_a_container_whose_path_is_the_hosts(self, tmp_path):
        files = {"memory.max": 1000, "memory.current": 300}
        root = tree(
            tmp_path, {"proc/self/cgroup": "0::/docker/0a1b", **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}
        )
        assert free_memory(root) == 700

    @pytest.mark.parametrize("path", ["/../../a", "/./a", "//a/"])
    def test_odd_paths_stay_below_the_mount(self, tmp_path, path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": f"0::{path}",
                "sys/fs/cgroup/a/memory.max": 1000,
                "sys/fs/cgroup/a/memory.current": 300,
                "sys/a/memory.max": 1,
                "sys/a/memory.current": 1,
            },
        )
        assert free_memory(root) == 700

    def test_v1_with_v2_mounted_beside_it(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job/7\n1:name=systemd:/x\n0::/x",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 5000,
                "sys/fs/cgroup/memory/job/7/memory.limit_in_bytes": 2000,
                "sys/fs/cgroup/memory/job/7/memory.usage_in_bytes": 1500,
                "sys/fs/cgroup/memory/job/7/memory.stat": "inactive_file 1\ntotal_inactive_file 250",
                "sys/fs/cgroup/unified/x/cgroup.procs": 1,
            },
        )
        assert free_memory(root) == 750

    def test_v1_without_a_limit(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 5000,
            },
        )
        assert free_memory(root) == GIB

    def test_usage_above_the_limit_is_nothing_free(self, tmp_path):
        files = {"memory.max": 1000, "memory.current": 1300}
        root = tree(tmp_path, {"proc/self/cgroup": "0::/", **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}})
        assert free_memory(root) == 0

    @pytest.mark.parametrize("text", ["", "garbage", "0:", "0::", "memory", "4:memory:/a\x00b"])
    def test_files_that_make_no_sense_are_no_limit(self, tmp_path, text):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": text,
                "sys/fs/cgroup/memory.max": "lots",
                "sys/fs/cgroup/memory.current": "",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": -1,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "x",
            },
        )
        assert free_memory(root) == GIB
