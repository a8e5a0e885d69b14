"""Charts: what they say in words and numbers, what is left out, and what the picture holds."""

import math
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from tests.pages import BARS, EVERY, HEAT, LINES, STACKED, TIMELINE, boxes, picture, texts_of
from tierkv.charts import bar_chart, heat_map, line_chart, stacked_bars, timeline
from tierkv.charts_draw import draw
from tierkv.charts_svg import drawing
from tierkv.charts_ticks import LARGEST

NAN, INF = float("nan"), float("inf")
NASTY = "<script>alert(1)</script> $x_$ & \"q\" 'a' ]]> --> 中文 \x00 \ud800"


def test_a_line_chart_in_words_and_numbers():
    assert LINES.alt == (
        "Line chart: Decoding. time per token against context for stream and compute. time per token from 10 ms to 40 ms."
    )
    assert LINES.columns == ("context", "stream", "compute", "stream, low", "stream, high")
    assert [[None if cell is None else str(cell) for cell in row] for row in LINES.rows] == [
        ["4k", "10 ms", "20 ms", "9 ms", "11 ms"],
        ["8k", "20 ms", "30 ms", None, None],
        ["16k", "40 ms", "35 ms", "30 ms", "50 ms"],
    ]
    assert LINES.notes == ()


def test_a_line_that_comes_back_keeps_all_its_points_in_the_table():
    chart = line_chart("t", "x", "y", {"a": [(1, 1), (2, 2), (1, 3)], "b": [(1, 9)]})
    assert chart.columns == ("line", "x", "y")
    assert [tuple(map(str, row)) for row in chart.rows] == [
        ("a", "1", "1"),
        ("a", "2", "2"),
        ("a", "1", "3"),
        ("b", "1", "9"),
    ]


def test_the_other_charts_in_words_and_numbers():
    assert BARS.alt == "Bar chart: Restore. seconds: host 500 ms, disk 1 s and recompute 4 s."
    assert "paged 48GiB and tiered 24GiB" in STACKED.alt
    assert STACKED.columns == ("", "weights", "KV", "free")
    assert [[None if cell is None else str(cell) for cell in row] for row in STACKED.rows] == [
        ["paged", "16GiB", "32GiB", None],
        ["tiered", "16GiB", None, "8GiB"],
    ]
    assert "From 10% to 90%" in HEAT.alt
    assert HEAT.columns == ("device \\ host", "1GiB", "16GiB")
    assert [str(cell) for cell in HEAT.rows[1]] == ["2GiB", "30%", "n/a"]
    assert HEAT.notes == ("Fields not drawn: 1 (not a number).",)
    assert "3 intervals in 2 rows: host to device and disk to host" in TIMELINE.alt


@pytest.mark.parametrize("name", EVERY)
def test_a_picture_is_svg_for_a_page(name):
    drawn = draw(EVERY[name], "fig7")
    assert drawn.svg == draw(EVERY[name], "fig7").svg
    root = ET.fromstring(drawn.svg)
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == EVERY[name].alt
    assert not re.search(r"https?://|<style|<metadata|<\?xml|DOCTYPE|DejaVu|<image|[0-9]{4}-[0-9]{2}-", drawn.svg)
    ids = [one.get("id") for one in root.iter() if one.get("id")]
    assert len(ids) == len(set(ids))
    assert all(one.startswith("fig7-") for one in ids)
    used = set(re.findall(r'(?:href="|url\()#([^)"]+)', drawn.svg))
    assert used == set(ids)
    assert set(re.findall(r"#[0-9a-f]{6}", re.sub(r"var\(--[a-z0-9-]+, #[0-9a-f]{6}\)", "", drawn.svg))) <= {
        "#111114", "#ffffff", "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369",
        "#e1cc55", "#fee838",
    }  # fmt: skip


def test_lines_differ_by_more_than_colour():
    drawn = draw(LINES, "f")
    assert [name for _, name in drawn.keys] == ["stream", "compute"]
    keys = [ET.fromstring(key) for key, _ in drawn.keys]
    assert all(key.get("aria-hidden") == "true" for key in keys)
    assert ["stroke-dasharray" in key for key, _ in drawn.keys] == [False, True]
    assert len({one.get("d") for key in keys for one in key.iter("path") if one.get("id")}) == 2
    all_ids = [one.get("id") for root in [*keys, ET.fromstring(drawn.svg)] for one in root.iter() if one.get("id")]
    assert len(all_ids) == len(set(all_ids))


def test_points_lie_where_their_numbers_are_and_say_them():
    uses = [one for one in picture(LINES).iter("use") if one.find("title") is not None]
    assert [one.find("title").text for one in uses][:3] == [
        "stream: 10 ms at 4k", "stream: 20 ms at 8k", "stream: 40 ms at 16k",
    ]  # fmt: skip
    xs, ys = [float(one.get("x")) for one in uses[:3]], [float(one.get("y")) for one in uses[:3]]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.01)  # logarithmic
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 2, abs=0.01)
    assert "device full" in texts_of(picture(LINES))
    assert {"4k", "8k", "16k", "10 ms", "20 ms", "context", "time per token"} <= set(texts_of(picture(LINES)))


def test_bars_are_as_long_as_their_numbers():
    found = boxes(picture(BARS))
    assert found["recompute: 4 s"][1] == pytest.approx(8 * found["host: 500 ms"][1], rel=1e-3)
    parts = boxes(picture(STACKED))
    assert parts["paged: KV: 32GiB"][1] == pytest.approx(2 * parts["paged: weights: 16GiB"][1], rel=1e-3)
    assert parts["paged: KV: 32GiB"][0] == pytest.approx(sum(parts["paged: weights: 16GiB"]), abs=0.01)
    assert [name for _, name in draw(STACKED, "f").keys] == ["weights", "KV", "free"]
    assert {"48GiB", "24GiB"} <= set(texts_of(picture(STACKED)))
    spans = boxes(picture(TIMELINE))
    assert spans["host to device, layer 2: 1 s to 3 s (2 s)"][1] == pytest.approx(
        2 * spans["host to device, layer 1: 0 s to 1 s (1 s)"][1], rel=1e-3
    )
    assert spans["disk to host, layer 1: 2 s to 2 s (0 s)"][1] >= 0.99


def test_negative_bars_go_the_other_way():
    found = boxes(picture(bar_chart("t", "gain", {"a": -1.0, "b": 2.0})))
    assert found["a: -1"][0] + found["a: -1"][1] == pytest.approx(found["b: 2"][0], abs=0.01)


def test_a_heat_map_says_its_values_and_ends():
    drawn = draw(HEAT, "f")
    assert drawn.ramp is not None
    assert drawn.ramp[1:] == ("10%", "90%", "hit ratio")
    assert {"16GiB, all: 90%", "16GiB, 2GiB: n/a"} <= set(boxes(ET.fromstring(drawn.svg)))
    assert {"10%", "90%", "n/a", "16GiB", "all"} <= set(texts_of(ET.fromstring(drawn.svg)))


def test_colours_of_a_heat_map_may_have_fixed_ends():
    def colours(values, **options):
        drawn = draw(heat_map("t", "x", "y", list(range(len(values))), ["a"], [values], **options), "f")
        assert drawn.ramp is not None
        fields = re.findall(r"<title>[^<]*</title><path [^>]*fill: (#[0-9a-f]{6})", drawn.svg)
        return drawn.ramp[1:3], fields

    ends, (low, high) = colours([0.0, 1.0])
    assert ends == ("0", "1")
    assert colours([1.0], ends=(0, 1)) == (("0", "1"), [high])
    assert colours([0.0], ends=(0, 1)) == (("0", "1"), [low])
    assert colours([2.0], ends=(0, 1))[0] == ("0", "2")
    assert colours([1.0])[1] not in ([low], [high])


@pytest.mark.parametrize(
    ("chart", "note"),
    [
        (line_chart("t", "x", "y", {"a": [(1, NAN), (2, 3), (3, INF), (None, 4)]}), "1 (not a number), 1 (infinite"),
        (
            line_chart("t", "x", "y", {"a": [(0, 1), (-1, 0), (5, 5)]}, x_log=True, y_log=True),
            "3 (at or below zero on a log",
        ),
        (line_chart("t", "x", "y", {"a": [(1, 10**400), (2, 1)]}), "1 (infinite or nearly so)"),
        (line_chart("t", "x", "y", {"a": [(1, 1)]}, marks=[(NAN, "m")]), "1 (not a number)"),
        (bar_chart("t", "y", {"a": NAN, "b": INF, "c": 2}), "1 (not a number), 1 (infinite"),
        (stacked_bars("t", "y", {"a": {"p": -1, "q": 2}}), "1 (below zero)"),
        (heat_map("t", "x", "y", [1, 2], [1], [[0, 1]], value_log=True), "1 (at or below zero"),
        (
            timeline("t", {"r": [(2, 1, "back"), (0, 1, "a"), (0, NAN, "b")]}),
            "1 (ending before they begin), 1 (not a number)",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_and_the_rest_drawn(chart, note):
    assert note in chart.notes[0]
    assert "not drawn" in chart.notes[0]
    text = ET.tostring(picture(chart), encoding="unicode")
    assert "nan" not in text.lower()


def test_what_is_not_there_leaves_a_gap_and_is_nothing_to_tell():
    chart = line_chart("t", "x", "y", {"a": [(1, 1), (2, None), (3, 2)], "b": [(None, 4), (1, 5)]})
    assert chart.notes == ()
    assert [tuple(map(str, row)) for row in chart.rows] == [
        ("1", "1", "5"), ("2", "None", "None"), ("3", "2", "None"), ("None", "None", "4"),
    ]  # fmt: skip
    assert len([one for one in picture(chart).iter("use") if one.find("title") is not None]) == 3
    bars = bar_chart("t", "y", {"a": None, "b": 1.5})
    assert bars.notes == ()
    assert bars.alt == "Bar chart: t. y: a n/a and b 1.5."
    assert "n/a" in texts_of(picture(bars))


def test_bands_of_different_lengths_share_one_table():
    bands = {"a": [(1, 0, 2), (2, 1, 3)], "c": [(2, 5, 6)]}
    chart = line_chart("t", "x", "y", {"a": [(1, 1), (2, 2)]}, bands=bands)
    assert chart.columns == ("x", "a", "a, low", "a, high", "c, low", "c, high")
    assert [tuple(map(str, row)) for row in chart.rows] == [
        ("1", "1", "0", "2", "None", "None"), ("2", "2", "1", "3", "5", "6"),
    ]  # fmt: skip
    assert [name for _, name in draw(chart, "f").keys] == ["a", "c"]


@pytest.mark.parametrize(
    "chart",
    [
        line_chart("t", "x", "y", {}),
        line_chart("t", "x", "y", {"a": []}),
        line_chart("t", "x", "y", {"a": [(NAN, NAN)]}, x_log=True),
        bar_chart("t", "y", {}),
        bar_chart("t", "y", {"a": None}),
        stacked_bars("t", "y", {"a": {}}),
        heat_map("t", "x", "y", [], [], []),
        heat_map("t", "x", "y", [1], [1], [[INF]]),
        timeline("t", {}),
        timeline("t", {"r": []}),
    ],
)
def test_nothing_to_draw_is_no_picture(chart):
    assert chart.drawing is None
    assert draw(chart, "f") is None
    assert chart.alt


@pytest.mark.parametrize(
    "points",
    [
        [(1, 1)],
        [(0, 0)],
        [(0, 0), (0, 0)],
        [(5, 7), (6, 7)],
        [(1e-200, 1e200), (1e200, 1e-200)],
        [(-1e240, 1e240), (1e240, -1e240)],
        [(5e-324, 5e-324), (1, 1)],
        [(1e9, 1e9 + 1e-6), (1e9 + 1e-6, 1e9)],
    ],
)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "tokens", "seconds", "percent", "number"])
def test_strange_ranges_are_drawn(points, log, kind):
    chart = line_chart("t", "x", "y", {"a": points}, x_log=log, y_log=log, x_format=kind, y_format=kind)
    if draw(chart, "f") is not None:
        assert picture(chart) is not None
    else:
        assert chart.notes


def test_the_largest_number_that_is_drawn():
    assert draw(bar_chart("t", "y", {"a": LARGEST, "b": 1}), "f") is not None
    assert draw(bar_chart("t", "y", {"a": math.nextafter(LARGEST, INF)}), "f") is None


@pytest.mark.parametrize(
    "chart",
    [
        line_chart(NASTY, NASTY, NASTY, {NASTY: [(1, 2), (2, 3)], "_hidden": [(1, 1)]}, marks=[(1, NASTY)]),
        bar_chart(NASTY, NASTY, {NASTY: 1, "_b": 2}),
        stacked_bars(NASTY, NASTY, {NASTY: {NASTY: 1, "_p": 2}}),
        heat_map(NASTY, NASTY, NASTY, [NASTY], [NASTY], [[1]], value_label=NASTY),
        timeline(NASTY, {NASTY: [(0, 1, "$x_$")]}),
    ],
)
def test_any_text_is_text(chart):
    drawn = draw(chart, "f")
    root = ET.fromstring(drawn.svg)
    assert not list(root.iter("script"))
    assert "$x_$" in root.attrib["aria-label"]
    assert any("$x_$" in (text or "") or "<script>" in (text or "") for text in texts_of(root))
    assert all("\x00" not in (text or "") for text in root.itertext())


def test_many_lines_bars_and_intervals():
    many = {f"series {number}": [(x, x * number) for x in range(1, 200)] for number in range(1, 12)}
    assert len(draw(line_chart("t", "x", "y", many), "f").keys) == 11
    assert len(boxes(picture(bar_chart("t", "y", {f"bar {n}": n for n in range(50)})))) == 50
    chart = timeline(
        "t", {"a": [(n, n + 1, f"job {n}") for n in range(2_500)], "b": [(n, n + 1, "x") for n in range(900)]}
    )
    assert len(boxes(picture(chart))) == 3_000
    assert chart.notes == (
        "Drawn are the first 3,000 of 3,400 intervals.",
        "The table shows the first 2,000 of 3,400 rows.",
    )


def test_wrong_calls_say_what_is_legal():
    with pytest.raises(
        ValueError, match=r"'watts' is no format of numbers \(legal: bytes, .*seconds, percent, number\)"
    ):
        bar_chart("t", "y", {"a": 1}, y_format="watts")
    with pytest.raises(
        ValueError, match="a heat map of 2 xs and 1 ys has 1 rows of 2 values; given: 1 rows of 1 values"
    ):
        heat_map("t", "x", "y", [1, 2], [1], [[0]])


@pytest.mark.parametrize(
    ("ends", "log", "what"),
    [
        ((1, 0), False, "smaller first"),
        ((0, NAN), False, "two numbers"),
        ((0, 0), False, "smaller"),
        ((0, 1), True, "above zero"),
    ],
)
def test_colours_need_ends_that_are_apart(ends, log, what):
    with pytest.raises(ValueError, match=what):
        heat_map("t", "x", "y", [1], [1], [[0.5]], ends=ends, value_log=log)


def test_settings_of_the_user_neither_matter_nor_change():
    before = draw(LINES, "f").svg
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert draw(LINES, "f").svg == before
        assert mpl.rcParams["font.size"] == 30
        with drawing():
            assert mpl.rcParams["svg.fonttype"] == "none"
        assert mpl.rcParams["svg.fonttype"] == "path"


def test_charts_load_no_library_and_drawing_no_window():
    code = (
        "import sys, tierkv.charts as c; chart = c.bar_chart('t', 'y', {'a': 1}); "
        "print(*({'matplotlib', 'numpy', 'jinja2', 'torch'} & set(sys.modules))); "
        "import tierkv.charts_draw as d; d.draw(chart, 'f'); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", "False"]
