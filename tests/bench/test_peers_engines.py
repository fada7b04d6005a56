"""Adapters of engines that are not ours: the config that they get, and vLLM by a stand-in that notes its calls."""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench.measurement import Room
from rooflight.bench.ours import RooflightContender
from rooflight.bench.peers.hf_config import hf_config
from rooflight.bench.peers.transformers import TransformersContender
from rooflight.bench.process import missing
from rooflight.models.checkpoint.random_weights import PRESETS
from rooflight.models.config import RopeConfig
from rooflight.models.hf_config import from_hf_config
from rooflight.models.load import load_config


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_comes_back_as_it_was(name: str) -> None:
    fields = json.loads(json.dumps(hf_config(PRESETS[name], torch.bfloat16)))
    assert from_hf_config(fields) == replace(PRESETS[name], dtype=torch.bfloat16)


def test_what_a_config_cannot_say_is_refused() -> None:
    tiny = PRESETS["tiny"]
    with pytest.raises(ValueError, match="must have full attention in every layer"):
        hf_config(replace(tiny, sliding_windows=(0, 8)), torch.float32)
    with pytest.raises(ValueError, match=r"rope type must be default or llama3 .* was 'linear'"):
        hf_config(replace(tiny, rope=RopeConfig("linear", factor=2.0)), torch.float32)


@pytest.mark.parametrize("name", ["tiny", "llama-3.2-1b"])
def test_transformers_builds_the_same_shapes_with_weights_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "tiny":  # of a family without norms of heads, with another RoPE, cut to two layers
        small = replace(PRESETS[name], num_layers=2, sliding_windows=(0, 0), vocab_size=500)
        monkeypatch.setitem(PRESETS, name, small)
    peer = TransformersContender(f"random:{name}", "bf16", "cpu")
    config = load_config(f"random:{name}")
    assert sum(p.numel() for p in peer.model.parameters()) == config.num_parameters()
    assert {p.dtype for p in peer.model.parameters()} == {torch.bfloat16}
    timing = peer.run([5, 6, 7], 4)
    assert len(timing.tokens) == 4
    assert 0 < timing.first_token < timing.total
    assert timing.request_rate == 4 / timing.total
    assert isinstance(peer.facts()["attention"], str)


def test_our_engine_has_the_room_that_is_asked_for() -> None:
    ours = RooflightContender("random:tiny", "fp32", "cpu", Room(40, 7, 3, 16))
    assert ours.facts() == {
        "max_model_len": 40,
        "num_pages": 7,
        "page_size": 16,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "graph_buckets": [],
        "prefix_cache": False,
    }
    ours.llm.graph_buckets = (1, 2, 4)  # type: ignore[attr-defined]
    assert ours.facts()["graph_buckets"] == [1, 2, 4]
    assert ours.serve([[1, 2], [3]], 2) > 0


def test_our_pool_leaves_memory_of_a_gpu_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooflight.bench import ours

    config = load_config("random:tiny")
    page, weights = 16 * config.kv_bytes_per_token(torch.float32), config.num_parameters() * 4
    monkeypatch.setattr(ours, "free_bytes", lambda device: weights + 20 * page)
    wanted = [(Room(32, 7), 7), (Room(32, 100), 10), (Room(33 * 16, 100), 33)]
    for room, pages in wanted:
        assert ours._fitting(room, "random:tiny", torch.float32, "cuda") == pages
    assert ours._fitting(Room(32, 100), "random:tiny", torch.float32, "cpu") == 100


def test_a_large_step_is_halved_until_it_takes_a_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooflight.bench import ours
    from rooflight.engine.memory import working_bytes

    config, dtype = load_config("random:qwen3-8b"), torch.bfloat16
    weights = config.num_parameters() * 2
    room = Room(256, 100, 64, 131_072)
    for tokens, least in ((131_072, 131_072), (65_536, 65_536), (32_768, 32_768), (16_384, 1)):
        free = int(4 * working_bytes(config, dtype, 64, least)) + weights + 8
        monkeypatch.setattr(ours, "free_bytes", lambda device, free=free: free)
        assert ours._step(room, "random:qwen3-8b", dtype, "cuda") == tokens
    small = Room(256, 100, 64, 512)
    assert ours._step(small, "random:qwen3-8b", dtype, "cuda") == 512


class FakeLLM:
    """As much of `vllm.LLM` as the adapter uses; `short`: tokens that every answer lacks."""

    short = 0

    def __init__(self, **given: Any) -> None:
        self.given = given
        folder = Path(given["model"])
        self.config = json.loads((folder / "config.json").read_text()) if folder.is_dir() else None
        self.calls: list[tuple[list[Any], Any, dict[str, Any]]] = []
        parts = types.SimpleNamespace
        self.llm_engine = parts(
            vllm_config=parts(
                model_config=parts(max_model_len=given["max_model_len"]),
                cache_config=parts(num_gpu_blocks=5000, block_size=16, enable_prefix_caching=False),
                compilation_config=parts(cudagraph_capture_sizes=(1, 2, 4)),
                scheduler_config=parts(max_num_seqs=1024, max_num_batched_tokens=object),
            )
        )

    def generate(self, prompts: list[Any], params: Any, **given: Any) -> list[Any]:
        self.calls.append((prompts, params, given))
        tokens = list(range(params.max_tokens - self.short))
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)]) for _ in prompts]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module, imported beside a made-up vllm; the environment is left as it was."""
    fake: Any = types.ModuleType("vllm")
    fake.__version__, fake.LLM = "0.23.1", FakeLLM
    fake.SamplingParams = lambda **given: types.SimpleNamespace(**given)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    sys.modules.pop("rooflight.bench.peers.vllm", None)
    yield importlib.import_module("rooflight.bench.peers.vllm")
    sys.modules.pop("rooflight.bench.peers.vllm", None)


def test_vllm_gets_our_shapes_and_a_fair_set_up(adapter: Any) -> None:
    peer = adapter.VllmContender("random:qwen3-0.6b", "bf16", "cuda", Room(8320, max_num_batched_tokens=4096))
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    given = dict(peer.llm.given)
    assert Path(given.pop("model")).is_dir()
    assert given == {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 8320,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.4,
        "max_num_batched_tokens": 4096,
        "generation_config": "vllm",
        "seed": 0,
    }
    assert from_hf_config(peer.llm.config) == load_config("random:qwen3-0.6b")
    assert peer.versions() == {"vllm": "0.23.1"}


def test_vllm_runs_token_ids_greedily_to_the_last_token(adapter: Any) -> None:
    peer = adapter.VllmContender("random:tiny", "fp32", "cuda")
    timing = peer.run([7, 8, 9], 5)
    assert timing.tokens == (0, 1, 2, 3, 4)
    assert timing.first_token > 0
    (first, one, quiet), (again, all_, _) = peer.llm.calls
    assert first == again == [{"prompt_token_ids": [7, 8, 9]}]
    assert (one.max_tokens, all_.max_tokens, quiet) == (1, 5, {"use_tqdm": False})
    for params in (one, all_):
        assert (params.temperature, params.ignore_eos, params.detokenize) == (0.0, True, False)
    peer.complete([1], 3)
    assert peer.serve([[1], [2, 3]], 4) > 0
    assert [(len(prompts), params.max_tokens) for prompts, params, _ in peer.llm.calls[2:]] == [(1, 3), (2, 4)]


def test_an_answer_of_vllm_that_is_too_short_is_an_error(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = adapter.VllmContender("random:tiny", "fp32", "cuda")
    monkeypatch.setattr(FakeLLM, "short", 1)
    with pytest.raises(RuntimeError, match="a request for 4 tokens ended after 3"):
        peer.serve([[1]], 4)


def test_how_vllm_is_set_up_as_far_as_it_tells(adapter: Any) -> None:
    peer = adapter.VllmContender("random:tiny", "fp32", "cuda", Room(max_model_len=64))
    facts = peer.facts()
    json.dumps(facts)
    assert (facts["max_model_len"], facts["num_pages"], facts["page_size"]) == (64, 5000, 16)
    assert (facts["graph_buckets"], facts["prefix_cache"]) == ([1, 2, 4], False)
    del peer.llm.llm_engine
    assert peer.facts()["num_pages"] is None


def test_vllm_loads_folders_and_hub_names_and_refuses_what_it_cannot(adapter: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert adapter._files(str(tmp_path), "bf16", tmp_path) == (str(tmp_path), "auto")
    assert adapter._files("owner/name", "bf16", tmp_path) == ("owner/name", "auto")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"model must be random, a folder or a hub name for the peer vllm, was .*gguf"):
        adapter._files(str(tmp_path / "model.gguf"), "bf16", tmp_path)
    with pytest.raises(ValueError, match="device must be cuda for the peer vllm, was 'cpu'"):
        adapter.VllmContender("random:tiny", "fp32", "cpu")


def test_vllm_is_not_asked_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing("vllm", "cpu") == "runs on a GPU only"
    assert missing("vllm", "cuda") is None
    assert missing("transformers", "cpu") is None
