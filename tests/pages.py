"""One chart of every kind, what is in their pictures, and a page with one of everything."""

import re
from xml.etree import ElementTree as ET

from tierkv.charts import Number, bar_chart, heat_map, line_chart, stacked_bars, timeline
from tierkv.charts_draw import draw
from tierkv.page import Page

NAN = float("nan")


def texts_of(root):
    return [one.text for one in root.iter("text")]


def picture(chart, prefix="fig1"):
    drawn = draw(chart, prefix)
    assert drawn is not None
    return ET.fromstring(drawn.svg)


LINES = line_chart(
    "Decoding", "context", "time per token",
    {"stream": [(4096, 0.01), (8192, 0.02), (16384, 0.04)], "compute": [(4096, 0.02), (8192, 0.03), (16384, 0.035)]},
    x_log=True, x_format="tokens", y_format="seconds", marks=[(8192, "device full")],
    bands={"stream": [(4096, 0.009, 0.011), (16384, 0.03, 0.05)]},
)  # fmt: skip
BARS = bar_chart("Restore", "seconds", {"host": 0.5, "disk": 1.0, "recompute": 4.0}, y_format="seconds")
STACKED = stacked_bars(
    "Tiers", "bytes", {"paged": {"weights": 2**34, "KV": 2**35}, "tiered": {"weights": 2**34, "free": 2**33}},
    y_format="bytes",
)  # fmt: skip
HEAT = heat_map(
    "Hits", "host", "device", [2**30, 2**34], [2**30, 2**31, "all"], [[0.1, 0.2], [0.3, NAN], [0.8, 0.9]],
    x_format="bytes", y_format="bytes", value_format="percent", value_label="hit ratio",
)  # fmt: skip
TIMELINE = timeline(
    "Copies", {"host to device": [(0, 1, "layer 1"), (1, 3, "layer 2")], "disk to host": [(2, 2, "layer 1")]}
)
EVERY = {"line": LINES, "bar": BARS, "stacked": STACKED, "heat": HEAT, "timeline": TIMELINE}


def boxes(root):
    """Map what each box says to its (left, width)."""
    found = {}
    for group in root.iter("g"):
        title, path = group.find("title"), group.find("path")
        if title is not None and path is not None:
            xs = [float(one) for one in re.findall(r"[ML] (-?[\d.]+) ", path.get("d"))]
            found[title.text] = (min(xs), max(xs) - min(xs))
    return found


def charts():
    contexts = [4096, 16384, 65536]
    return [
        line_chart(
            "Time per token", "context", "time per token",
            {"stream": [(x, x * 2e-7) for x in contexts], "compute": [(x, 0.002 + x * 1e-7) for x in contexts]},
            x_log=True, x_format="tokens", y_format="seconds", marks=[(32768, "device full")],
        ),
        bar_chart("Restore", "time", {"host": 0.2, "disk": 0.9}, y_format="seconds"),
        stacked_bars("Tiers", "bytes", {"device": {"weights": 2**34, "KV": 2**33}}, y_format="bytes"),
        heat_map("Hits", "host", "device", [1, 2], [1, 2], [[0, 0.5], [0.5, 1]], value_format="percent"),
        timeline("Copies", {"up": [(0, 1, "a"), (1, 2, "b")], "down": [(0.5, 0.7, "a")]}),
    ]  # fmt: skip


def filled():
    page = Page("tierkv plan: Llama-3.1-8B on H100", lead="40 sessions of 32k fit.", footer="tierkv 0.1.0, 2026-11-30")
    page.facts({"model": "Llama-3.1-8B", "devices": 2, "tuned": True, "disk": None})
    for number, chart in enumerate(charts()):
        page.section(f"Section {number}", text="One paragraph.\n\nAnother.")
        page.plot(chart, caption="What it shows.")
    page.table(
        ["tier", "bytes", "blocks"], [["device", "12GiB", 3000], ["disk", Number(2**40, "bytes"), None]], caption="Fits"
    )
    page.note("reproduce", "tierkv plan --model llama-3.1-8b \\\n  --profile h100")
    return page
