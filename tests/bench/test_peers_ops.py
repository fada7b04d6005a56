"""Adapters of operators that are not ours: those that run on a CPU against FP64, the others by their absence."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.bench.peers.ops import PEERS, PeerMissing, compiled, load, vllm

ROWS, WIDTH, EPS = 5, 24, 1e-5
THIRD_PARTY = ("vllm", "flashinfer", "liger", "quack")
PACKAGES = {"vllm": "vllm", "flashinfer": "flashinfer", "liger": "liger_kernel", "quack": "quack"}
Tensor = torch.Tensor


def _randn(salt: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt)).to(dtype)


def _arguments(operator: str, dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool) -> tuple[Any, ...]:
    x, other, extra = (_randn(salt, ROWS, WIDTH, dtype=dtype) for salt in range(3))
    weight, bias = (_randn(salt, WIDTH, dtype=weight_dtype) for salt in (3, 4))
    return {
        "rms_norm": (x, weight, EPS),
        "fused_add_rms_norm": (x, other, weight, EPS),
        "fused_add_rms_norm_": (x, other, weight, EPS),
        "rms_norm_backward": (other, x, weight, EPS, extra if residual else None),
        "layer_norm": (x, weight, bias if residual else None, EPS),
        "fused_add_layer_norm": (x, other, weight, bias if residual else None, EPS),
        "layer_norm_backward": (other, x, weight, EPS, extra if residual else None),
    }[operator]


def _norm(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Either norm from its formula, in the dtype of its arguments."""
    centred = x - x.mean(-1, keepdim=True) if name == "layer" else x
    out = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return out if bias is None else out + bias


def _gradients(name: str, grad_out: Tensor, x: Tensor, weight: Tensor, grad_residual: Tensor | None) -> list[Tensor]:
    """Gradients in x, weight and, for the layer norm, bias, by autograd through the formula."""
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    if name == "layer":
        inputs.append(torch.zeros_like(weight).requires_grad_())
    out = _norm(name, inputs[0], inputs[1], inputs[2] if name == "layer" else None, EPS)
    gradients = list(torch.autograd.grad(out, inputs, grad_out))
    if grad_residual is not None:
        gradients[0] = gradients[0] + grad_residual
    return gradients


def _expected(operator: str, args: tuple[Any, ...]) -> list[Tensor]:
    """What the operator means, in FP64, with the sum rounded where it is an output."""
    exact = [a.double() if isinstance(a, Tensor) else a for a in args]
    name = "layer" if "layer" in operator else "rms"
    if operator.endswith("backward"):
        return _gradients(name, exact[0], exact[1], exact[2], exact[4])
    total = (args[0] + args[1]).double() if operator.startswith("fused") else exact[0]
    rest = exact[2:] if operator.startswith("fused") else exact[1:]
    out = _norm(name, total, rest[0], rest[1] if name == "layer" else None, EPS)
    return [out, total] if operator.startswith("fused") else [out]


OPERATORS = (
    "rms_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "rms_norm_backward",
    "layer_norm",
    "fused_add_layer_norm",
    "layer_norm_backward",
)
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo without Inductor: what is traced is checked, and no C++ compiler runs."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(SINGLE, SINGLE), (HALF, HALF), (HALF, SINGLE)])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("peer", ["eager", "compiled"])
@pytest.mark.usefixtures("quick_compiler")
def test_pytorch_peers_compute_the_operator(
    peer: str, operator: str, dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool
) -> None:
    args = _arguments(operator, dtype, weight_dtype, residual)
    expected, before = _expected(operator, args), [a.clone() if isinstance(a, Tensor) else a for a in args]
    with torch.inference_mode():
        run = load(peer).bind(operator, args)
        assert run is not None
        torch.testing.assert_close(args, tuple(before), rtol=0, atol=0)  # binding changes no argument
        results: Any = run()
    if operator.endswith("_"):
        assert results is None
        results = args[:2]
    results = [results] if isinstance(results, Tensor) else list(results)
    assert len(results) == len(expected)
    # BF16: three roundings of an intermediate in eager's backward, one in all else.
    tolerance = 1e-5 if dtype == SINGLE else 3e-2
    for result, right in zip(results, expected, strict=True):
        assert result.dtype in (dtype, weight_dtype)
        torch.testing.assert_close(result.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("peer", ["eager", "compiled"])
@pytest.mark.usefixtures("quick_compiler")
def test_pytorch_peers_agree_with_our_reference(peer: str) -> None:
    args = _arguments("fused_add_rms_norm", SINGLE, SINGLE, False)
    run = load(peer).bind("fused_add_rms_norm", args)
    assert run is not None
    torch.testing.assert_close(run(), ops.fused_add_rms_norm(*args))


@pytest.mark.usefixtures("quick_compiler")
def test_many_shapes_are_compiled_once_each() -> None:
    """More shapes than Dynamo recompiles one function for; 30 is far beyond its limit of 8."""
    for width in range(1, 31):
        x, weight = _randn(0, 2, width), _randn(1, width)
        with torch.inference_mode():
            run = compiled.bind("rms_norm", (x, weight, EPS))
            assert run is not None
            torch.testing.assert_close(run(), _norm("rms", x, weight, None, EPS))


@pytest.mark.usefixtures("quick_compiler")
def test_other_tensors_of_one_shape_share_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[..., object]] = []
    original = compiled._compile
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "_compile", lambda formula, args: (calls.append(formula), original(formula, args))[1])
    for salt in range(3):
        x, weight = _randn(salt, 3, 16), _randn(salt + 9, 16)
        run = compiled.bind("rms_norm", (x, weight, EPS))
        assert run is not None
        torch.testing.assert_close(run(), _norm("rms", x, weight, None, EPS))
    assert len(calls) == 1


def test_inductor_compiles_the_operator() -> None:
    """The functional form: on a CPU the one in place meets pytorch issue 188228, a fault of the C++ backend alone."""
    args = _arguments("fused_add_rms_norm", SINGLE, SINGLE, False)
    with torch.inference_mode():
        run = compiled.bind("fused_add_rms_norm", args)
        assert run is not None
        results: Any = run()
    for result, right in zip(results, _expected("fused_add_rms_norm", args), strict=True):
        torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("peer", PEERS)
def test_an_operator_that_a_peer_lacks_is_not_bound(peer: str) -> None:
    assert load(peer).bind("no_such_operator", ()) is None


@pytest.mark.parametrize(
    ("peer", "operator"),
    [
        ("vllm", "fused_add_rms_norm"),
        ("vllm", "layer_norm"),
        ("vllm", "rms_norm_backward"),
        ("flashinfer", "fused_add_rms_norm"),
        ("flashinfer", "rms_norm_backward"),
        ("liger", "fused_add_rms_norm_"),
        ("liger", "fused_add_layer_norm"),
        ("quack", "fused_add_rms_norm_"),
        ("quack", "fused_add_layer_norm"),
    ],
)
def test_peers_say_which_operators_they_do_not_have(peer: str, operator: str) -> None:
    assert load(peer).bind(operator, _arguments(operator, HALF, HALF, True)) is None


@pytest.mark.parametrize("peer", ["vllm", "flashinfer"])
@pytest.mark.parametrize("operator", ["rms_norm", "fused_add_rms_norm_"])
def test_weights_of_another_dtype_are_refused_where_the_kernel_reads_them_as_its_own(peer: str, operator: str) -> None:
    assert load(peer).bind(operator, _arguments(operator, HALF, SINGLE, False)) is None


def test_flashinfer_has_no_single_precision_rows() -> None:
    assert load("flashinfer").bind("rms_norm", _arguments("rms_norm", SINGLE, SINGLE, False)) is None


@pytest.mark.parametrize("peer", THIRD_PARTY)
def test_a_peer_that_cannot_run_here_says_why(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    if torch.cuda.is_available() and importlib.util.find_spec(PACKAGES[peer]):
        pytest.skip(f"{peer} is installed here")
    with pytest.raises(PeerMissing, match=r"not installed|needs a CUDA device"):
        load(peer).version()


@pytest.mark.parametrize("peer", ["eager", "compiled"])
def test_pytorch_peers_state_the_version_of_torch(peer: str) -> None:
    assert load(peer).version() == f"torch {torch.__version__}"


def test_a_library_of_vllm_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.VARIABLE, str(tmp_path / "gone.so"))
    with pytest.raises(PeerMissing, match=r"ROOFLIGHT_VLLM_LIBRARY names no file: .*gone\.so"):
        vllm.version()
