"""The page of `explain --html` as a person sees it: in headless Chromium, on a desk and on a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_page import CASES, explained, page_of

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
# Without these Chromium tries to reach its maker's hosts.
ARGUMENTS = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
DESK, PHONE = 1280, 390
OVERLAPS = """() => {
  const shown = [...document.querySelectorAll("svg.roofline text")].filter((text) => text.getClientRects().length);
  const boxes = shown.map((text) => [text.textContent, text.getBoundingClientRect(), text.classList]);
  const found = [];
  for (const [one, a, kinds] of boxes)
    for (const [other, b, others] of boxes) {
      if (a === b || kinds.contains("roof") || others.contains("roof")) continue;  // the slope's name is turned
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 4) found.push([one, other, wide, high]);  // boxes are higher than letters
    }
  return found;
}"""
LETTERS = """() => [...document.querySelectorAll("svg text")]
  .filter((text) => text.getClientRects().length && text.textContent)
  .map((text) => {
    const scale = text.getScreenCTM();
    return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(scale.a, scale.b);
  })"""
OUTSIDE = """() => [...document.querySelectorAll("svg text")]
  .filter((text) => text.getClientRects().length && text.textContent)
  .map((text) => [text.textContent, text.getBoundingClientRect()])
  .filter(([, box]) => box.left < 0 || box.right > document.documentElement.clientWidth).map(([text]) => text)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        if not Path(path).exists():
            pytest.skip("no Chromium is installed: apt-get install chromium")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to start as root with its sandbox
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS + root)
        yield started
        started.close()


def opened(browser: Any, folder: Path, case: str, width: int, **settings: Any) -> tuple[Any, list[str]]:
    """The page in a window of this width, and a list of all that went wrong or was asked for elsewhere."""
    file = folder / "report.html"
    file.write_text(page_of(case, "kv=fp8,batch=8" if case == "decode" else ""), encoding="utf-8")
    wrong: list[str] = []
    window = browser.new_context(viewport={"width": width, "height": 844}, **settings).new_page()
    window.on("console", lambda message: wrong.append(message.text))
    window.on("pageerror", lambda error: wrong.append(str(error)))
    window.on("request", lambda request: request.url.startswith("http") and wrong.append(request.url))
    window.goto(file.as_uri())
    return window, wrong


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_quiet_fits_its_window_and_can_be_read(browser: Any, tmp_path: Path, case: str) -> None:
    window, wrong = opened(browser, tmp_path, case, DESK)
    for width in (DESK, 1024, 800, 700, PHONE, 320):
        window.set_viewport_size({"width": width, "height": 844})
        charts = window.locator("svg.roofline:visible")
        assert charts.count() == 1
        assert charts.locator("circle.point").count() == sum(row.flops > 0 for row in explained(case)[1].rows)
        assert window.locator("svg.lines:visible").count() >= 1
        page = "document.documentElement"
        assert window.evaluate(f"[{page}.scrollWidth, {page}.clientWidth]") == [width, width]
        assert window.evaluate(OUTSIDE) == []
        assert window.evaluate(OVERLAPS) == []
        assert min(window.evaluate(LETTERS)) >= (10.5 if width in (DESK, PHONE) else 9.4), width
    assert wrong == []
    window.context.close()


DESK_NAMES = {"rms_norm_linear qkv", "rms_norm_swiglu gate_up", "linear_add_ down", "rms_norm_linear head"}


def test_a_name_in_a_stack_is_whole_or_not_there(browser: Any, tmp_path: Path) -> None:
    """A narrow part shows its number instead of its name, or nothing."""
    for width, names in ((DESK, DESK_NAMES), (PHONE, set())):
        window, _ = opened(browser, tmp_path, "decode", width)
        seen = """() => [...document.querySelectorAll(".tall i[data-row] b")].filter((name) => {
          const box = name.getBoundingClientRect(), part = name.parentNode.getBoundingClientRect();
          return box.top < part.bottom - 1;
        }).map((name) => [name.textContent, name.scrollWidth <= name.parentNode.clientWidth + 1])"""
        shown = window.evaluate(seen)
        assert all(whole for _, whole in shown)
        assert names <= {name for name, _ in shown}
        window.context.close()


def test_a_pointer_shows_figures_and_finds_an_operator_everywhere(browser: Any, tmp_path: Path) -> None:
    window, wrong = opened(browser, tmp_path, "decode", DESK)
    assert window.locator(".tip:visible").count() == 0
    rows = enumerate(explained("decode")[1].rows, 1)
    number, row = next((n, row) for n, row in rows if row.operator == "qk_norm_rope_attention_")
    window.locator(f"svg.roofline:visible circle[data-row='{number}']").hover(force=True)
    tip = f"qk_norm_rope_attention_: {row.intensity:.2f} FLOP/byte, {row.flops / row.limit_us / 1e6:.2f} TFLOP/s"
    assert window.locator(".tip:visible").inner_text().startswith(tip)
    assert window.locator("tr.lit").inner_text().split()[:2] == [str(number), "qk_norm_rope_attention_"]
    assert window.locator(".tall i.lit").count() == 1
    window.locator("h1").hover()
    assert window.locator(".tip:visible, .lit").count() == 0
    assert wrong == []
    window.context.close()


def test_without_scripts_all_is_there(browser: Any, tmp_path: Path) -> None:
    window, wrong = opened(browser, tmp_path, "decode", PHONE, java_script_enabled=False)
    rows = explained("decode")[1].rows
    assert window.locator("tr[data-row]:visible").count() == len(rows)
    assert window.locator("svg.roofline:visible circle.point title").count() == sum(row.flops > 0 for row in rows)
    assert wrong == []
    window.context.close()


def test_dark_where_a_reader_likes_it_dark(browser: Any, tmp_path: Path) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        window, _ = opened(browser, tmp_path, "decode", PHONE, color_scheme=scheme)
        paint = "getComputedStyle(document.body)"
        shades[scheme] = [
            sum(map(int, window.evaluate(f"{paint}.{name}.match(/\\d+/g).slice(0, 3)")))
            for name in ("backgroundColor", "color")
        ]
        window.context.close()
    assert shades["light"][0] > 700 > 200 > shades["light"][1]
    assert shades["dark"][1] > 600 > 200 > shades["dark"][0]
