"""The page of a report in a browser: light, dark and on a phone. Skipped where there is no browser."""

import shutil

import pytest

from tests.pages import filled


def browser_path():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 390)])
def test_a_browser_shows_the_page(tmp_path, scheme, width):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if browser_path() is None:
        pytest.skip("no Chromium on this machine")
    path = tmp_path / "out.html"
    filled().write(path)
    said, asked = [], []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            sizes = page.eval_on_selector_all(
                "svg[role=img]",
                "all => all.map(one => [one.getBoundingClientRect().width, one.getBoundingClientRect().height])",
            )
            shot = page.screenshot(full_page=True)
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.locator("button.copy").first.click()
            playwright.expect(page.locator("button.copy").first).to_have_text("Copied")
            outside = page.eval_on_selector_all(
                "svg[role=img]",
                """all => all.flatMap(svg => {
                    const box = svg.getBoundingClientRect();
                    return [...svg.querySelectorAll("text")].filter(text => {
                        const own = text.getBoundingClientRect();
                        return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1
                            || own.bottom > box.bottom + 1;
                    }).map(text => text.textContent);
                })""",
            )
        finally:
            browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len(sizes) == 5
    assert all(wide > 300 and high > 50 for wide, high in sizes)
    assert outside == []
    assert overflow == 0
    assert background == ("rgb(253, 253, 254)" if scheme == "light" else "rgb(20, 24, 28)")
    assert len(shot) > 10_000
