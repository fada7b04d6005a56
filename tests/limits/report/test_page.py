"""The page of `explain --html`: what is on it, and that it needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
import torch

from rooflight.limits.advice import Advice, Change, advise, what_if
from rooflight.limits.explanation import Explanation, explain
from rooflight.limits.report import report
from rooflight.limits.report.charts import Scale, duration, short
from rooflight.limits.report.sweeps import crossing
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.config import ModelConfig
from rooflight.models.load import load_config

VOID = {"meta", "link", "br"}
CASES = {
    "decode": ("random:qwen3-0.6b", Scenario(Step("decode", 1, 1024), "h200")),
    "prefill": ("random:qwen3-8b", Scenario(Step("prefill", 4, 2048), "rtx4090")),
    "two GPUs": ("random:qwen3-8b", Scenario(Step("decode", 8, 8192), "h200", weights="w4", kv="fp8", tp=2)),
    "too large": ("random:qwen3-8b", Scenario(Step("decode", 64, 40_000), "l4")),
    "nothing fits": ("random:qwen3-8b", Scenario(Step("prefill", 512, 40_960), "l4")),
    "short": ("random:smollm2-135m", Scenario(Step("decode", 1, 1024), "l40s")),
    "tiny": ("random:tiny", Scenario(Step("decode", 1, 0), "h200")),
    "one token": ("random:tiny", Scenario(Step("prefill", 1, 1), "b200")),
    "batch 100000": ("random:tiny", Scenario(Step("decode", 100_000, 16), "a100")),
}


@cache
def explained(case: str) -> tuple[ModelConfig, Explanation]:
    model, scenario = CASES[case]
    config = replace(load_config(model), dtype=torch.bfloat16)
    return config, explain(model, config, scenario)


@cache
def page_of(case: str, changes: str = "") -> str:
    config, found = explained(case)
    results = what_if(found.model, config, found.scenario, changes) if changes else []
    return report(config, found, advise(config, found), results)


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order. Keeps elements, their text, and rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def named(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [a for name, a in self.elements if name == tag and kind in f" {a.get('class', '')} "]

    @property
    def words(self) -> str:
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("style", "script")).split())


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_well_formed_and_whole(case: str) -> None:
    page = Page(page_of(case))
    assert page_of(case).startswith("<!DOCTYPE html>\n<html lang=")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.named("meta")
    headings = [text for tag, text in page.texts if tag == "h2"]
    assert headings == [
        *("Roofline", "The step", "Operators", "Batch and context", "Memory", "What would move it"),
        "How the limits are made",
    ]
    assert len(page.named("svg", " roofline ")) == 2  # for wide and for narrow windows


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_numbers(case: str) -> None:
    drawn = re.sub(r"<(style|script)>.*?</\1>", "", page_of(case), flags=re.DOTALL)
    assert not re.findall(r"\b(?:nan|inf|None|e[+-]\d\d)\b", drawn)
    for _, attributes in Page(page_of(case)).elements:
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
            assert -20 <= float(attributes.get(name, 0)) <= 1060, attributes
        assert float(attributes.get("r", 1)) > 0


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_fetched(case: str) -> None:
    text, (_, found) = page_of(case), explained(case)
    page = Page(text)
    for tag, attributes in page.elements:
        assert "src" not in attributes
        if "href" in attributes:
            assert attributes["href"] == "data:," or (tag == "a" and attributes["href"] in found.card.sources)
    assert {a["href"] for a in page.named("a")} == set(found.card.sources)
    styles = "".join(content for tag, content in page.texts if tag in ("style", "script"))
    assert not re.search(r"url\(|@import|@font-face|https?:|fetch\(|import\(", styles)


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_in_the_table_with_its_figures(case: str) -> None:
    _, found = explained(case)
    rows = [row for row in Page(page_of(case)).rows if len(row) == 9]
    assert rows[0][:3] == ["#", "operator", "calls"]
    assert rows[0][5:] == ["FLOP/byte", "wall", "limit µs", "share"]
    for number, (row, cells) in enumerate(zip(found.rows, rows[1:-1], strict=True), 1):
        assert cells[:3] == [str(number), row.name, f"{row.calls:,}"]
        assert cells[6] == row.wall
        assert float(cells[7].replace(",", "")) == pytest.approx(row.limit_us, rel=0.01)
        assert cells[8] == f"{row.share:.1%}"
    assert rows[-1][1:3] == ["the step", f"{found.launches:,}"]


@pytest.mark.parametrize("case", CASES)
def test_every_row_that_computes_is_a_point_and_the_others_are_listed(case: str) -> None:
    _, found = explained(case)
    page = Page(page_of(case))
    numbers = sorted(str(n) for n, row in enumerate(found.rows, 1) if row.flops)
    points = page.named("circle", " point ")
    assert sorted(point["data-row"] for point in points) == sorted(numbers * 2)
    for point in points:
        assert f" {found.rows[int(point['data-row']) - 1].wall}" in point["class"]
    key = {a["value"] for a in page.named("li") if "value" in a}  # the narrow chart has numbers for names
    assert key == set(numbers)
    rest = ", ".join(row.name for row in found.rows if not row.flops)
    assert f"Not drawn, as they only move data: {rest}." in page.words


def test_points_stand_where_their_walls_are() -> None:
    """On the slope those that memory holds, below it those that a launch holds, in both charts."""
    _, found = explained("decode")
    page = Page(page_of("decode"))
    slopes = [a for a in page.named("line", " roof ") if a["y1"] != a["y2"]]
    points = page.named("circle", " point ")
    each = len(points) // 2
    for slope, group in zip(slopes, (points[:each], points[each:]), strict=True):
        x1, y1, x2, y2 = (float(slope[name]) for name in ("x1", "y1", "x2", "y2"))
        for point in group:
            roof = y1 + (float(point["cx"]) - x1) * (y2 - y1) / (x2 - x1)
            below = float(point["cy"]) - roof  # y grows downwards
            wall = found.rows[int(point["data-row"]) - 1].wall
            assert abs(below) < 1.5 if wall == "memory" else below > 5


def test_the_stack_of_a_step_is_whole() -> None:
    page, (_, found) = Page(page_of("decode")), explained("decode")
    parts = [a for a in page.named("i") if "data-row" in a]
    widths = [float(a["style"].removeprefix("width:").removesuffix("%")) for a in parts]
    assert widths == pytest.approx([row.share * 100 for row in found.rows], abs=1e-3)
    assert sum(widths) == pytest.approx(100, abs=0.01)


def test_the_headline() -> None:
    _, found = explained("decode")
    words = Page(page_of("decode")).words
    assert "random:qwen3-0.6b bf16 · decode of 1 × 1,024 tokens in the cache · NVIDIA H200" in words
    assert f"Ceilings: {found.card.origin}." in words
    assert f"Step limit {found.stream_us:.1f} µs {found.launches} kernels, all overlapped" in words
    assert f"At most {found.tokens_per_s:,.0f} tokens/s 1 token in {found.stream_us:.0f} µs" in words
    assert f"Wall memory {found.flops / found.bytes:.2f} FLOP/byte, ridge {found.ridge:.0f}" in words


def test_a_prefill_counts_prompt_tokens_and_where_it_is_compute_bound() -> None:
    words, (_, found) = Page(page_of("prefill")).words, explained("prefill")
    assert "prefill of 4 × 2,048 tokens new · NVIDIA GeForce RTX 4090" in words
    assert f"{found.tokens_per_s:,.0f} prompt tokens/s 4 prompts in {found.stream_us / 1e3:.0f} ms" in words
    assert "Wall compute" in words
    assert re.search(r"Arithmetic takes longer than moving the bytes from about \d+ tokens a sequence on", words)
    assert "data sheet, times the fraction of it that the NVIDIA H200 reached" in words


def test_other_formats_and_gpus_are_named() -> None:
    assert "weights w4 · kv fp8 · one of 2 GPUs" in Page(page_of("two GPUs")).words


def test_the_crossing_is_the_explanations() -> None:
    _, found = explained("decode")
    text = f"{found.crossing:,.0f}"
    assert 10_000 < found.crossing < 11_000
    assert f"KV = weights at {text}" in page_of("decode")
    assert f"than reading the weights from about {text} tokens a sequence on" in Page(page_of("decode")).words
    _, eight = explained("two GPUs")
    assert f"KV = weights at {eight.crossing / 8:,.0f}" in page_of("two GPUs")
    assert "KV never passes the weights within the model’s context." in Page(page_of("short")).words


@pytest.mark.parametrize("case", CASES)
def test_sweeps_are_short_and_end_where_they_must(case: str) -> None:
    config, found = explained(case)
    charts = page_of(case).split('class="lines"')[1:]
    assert len(charts) == (3 if found.memory.largest_batch > 1 else 1)
    tips = [re.findall(r'class="spot[^>]*><title>([^<]*)', chart) for chart in charts]
    assert all(len(set(chart)) <= 12 for chart in tips)
    assert tips[-1][-1].startswith(f"{config.max_position_embeddings - (found.scenario.step.phase == 'decode'):,} ")
    if len(charts) == 3:
        assert tips[0][0].startswith("1 sequences")
        assert tips[0][-1].startswith(f"{min(found.memory.largest_batch, 1024):,} sequences")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("longest", [1, 2, 700, 1_000_000])
def test_sweeps_of_models_with_little_and_much_context(phase: str, longest: int) -> None:
    config = replace(load_config("random:tiny"), max_position_embeddings=longest)
    found = explain("tiny", config, Scenario(Step(phase, 3, 1 if phase == "prefill" else 0), "h200"))
    text = report(config, found, [], [])
    charts = text.split('class="lines"')[1:]
    assert len(charts) == (3 if longest > 1 else 2)
    if longest > 1:
        tips = list(dict.fromkeys(re.findall(r'class="spot[^>]*><title>([^<]*)', charts[-1])))
        assert 2 <= len(tips) <= 12
        assert tips[-1].startswith(f"{longest - (phase == 'decode'):,} tokens")


def test_what_does_not_fit_is_said_with_numbers() -> None:
    page = Page(page_of("too large"))
    total = explained("too large")[1].memory.total
    assert f"Does not fit: {total / 1e9:.0f} GB of 24 GB. The line marks the card’s 24 GB. 10% of what" in page.words
    assert "At most 1 sequence of 40,001 tokens fit." in page.words
    assert len(page.named("u")) == 1
    assert "does not fit" in page_of("too large")  # in the chart, over context
    assert "Not even one sequence of 40,960 tokens fits." in Page(page_of("nothing fits")).words
    fitting, memory = Page(page_of("decode")), explained("decode")[1].memory
    assert f"Fits: {memory.total / 1e9:.2f} GB of 141 GB." in fitting.words
    assert f"At most {memory.largest_batch:,} sequences of 1,025 tokens fit." in fitting.words
    assert fitting.named("u") == []


def test_what_if_is_shown_where_it_was_asked() -> None:
    config, found = explained("decode")
    results = what_if(found.model, config, found.scenario, "kv=fp8,batch=8")
    page = Page(report(config, found, [], results))
    assert "What if" in [text for tag, text in page.texts if tag == "h2"]
    rows = [row for row in page.rows if len(row) == 6]
    assert [row[0] for row in rows] == ["change", "as it is", "kv=fp8", "batch=8", "kv=fp8,batch=8"]
    assert rows[3][4] == f"{results[1].gain:.2f}"
    assert rows[3][3] == f"{results[1].after.tokens_per_s:,.0f}"


def test_advice_is_shown_in_order() -> None:
    config, found = explained("decode")
    page = Page(page_of("decode"))
    for piece in advise(config, found):
        assert piece.text in page.words
    titles = [piece.step.capitalize() for piece in advise(config, found)]
    assert [text for tag, text in page.texts if tag == "b" and text in titles] == titles


def test_all_that_a_user_types_is_escaped() -> None:
    config, found = explained("decode")
    evil = "</title><script>alert('\"&')</script>"
    found = replace(found, model=evil)
    text = report(config, found, [Advice("phase", evil)], [Change(evil, found, found)])
    page = Page(text)
    assert len(page.named("script")) == 1
    assert evil not in text
    assert page.words.count(evil) == 4  # title, heading, change, advice
    for svg in page.named("svg", " roofline "):
        assert svg["aria-label"].startswith(f"Roofline of {evil} on NVIDIA H200 ")


def test_the_same_input_gives_the_same_bytes() -> None:
    config, found = explained("decode")
    first = report(config, found, advise(config, found), [])
    explain.__globals__["_traced"].cache_clear()
    assert report(config, found, advise(config, found), []) == first


def test_where_lines_cross() -> None:
    assert crossing([0, 10], [4, 4], [0, 8]) == 5
    assert crossing([0, 10, 20], [4, 4, 4], [0, 2, 6]) == 15
    assert crossing([1, 2], [4, 4], [5, 6]) == 1
    assert crossing([1, 2], [4, 4], [0, 3]) is None


def test_scales_and_figures() -> None:
    scale = Scale(1, 1000, 0, 300)
    assert scale(10) == pytest.approx(100)
    assert scale.ticks() == [1, 10, 100, 1000]
    assert Scale(3, 60, 0, 1).ticks() == [5, 10, 20, 50]
    assert Scale(0, 40_000, 0, 1, log=False).ticks() == [0, 10_000, 20_000, 30_000, 40_000]
    assert [short(v) for v in (0, 999.9, 1000, 4.53e12)] == ["0", "1 k", "1 k", "4.53 T"]
    assert [duration(v) for v in (0.48, 290.1, 999.9, 2_270, 3.6e9)] == [
        "0.48 µs",
        "290 µs",
        "1 ms",
        "2.27 ms",
        "3,600 s",
    ]
