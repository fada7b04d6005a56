"""Which providers there are, and that arguments and contexts choose among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from rooflight import kernels, ops
from rooflight.kernels.providers import CUDA, TRITON, interpreting
from rooflight.ops import REGISTRY
from rooflight.ops.contract import PLUMBING

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is not installed")


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(3, 64, generator=generator).to(DEVICE) for _ in range(3))
    return x, residual, weight[0]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overloads that run, in order."""
    names: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function.namespace == "rooflight":
                names.append(str(function).removeprefix("rooflight."))
            return function(*args, **kwargs or {})

    with Spy():
        yield names  # type: ignore[misc]


def test_every_kernel_belongs_to_an_operator() -> None:
    assert set(TRITON) | set(CUDA) <= set(REGISTRY | PLUMBING)
    for name in TRITON:
        assert "triton" in REGISTRY[name].providers


def test_the_backend_argument_selects_the_overload(called: list[str]) -> None:
    x, residual, weight = arguments()
    for provider in ("triton", "ref"):
        ops.fused_add_rms_norm(x, residual, weight, backend=provider)
        ops.fused_add_rms_norm_(x.clone(), residual.clone(), weight, backend=provider)
    assert called == [
        "fused_add_rms_norm.triton", "fused_add_rms_norm_.triton", "fused_add_rms_norm.ref", "fused_add_rms_norm_.ref",
    ]  # fmt: skip


def test_the_backend_context_selects_the_overload_where_there_is_one(called: list[str]) -> None:
    x, residual, weight = arguments()
    with ops.backend("triton"):
        ops.fused_add_rms_norm(x, residual, weight)
        ops.linear(x, residual)  # no Triton kernel: left alone
        ops.fused_add_rms_norm(x, residual, weight, backend="ref")  # the argument wins
    ops.fused_add_rms_norm(x, residual, weight)
    default = REGISTRY["fused_add_rms_norm"].active[DEVICE]
    assert called == [
        "fused_add_rms_norm.triton", "linear.ref", "fused_add_rms_norm.ref", f"fused_add_rms_norm.{default}",
    ]  # fmt: skip


def test_unknown_names_are_refused_with_the_choices() -> None:
    x, residual, weight = arguments()
    operator = REGISTRY["fused_add_rms_norm"]
    there = re.escape(str([name for name in operator.providers if DEVICE in operator.serves[name]]))
    wish = rf"fused_add_rms_norm: backend must be one of {there} for tensors on {DEVICE}, was 'fast'"
    with pytest.raises(ValueError, match=wish):
        ops.fused_add_rms_norm(x, residual, weight, backend="fast")
    with pytest.raises(ValueError, match=rf"linear: backend must be one of \['ref'\] for tensors on {DEVICE}, was"):
        ops.linear(x, residual, backend="triton")
    with pytest.raises(ValueError, match="or None, was 'fast'"), ops.backend("fast"):
        pass


def test_status_says_why_for_each_provider() -> None:
    lines = kernels.status()
    assert set(lines) == {"ref", "triton", "cuda"}
    assert ("interpreter" in lines["triton"]) == interpreting()
    assert all(lines.values())


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_without_the_interpreter_the_cpu_has_no_triton_kernel(interpret: str) -> None:
    """In a process of its own: on the CPU the provider is there only when the interpreter is on.

    Without it a call that insists is refused with the choices, and a context leaves the operator to its reference.
    """
    code = (
        "import torch, rooflight\n"
        "x = torch.ones(2, 4)\n"
        "try:\n"
        "    print(rooflight.ops.fused_add_rms_norm(x, x, x[0], backend='triton')[1].sum().item())\n"
        "except ValueError as error:\n"
        "    print(str(error).partition(';')[0])\n"
        "with rooflight.ops.backend('triton'):\n"
        "    print(rooflight.ops.fused_add_rms_norm(x, x, x[0])[1].sum().item())\n"
    )
    if interpret == "1" and not interpreting():
        pytest.skip("a GPU is there, where Triton compiles and interprets nothing")
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    refused = "fused_add_rms_norm: backend must be one of ['ref'] for tensors on cpu, was 'triton'"
    assert done.stdout.splitlines() == ["16.0" if interpret == "1" else refused, "16.0"]
