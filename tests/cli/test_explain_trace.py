"""`rooflight explain --trace FILE`: what it prints, and what it says of a file that is no trace."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rooflight.cli.explain_trace import duration, explain_trace
from rooflight.limits.profile.cost import Peaks
from tests.cli.running import Terminal, invoke, plain, refused
from tests.limits.profile.test_profile import Event, host, kernel, launch, recorded, save, shaped

CARD = Peaks(read_rate=4e12, flops={"bf16": 8e14}, node_us=1.0, name="NVIDIA H200")
SILU = "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(int)>(int)"


def decode_step(start: float, number: int) -> list[Event]:
    """A product that keeps the GPU busy for 90 us, then an activation and a copy."""
    at, first = start, 10 * number
    return [
        host(f"ProfilerStep#{number}", at, 100, "user_annotation"),
        host("aten::mm", at, 8, **shaped([[1, 8192], [8192, 16384]])),
        launch(at + 1, first),
        host("aten::silu", at + 10, 8, **shaped([[1, 16384]])),
        launch(at + 11, first + 1),
        kernel("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", at + 5, 90, first),
        kernel(SILU, at + 95, 2, first + 1),
        {**kernel("Memcpy DtoH (Device -> Pageable)", at + 97, 3), "cat": "gpu_memcpy"},
    ]


def steps(count: int = 3) -> list[Event]:
    return [event for number in range(count) for event in decode_step(100.0 * number, number + 1)]


def shown(path: Path, ceilings: Any = CARD, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    explain_trace(path, ceilings, False, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_gpu_trace(tmp_path: Path) -> None:
    page = shown(save(tmp_path / "trace.json.gz", steps(), deviceProperties=[{"id": 0, "name": "NVIDIA H200"}]))
    summary, of_steps = page.splitlines()[:2]
    assert summary.endswith("wall 300.0 µs, GPU busy 285.0 µs, host share 5.0%, 6 kernels, 3 copies from 6 launches")
    assert of_steps == "3 steps of 100.0 µs (median; 100.0 µs to 100.0 µs), the GPU was busy for 95%"
    assert all(len(line) <= 80 for line in page.splitlines()[2:])
    lines = [words(line) for line in page.splitlines()]
    assert "matmul 3 270.0 µs 94.7%" in lines
    assert "activation 3 6.0 µs 2.1%" in lines
    assert "memcpy/memset 3 9.0 µs 3.2%" in lines
    # 268.5 MB at 4 TB/s.
    assert "nvjet_tst_128x8_ 3 270.0 µs 90.0 µs 94.7% memory 67.1 µs 75%" in lines
    assert "aten::mm" in lines
    assert "Memcpy DtoH 3 9.0 µs 3.0 µs 3.2% link - -" in lines
    assert [line for line in lines if " 3 6.0 µs 2.0 µs 2.1% launch 1.0 µs 50%" in line]
    said = words(page)
    assert "GPU: it was busy for 95% of the wall time, and matmul took 95% of its time." in said
    assert "alone took 95%, at 75% of its memory limit. By wall: memory 95%, link 3%, launch 2%." in said
    assert "Limits are of NVIDIA H200" in said
    assert "But the trace is of" not in said


def test_an_idle_gpu_is_the_hosts_matter(tmp_path: Path) -> None:
    said = words(shown(save(tmp_path / "t.json", [*decode_step(0, 1), host("aten::add", 900, 100)])))
    assert "Host: the GPU was idle for 90% of the wall time, in 2 gaps of up to 900.0 µs." in said
    assert "It made 2 launches (median 2.0 µs): capture the step in a CUDA graph" in said


def test_another_cards_trace_and_one_without_shapes(tmp_path: Path) -> None:
    events = [launch(0, 1), kernel("gemm", 5, 50, 1), {**kernel("x", 1, 1), "dur": None}]
    said = words(shown(save(tmp_path / "t.json", events, deviceProperties=[{"name": "NVIDIA A100\x1b[5m"}])))
    assert "But the trace is of NVIDIA A100?[5m: name its card with --gpu." in said
    assert "The trace has no shapes: record_shapes=True adds limits and rates." in said
    assert "1 events were left out: their times are no times." in said


def test_several_gpus_have_a_table(tmp_path: Path) -> None:
    lines = [
        words(line) for line in shown(save(tmp_path / "t.json", [*steps(1), kernel("k", 0, 50, device=1)])).splitlines()
    ]
    assert "GPU streams kernels busy of wall gaps longest" in lines
    assert "0 1 2 95.0 µs 95.0% 1 5.0 µs" in lines
    assert "1 1 1 50.0 µs 50.0% 1 50.0 µs" in lines


def test_a_cpu_trace(tmp_path: Path) -> None:
    recorded("Llama", tmp_path / "trace.json.gz", steps=2)
    page = words(shown(tmp_path / "trace.json.gz"))
    assert "operator calls, no GPU 2 steps of " in page
    assert "operator, own time calls total mean share wall GB/s GFLOP/s" in page
    assert "aten::mm" in page
    assert "The trace has no GPU, so the card's limits were left out." in page
    assert "no shapes" not in page


def test_kernels_that_were_not_recorded(tmp_path: Path) -> None:
    page = shown(save(tmp_path / "t.json", [host("aten::mm", 0, 9, **shaped([[8, 8], [8, 8]])), launch(2, 1)]))
    assert "record ProfilerActivity.CUDA too" in words(page)


def test_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    page = shown(save(tmp_path / "t.json", [kernel("[red]evil\x1b[2J\n[/nothing]", 0, 9), host("aten::[x]", 0, 9)]))
    assert "\x1b[2J" not in page
    assert "[red]evil?" in page


def test_one_json_object(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    explain_trace(save(tmp_path / "t.json", steps()), CARD, True, console)
    found = json.loads(console.file.getvalue())  # type: ignore[attr-defined]
    assert (found["on_gpu"], found["wall_us"], found["busy_us"], found["ceilings"]) == (True, 300, 285, "NVIDIA H200")
    assert found["host_share"] == pytest.approx(0.05)
    assert found["launches"] == {"calls": 6, "graphs": 0, "call_us": 2.0, "waiting_us": 0.0}
    first = found["rows"][0]
    assert (first["name"], first["wall"], first["calls"]) == ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "memory", 3)
    assert (first["mean_us"], first["operators"]) == (90, ["aten::mm"])
    assert found["verdict"]["kind"] == "memory"
    assert [family["name"] for family in found["families"]] == ["matmul", "memcpy/memset", "activation"]


# The command


def test_the_command(tmp_path: Path) -> None:
    path = save(tmp_path / "trace.json", steps())
    assert "GPU busy 285.0 µs" in invoke("explain", "--trace", path).stdout
    assert json.loads(invoke("explain", "--trace", path, "--json").stdout)["kernels"] == 6


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is empty"),
        (b"no trace", "is not JSON: it begins with 'n'"),
        (b'{"traceEvents": [{"ph": "X", "cat"', "is cut: it ends in the middle, after 17 characters"),
        (b'{"model": "x"}', "is no trace: it has no traceEvents"),
        (b'{"traceEvents": []}', "has no operators or kernels with durations"),
        (b"\x1f\x8b\x08", "is cut: its gzip stream has no end"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(content: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert refused("explain", "--trace", path) == f"{path} {line}"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert (
        refused("explain", "--trace", tmp_path / "none.json") == f"{tmp_path / 'none.json'}: No such file or directory"
    )


def test_a_bar_while_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        filler = json.dumps({**host("aten::add", 0, 1), "pad": "x" * 1000})
        file.write(",".join([filler] * 30_000 + [json.dumps(event) for event in steps()]))
        file.write("]}")
    with Terminal("explain", "--trace", path) as terminal:
        terminal.expect(r"reading the trace, MB .* \d+/3\d ")
        terminal.expect(r"GPU busy 285\.0 µs")
        assert terminal.leave() == 0


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0.0 µs"),
        (0.042, "0.042 µs"),
        (3.04, "3.0 µs"),
        (999.9, "999.9 µs"),
        (1234, "1.23 ms"),
        (123456, "123.5 ms"),
    ],
)
def test_durations(us: float, text: str) -> None:
    assert duration(us) == text
    assert duration(us * 1e6 if us >= 1000 else 2.5e6)[-1] == "s"


def test_plain_text_where_nobody_looks(tmp_path: Path) -> None:
    text = invoke("explain", "--trace", save(tmp_path / "t.json", steps())).stdout
    assert plain(text) == text
