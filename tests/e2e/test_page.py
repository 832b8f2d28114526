"""The page in a real browser, on the real stack. Skipped where there is no Chromium.

`SCREENSHOTS=docs/page make test ARGS=tests/e2e/test_page.py` keeps what it saw.
"""

import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = [pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the path"), pytest.mark.timeout(180)]

WIDTHS = (360, 768, 1440)
LONG = (
    "1) Eva has 8 pens. She buys 5 more. How many pens does she have? 2) Ben has 20 eggs. He sells 6. He then has 3 "
    "times as many. How many eggs does he have now? 3) Add 4 to each number: 15, 19"
)


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield started
        await started.close()


@pytest_asyncio.fixture
async def page(browser: Browser, base_url: str, api_key: str) -> AsyncIterator[Page]:
    opened = await open_page(browser, base_url, api_key)
    yield opened
    await opened.close()


async def open_page(browser: Browser, base_url: str, api_key: str, *, width: int = 1440, dark: bool = False) -> Page:
    """With the key as if it had been typed before; "": not yet."""
    page = await browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        ignore_https_errors=True,  # Chromium has its own list of whom it trusts
    )
    if api_key:
        await page.add_init_script(f"sessionStorage.setItem('tediserve-api-key', '{api_key}')")
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.complaints = complaints  # type: ignore[attr-defined]
    await page.goto(base_url + "/")
    told = "tedi-tiny" if api_key else "an API key is needed"
    await expect(page.locator("#model")).to_have_text(told, timeout=15_000)
    return page


async def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


async def test_an_answer_unmasks_step_by_step(page: Page) -> None:
    await page.fill("#prompt", LONG)
    await page.select_option("#mode", "pin")
    await page.fill("#max-tokens", "128")
    await page.press("#prompt", "Control+Enter")
    cells = page.locator("#canvas .cell")
    await expect(cells).to_have_count(128, timeout=15_000)
    await expect(page.locator("#canvas .cell:not(.masked)").first).to_be_visible()
    await keep(page, "chat")
    await expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert not await page.locator("#error").is_visible()
    answer = await page.inner_text("#answer")
    assert "####" in answer
    committed = page.locator("#canvas .cell:not(.masked)")
    shown = "".join(await committed.all_text_contents()).replace("⏎", "\n")
    assert answer.strip() in shown, "the canvas ends with what the answer says"
    facts = await page.inner_text("#facts")
    assert "0.90 (mean)" in facts
    steps = int((await page.locator("#facts div", has_text="Steps").inner_text()).split()[-1])
    titles = [await cell.get_attribute("title") or "" for cell in await committed.all()]
    numbers = {int(title.rsplit(" ", 1)[1]) for title in titles}
    assert numbers == set(range(1, steps + 1)), "each step committed something, and each was shown"
    assert page.complaints == []  # type: ignore[attr-defined]


async def test_a_deadline_is_told_and_counted(page: Page) -> None:
    await page.fill("#slo", "60000")
    await page.click("#send")
    await expect(page.locator("#facts")).to_contain_text("met", timeout=60_000)
    label = re.compile(r"\d+ % of [1-9]\d* requests with a deadline met it")  # other tests' too
    await expect(page.locator("#attainment svg")).to_have_attribute("aria-label", label, timeout=15_000)
    await expect(page.locator("#instances tr")).to_have_count(2)
    await expect(page.locator("#load")).to_contain_text("Capacity")
    await keep(page, "cluster")


async def test_a_refusal_says_why_and_a_running_call_can_be_stopped(page: Page) -> None:
    await page.fill("#prompt", "many words " * 1000)
    await page.click("#send")
    await expect(page.locator("#error")).to_contain_text("tokens")
    await page.route("**/v1/chat/completions", lambda route: None)  # an answer that does not come
    await page.fill("#prompt", LONG)
    await page.click("#send")
    await page.click("#stop")
    await expect(page.locator("#error")).to_have_text("Stopped.")
    await expect(page.locator("#send")).to_be_enabled()


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, base_url: str, api_key: str) -> None:
    page = await open_page(browser, base_url, "")
    await expect(page.locator("#key")).to_be_focused()
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    await page.fill("#key", "tds-wrong")
    await page.press("#key", "Enter")
    await expect(page.locator("#access-why")).to_contain_text("not known")
    assert await page.evaluate("sessionStorage.length") == 0
    await page.fill("#key", f" {api_key} ")
    await page.press("#key", "Enter")
    await expect(page.locator("#model")).to_have_text("tedi-tiny", timeout=15_000)
    await expect(page.locator("#access")).to_be_hidden()
    await page.click("#send")
    await expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert "####" in await page.inner_text("#answer")
    await page.reload()
    await expect(page.locator("#model")).to_have_text("tedi-tiny", timeout=15_000)
    assert await page.evaluate("localStorage.length + document.cookie.length") == 0
    assert not [text for text in page.complaints if "401" not in text]  # type: ignore[attr-defined]
    await page.close()


async def test_prompts_are_text_and_never_markup(page: Page) -> None:
    await page.fill("#prompt", "<img src=x onerror=alert(1)>")
    await page.click("#send")
    await expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert await page.locator("#chat img").count() == 0
    assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "dark"), [*((width, False) for width in WIDTHS), (1440, True)])
async def test_axe_finds_nothing_and_nothing_overflows(
    browser: Browser, base_url: str, api_key: str, width: int, dark: bool
) -> None:
    page = await open_page(browser, base_url, api_key, width=width, dark=dark)
    await page.click("#send")
    await expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    await keep(page, f"{'dark' if dark else 'light'}-{width}")
    await page.close()
