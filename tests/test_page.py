"""The page of a report: well-formed, self-contained, the same each time, and whatever it is given appears as text."""

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from tests.pages import filled
from tierkv.charts import Number, heat_map, line_chart, timeline
from tierkv.errors import ConfigError
from tierkv.page import Page

NASTY = "<script>alert(1)</script><b> $x_$ & \"q\" 'a' {{ 7*7 }} https://example.org/x \x00"
DASH = "\N{EN DASH}"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Tree(HTMLParser):
    """Checks that every element is closed in order, and keeps what there is."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID or "svg" in self.open
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    def every(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def pictures(text):
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_a_page_is_well_formed_and_complete():
    text = filled().html()
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    tree = Tree(text)
    words = " ".join(tree.texts)
    for part in (
        "40 sessions of 32k fit.",
        "Llama-3.1-8B",
        "tierkv 0.1.0, 2026-11-30",
        "One paragraph.",
        "Another.",
        "Fits",
    ):
        assert part in words
    assert len([one for one in pictures(text) if one.get("role") == "img"]) == 5
    assert len(tree.every("details")) == 5
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes["href"][1:] for attributes in tree.every("a")}
    assert len(named) == 5
    assert named <= set(ids)
    assert {attributes["data-copies"] for attributes in tree.every("button")} <= set(ids)
    assert [one["content"] for one in tree.every("meta") if one.get("name") == "viewport"] == [
        "width=device-width, initial-scale=1"
    ]


def test_the_same_content_is_the_same_page():
    assert filled().html() == filled().html()
    page = filled()
    assert page.html() == page.html()


def test_a_page_names_nothing_outside_itself():
    text = filled().html()
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", text)
    tree = Tree(text)
    assert not [one for one in ("img", "iframe", "object", "embed", "base", "form") if tree.every(one)]
    for _, attributes in tree.elements:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:,"))
    (policy,) = [one["content"] for one in tree.every("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")


def test_the_policy_admits_the_script_as_it_is():
    import base64
    import hashlib

    text = filled().html()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in text


def test_contents_only_where_there_is_much():
    page = Page("t")
    for number in range(3):
        page.section(f"S{number}")
    assert not Tree(page.html()).every("nav")
    page.section("S0")
    tree = Tree(page.html())
    assert len(tree.every("nav")) == 1
    assert len({one["href"] for one in tree.every("a")}) == 4


def test_whatever_is_given_appears_as_text():
    page = Page(NASTY, lead=NASTY, footer=NASTY)
    page.facts({NASTY: NASTY})
    for _ in range(4):
        page.section(NASTY, text=NASTY)
    page.table([NASTY, NASTY], [[NASTY, 1], [NASTY, None]], caption=NASTY)
    page.plot(
        line_chart(NASTY, NASTY, NASTY, {NASTY: [(1, 1), (2, 2)], "b": [(1, 3)]}, marks=[(1, NASTY)]), caption=NASTY
    )
    page.plot(heat_map(NASTY, NASTY, NASTY, [NASTY], [NASTY], [[1]], value_label=NASTY), caption=NASTY)
    page.plot(timeline(NASTY, {NASTY: [(0, 1, NASTY), (1, 2, "b"), (2, 1, "c")]}))
    page.note(NASTY, NASTY)
    text = page.html()
    tree = Tree(text)
    assert len(tree.every("script")) == 1
    assert not tree.every("b") or all(not one for one in tree.every("b"))
    assert "alert(1)</script>" not in text
    assert "\x00" not in text
    shown = "".join(tree.texts)
    assert shown.count("{{ 7*7 }}") > 15
    assert shown.count("$x_$ & \"q\" 'a'") > 15
    assert shown.count("<script>alert(1)</script>") > 15
    for one in pictures(text):
        assert not list(one.iter("script"))


def cells(page, tag):
    return re.findall(rf'<{tag}[^>]*class="(\w+)">(?:<data value="[^"]*">)?(.*?)(?:</data>)?</{tag}>', page.html())


def test_numbers_stand_on_the_right():
    page = Page("t")
    page.table(
        ["tier", "bytes", "blocks", "share", "time", "on", "what", "nothing"],
        [
            ["device", "12.0 GiB", 3000, "87.5%", Number(0.0123, "seconds"), True, "3 wires", None],
            ["host", "-1MiB", 0.12345, None, Number(float("nan"), "seconds"), False, "", None],
        ],
    )
    sides = [side for side, _ in cells(page, "th")][:8]
    assert sides == ["left", "right", "right", "right", "right", "left", "right", "left"]
    assert [text for _, text in cells(page, "td")] == [
        "12.0 GiB", "3,000", "87.5%", "12.3 ms", "yes", "3 wires", DASH,
        "-1MiB", "0.1235", DASH, "n/a", "no", "", DASH,
    ]  # fmt: skip
    assert '<data value="0.0123">' in page.html()


def test_columns_stand_where_they_are_told():
    page = Page("t")
    page.table(["a", "b", "c"], [[1, 2, 3]], align="lcr")
    assert [side for side, _ in cells(page, "th")] == ["left", "center", "right", "left"]
    assert [side for side, _ in cells(page, "td")] == ["center", "right"]


@pytest.mark.parametrize(
    ("columns", "rows", "align", "message"),
    [
        (["a", "b"], [[1, 2], [1]], None, "row 2 of a table has 1 cells; give 2, one a column"),
        (["a", "b"], [], "l", r"'l' does not align 2 columns \(legal: a letter a column, of l, r and c\)"),
        (["a", "b"], [], "lx", "'lx' does not align 2 columns"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(columns, rows, align, message):
    with pytest.raises(ValueError, match=message):
        Page("t").table(columns, rows, align=align)


def test_an_empty_table_and_chart_say_so():
    page = Page("t")
    page.table(["a"], [])
    page.plot(line_chart("Nothing", "x", "y", {"a": [(0, 0)]}, y_log=True))
    text = page.html()
    Tree(text)
    assert ">nothing</td>" in text
    assert "There is nothing to draw." in text
    assert "Values not drawn: 1 (at or below zero on a logarithmic axis)." in text


def test_a_large_table_is_complete():
    page = Page("t")
    page.table(["n", "square"], ([number, number**2] for number in range(20_000)))
    text = page.html()
    assert text.count("<tr>") == 20_001
    assert "399,960,001" in text


def test_a_command_line_stays_as_it_is():
    text = "tierkv plan --model 'a  b' \\\n\t--out \"x&y\" # <tag>"
    page = Page("t")
    page.note("reproduce", text)
    (shown,) = re.findall(r"<code[^>]*>(.*?)</code>", page.html(), re.DOTALL)
    assert html.unescape(shown) == text


def test_a_page_is_written_whole_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "out.html"
    path.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(path)
    Page.check_writable(link)
    assert path.read_text() == "old"
    page = filled()
    page.write(link)
    assert path.read_bytes().decode() == page.html()
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.html", "out.html"]


def unwritable(tmp_path):
    round_link = tmp_path / "round"
    round_link.symlink_to(round_link)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    return {
        "": "empty file name",
        str(tmp_path): "it is a folder",
        str(tmp_path / "none" / "x.html"): "its folder does not exist",
        str(tmp_path / "file" / "x.html"): "Not a directory",
        str(tmp_path / "pipe"): "it is no regular file",
        str(round_link): "",
        "/proc/x.html": "",
        str(tmp_path / ("x" * 300)): "File name too long",
        "a\0b": "character that no file name can have",
    }


@pytest.mark.parametrize("write", [Page.check_writable, lambda path: Page("t").write(path)], ids=["check", "write"])
def test_a_path_that_cannot_be_written_is_one_line(tmp_path, write):
    for path, why in unwritable(tmp_path).items():
        with pytest.raises(ConfigError) as caught:
            write(path)
        message = str(caught.value)
        assert why in message
        assert "give the name of a file in a folder where you may write" in message
        assert "\n" not in message
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_its_libraries_a_page_says_what_to_install(missing):
    code = (
        "import sys\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {missing!r} else found(name)\n"
        "from tierkv.page import Page\n"
        "print(*({'jinja2', 'matplotlib', 'numpy', 'torch'} & set(sys.modules)))\n"
        "for use in (lambda: Page('t'), lambda: Page.check_writable('x.html')):\n"
        "    try: use()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = f'ConfigError a report page needs {missing}; install the extra with pip install "tierkv-cache[report]"'
    assert done.stdout.splitlines() == ["", line, line]


# -- plots as files ---------------------------------------------------------------------------------------------------


def test_every_plot_becomes_a_picture_of_its_own(tmp_path):
    page = Page("A page")
    page.section("First")
    lines = {"a <b> & c": [(1.0, 1.0), (2.0, 3.0)], "another": [(1.0, 2.0), (2.0, 1.0)]}
    page.plot(line_chart('Memory: "all" & <more>', "context", "bytes", lines, y_format="bytes"))
    page.section("Second")
    page.plot(
        heat_map("Scores", "x", "y", ["1", "2"], ["0"], [[0.0, 1.0]], value_label="score", value_format="percent")
    )
    page.plot(line_chart("Nothing", "x", "y", {}))
    folder = tmp_path / "plots"
    files = page.write_plots(folder)
    assert [path.name for path in files] == ["01-memory-all-more.svg", "02-scores.svg"]
    first, second = (ET.fromstring(path.read_text()) for path in files)
    words = ["".join(one.itertext()) for one in first.iter("{http://www.w3.org/2000/svg}text")]
    assert {'Memory: "all" & <more>', "a <b> & c", "another", "context"} <= set(words)
    assert {"Scores", "score: 0%", "100%"} <= {
        "".join(one.itertext()) for one in second.iter() if one.tag.endswith("text")
    }
    for path in files:
        text = path.read_text()
        for name in set(re.findall(r"var\((--[a-z0-9-]+)", text)):
            assert text.count(f"{name}: #") == 2, "a value for the light and one for the dark"
    other = Page("A shorter page")
    other.plot(line_chart("Only", "x", "y", lines))
    other.write_plots(folder)
    assert [path.name for path in sorted(folder.iterdir())] == ["01-only.svg"]


def test_a_folder_that_cannot_be_made_for_plots_is_one_line(tmp_path):
    page = Page("A page")
    page.plot(line_chart("Only", "x", "y", {"a": [(1.0, 1.0)]}))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        page.write_plots(tmp_path / "file")
