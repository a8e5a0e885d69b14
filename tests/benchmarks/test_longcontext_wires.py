"""What wires carried, what the machine can do, and what nobody measured."""

import re

import pytest
import torch

from tests.benchmarks.longcontext_made import row
from tests.benchmarks.test_longcontext_report import RESULT
from tierkv.benchmarks import longcontext_rates
from tierkv.benchmarks.longcontext_rates import machine_rates
from tierkv.benchmarks.longcontext_report import make_page, write_csv
from tierkv.benchmarks.longcontext_summary import cells
from tierkv.benchmarks.longcontext_wires import sums, wires_of

UP = "host_to_device"
CPU = torch.device("cpu")


def stats(moved, seconds):
    return {"moved_bytes": {UP: moved}, "moved_seconds": {UP: seconds}}


@pytest.mark.parametrize(
    ("later", "earlier", "rates", "expected"),
    [
        (stats(1000, 3.0), stats(400, 1.0), {UP: 600.0}, (600, 2.0, 300, 600.0, 0.5)),
        (stats(1000, 3.0), {"moved_bytes": {}, "moved_seconds": {}}, {UP: 1000.0}, (1000, 3.0, 333, 1000.0, 0.3333)),
        (stats(400, 1.0), stats(400, 1.0), {UP: 600.0}, (0, 0.0, None, 600.0, None)),  # nothing moved
        (stats(1000, None), stats(400, None), {UP: 600.0}, (600, None, None, 600.0, None)),  # no clock
        (stats(1000, 3.0), stats(400, 1.0), {UP: None}, (600, 2.0, 300, None, None)),  # no measure of the machine
        (stats(1000, 3.0), stats(400, 1.0), None, (600, 2.0, 300, None, None)),
    ],
)
def test_a_wire_between_two_looks(later, earlier, rates, expected):
    assert tuple(wires_of(later, earlier, rates)[UP].values()) == expected


def test_several_conversations_are_weighed_with_their_seconds():
    first = wires_of(stats(100, 1.0), stats(0, 0.0), {UP: 200.0})
    second = wires_of(stats(300, 3.0), stats(0, 0.0), {UP: 400.0})  # of a run that was resumed
    together = sums([first, second])[UP]
    assert (together["bytes"], together["seconds"], together["bytes_per_second"]) == (400, 4.0, 100.0)
    assert together["machine_bytes_per_second"] == pytest.approx(350.0)
    assert together["share"] == pytest.approx(100 / 350)
    unknown = wires_of(stats(300, None), stats(0, None), {UP: 400.0})
    together = sums([first, unknown])[UP]
    assert (together["bytes"], together["seconds"], together["share"]) == (400, None, None)
    assert sums([first, wires_of(stats(300, 3.0), stats(0, 0.0), None)])[UP]["share"] is None
    assert sums([]) == {}


def test_the_machine_is_measured(tmp_path, monkeypatch):
    for name in ("COPY_BYTES", "FILE_BYTES"):
        monkeypatch.setattr(longcontext_rates, name, 1 << 24)
    found = machine_rates(CPU, tmp_path)
    assert set(found) == {"device_to_host", UP, "host_to_disk", "device_to_disk", "disk_to_host", "disk_to_device"}
    assert all(rate is not None and 2**20 < rate < 2**44 for rate in found.values())
    assert list(tmp_path.iterdir()) == []


def test_without_room_on_the_disk_its_rates_are_not_known(tmp_path):
    found = machine_rates(CPU, tmp_path / "missing")
    assert found["disk_to_device"] is found["device_to_disk"] is None
    assert found[UP]


def test_wires_are_in_the_page_and_in_the_table(tmp_path):
    wires = wires_of(stats(3 << 30, 2.0), stats(0, 0.0), {UP: float(3 << 30)})
    rows = [row(), row("tierkv", wires=wires, agreement=1.0)]
    assert cells(rows)[0]["wires"] == {}
    html = make_page(RESULT, rows).html()
    line = html.partition(">host to device<")[2].partition("</tr>")[0]
    assert re.findall(r"<data[^>]*>([^<]*)</data>", line) == ["3GiB", "2 s", "1.5GiB", "3GiB", "50%"]
    assert "machine, a second" not in make_page(RESULT, rows[:1]).html()
    write_csv(tmp_path / "results.csv", rows)
    heads, *lines = (tmp_path / "results.csv").read_text().splitlines()
    for name in ("bytes", "seconds", "bytes_per_second", "machine_bytes_per_second", "share"):
        assert f"wires.{UP}.{name}" in heads.split(",")
    assert "0.5" in lines[1].split(",")
