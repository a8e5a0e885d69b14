"""Pages of reports in a browser: light, dark, on a phone and on paper. Skipped where there is no browser."""

import shutil
from contextlib import contextmanager

import pytest

from tests.benchmarks.longcontext_made import CACHES, a_report
from tests.pages import filled

PAPER_WIDTH = 673
"""Pixels between the margins of A4."""
LIGHT, DARK, WHITE = "rgb(253, 253, 254)", "rgb(20, 24, 28)", "rgba(0, 0, 0, 0)"
OUTSIDE = """all => all.flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {
        const own = text.getBoundingClientRect();
        return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1
            || own.bottom > box.bottom + 1;
    }).map(text => text.textContent);
})"""
OVERLAPS = """all => all.flatMap(svg => {
    const texts = [...svg.querySelectorAll("text")].map(text => [text.getBoundingClientRect(), text.textContent]);
    return texts.flatMap(([one, words], index) => texts.slice(index + 1).filter(([other]) =>
        Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2
        && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3
    ).map(([_, others]) => `${words} / ${others}`));
})"""


def browser_path():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@contextmanager
def shown(path, scheme, width):
    """Open a file in a browser; after the block nothing may have been said on its console or asked of a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if browser_path() is None:
        pytest.skip("no Chromium on this machine")
    said, asked = [], []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            yield page, playwright.expect
        finally:
            browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def overflow_of(page):
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def background_of(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def sizes_of(page):
    return page.eval_on_selector_all(
        "svg[role=img]",
        "all => all.map(one => [one.getBoundingClientRect().width, one.getBoundingClientRect().height])",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 390)])
def test_a_browser_shows_the_page(tmp_path, scheme, width):
    path = tmp_path / "out.html"
    filled().write(path)
    with shown(path, scheme, width) as (page, expect):
        sizes = sizes_of(page)
        shot = page.screenshot(full_page=True)
        overflow = overflow_of(page)
        background = background_of(page)
        page.locator("button.copy").first.click()
        expect(page.locator("button.copy").first).to_have_text("Copied")
        outside = page.eval_on_selector_all("svg[role=img]", OUTSIDE)
    assert len(sizes) == 5
    assert all(wide > 300 and high > 50 for wide, high in sizes)
    assert outside == []
    assert overflow == 0
    assert background == (LIGHT if scheme == "light" else DARK)
    assert len(shot) > 10_000


PLOTS = [
    "KV in memory against context", "Peak resident memory against context", "Time to the first token against context",
    "Tokens per second against context", "Score by task", *(f"needle: score with {cache}" for cache in CACHES),
    "What one decoded token of tierkv is made of",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 390)])
def test_a_browser_shows_a_report_of_long_contexts(tmp_path, scheme, width):
    path = tmp_path / "report.html"
    a_report().write(path)
    with shown(path, scheme, width) as (page, _):
        assert page.locator("figure h3").all_text_contents() == PLOTS
        sizes = sizes_of(page)
        assert len(sizes) == len(PLOTS)  # each is a picture
        assert all(wide > 300 and high > 50 for wide, high in sizes)
        marks = page.eval_on_selector_all("svg[role=img]", "all => all.map(one => one.querySelectorAll('path').length)")
        assert all(count >= 4 for count in marks)
        assert page.eval_on_selector_all("svg[role=img]", OUTSIDE) == []
        assert page.eval_on_selector_all("svg[role=img]", OVERLAPS) == []
        assert overflow_of(page) == 0
        assert background_of(page) == (LIGHT if scheme == "light" else DARK)
        assert page.get_by_text("machine, a second").count() == 1
        assert len(page.screenshot(full_page=True)) > 10_000


@pytest.mark.slow
def test_a_report_of_long_contexts_fits_on_paper(tmp_path):
    path = tmp_path / "report.html"
    a_report().write(path)
    with shown(path, "dark", PAPER_WIDTH) as (page, _):
        page.emulate_media(media="print")
        assert background_of(page) == WHITE
        assert overflow_of(page) == 0
        assert page.pdf(format="A4").startswith(b"%PDF")
