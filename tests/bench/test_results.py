"""Names of results: a run does not take the place of one of another dtype or device."""

from __future__ import annotations

from pathlib import Path

from rooflight.bench.results import file_name, write

H200 = "NVIDIA H200"


def test_another_dtype_has_a_file_of_its_own(tmp_path: Path) -> None:
    def name(*dtypes: str) -> str:
        return file_name(tmp_path, "throughput", dtypes, "fp32", "cpu")

    assert [name("fp32"), name("bf16"), name("fp16")] == ["throughput", "throughput-bf16", "throughput-fp16"]
    assert [name("bf16", "fp32"), name("bf16", "fp16")] == ["throughput", "throughput-bf16-fp16"]


def test_another_device_has_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "throughput", {"environment": {"device": "cpu"}, "rows": []})
    assert file_name(tmp_path, "throughput", ["fp32"], "fp32", "cpu") == "throughput"
    assert file_name(tmp_path, "throughput", ["bf16"], "bf16", H200) == "throughput-h200"
    assert file_name(tmp_path, "throughput", ["fp16"], "bf16", H200) == "throughput-fp16"
    write(tmp_path, "request", {"environment": {"device": H200}, "rows": []})
    assert file_name(tmp_path, "request", ["fp32"], "fp32", "cpu") == "request-cpu"


def test_a_file_that_is_no_result_may_be_overwritten(tmp_path: Path) -> None:
    for text in ("", "[]", '{"rows": []}', '{"environment": null}'):
        (tmp_path / "request.json").write_text(text)
        assert file_name(tmp_path, "request", ["fp32"], "fp32", "cpu") == "request"
