"""What was set gets exactly what it says or is refused; defaults adapt to what is free, and say so."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.budgets import Budgets, Claim, fit, resolve
from tierkv.config import CacheConfig
from tierkv.errors import ConfigError
from tierkv.sizes import Size, parse_size

GIB = 2**30


class TestFit:
    def test_explicit_claims_get_what_they_ask_for(self):
        claims = [Claim("a", parse_size("60%"), True), Claim("b", parse_size("400"), True)]
        assert fit(claims, 1000, "RAM") == ({"a": 600, "b": 400}, [])

    def test_too_much_names_the_keys_the_values_what_is_free_and_what_is_legal(self):
        claims = [
            Claim("a", parse_size("60%"), True),
            Claim("off", Size(0), True),
            Claim("b", parse_size("1KiB"), True),
        ]
        with pytest.raises(ConfigError) as caught:
            fit(claims, 1024, "RAM")
        assert str(caught.value).startswith(
            'a = "60%" (614B) + b = "1KiB" does not fit: 1KiB of RAM is free (legal: up to 1KiB'
        )

    def test_defaults_share_what_the_explicit_claims_leave(self):
        claims = [
            Claim("a", parse_size("1000"), False),
            Claim("b", parse_size("500"), True),
            Claim("c", parse_size("10"), False),
        ]
        granted, notes = fit(claims, 1000, "RAM")
        assert granted == {"a": 200, "b": 500, "c": 10}
        assert notes == ["a is 200B instead of the default 1kB: at most 40% of the 500B of RAM that is left"]

    def test_nothing_free_or_less_is_nothing_granted(self):
        assert fit([Claim("a", parse_size("1000"), False)], -5, "RAM")[0] == {"a": 0}

    @given(
        st.lists(st.tuples(st.integers(0, 2000) | st.decimals(0, 100, places=1), st.booleans()), max_size=5),
        st.integers(0, 3000),
    )
    def test_grants_never_exceed_what_is_free(self, asked, free_bytes):
        claims = [
            Claim(f"k{i}", Size(size) if isinstance(size, int) else Size(percent=size), explicit)
            for i, (size, explicit) in enumerate(asked)
        ]
        try:
            granted, _ = fit(claims, free_bytes, "RAM")
        except ConfigError:
            assert sum(c.size.resolve(free_bytes) for c in claims if c.is_explicit) > free_bytes
            return
        assert sum(granted.values()) <= free_bytes
        for claim in claims:
            wanted = claim.size.resolve(free_bytes)
            assert granted[claim.key] == wanted if claim.is_explicit else granted[claim.key] <= wanted


def budgets(source=None, *, cuda=False, device=0, ram=64 * GIB, disk=1000 * GIB):
    return resolve(
        CacheConfig().replace(source or {}),
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

    def test_a_path_that_was_set_is_not_done_without(self):
        assert budgets(disk=0).disk_path is None
        assert budgets({"disk.path": "/full", "disk.capacity": 0}, disk=0).disk_path is None
        with pytest.raises(ConfigError, match=r'^disk\.path = "/full" has no free space; give another folder'):
            budgets({"disk.path": "/full"}, disk=0)

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
