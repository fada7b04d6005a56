"""The operator contract itself: choosing providers, costs, registration, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from rooflight import ops
from rooflight.ops import REGISTRY, Cost, Make, Operator
from rooflight.ops.contract import PREFERENCE
from rooflight.ops.paged_attention import ATTENTION_TOLERANCE
from tests.contract.harness import same_bits

# Tolerances other than twice the baseline; the reason stands where the number does.
LOOSER = dict.fromkeys(
    ("prefill_attention", "decode_attention", "prompt_attention", "qk_norm_rope_attention_"), ATTENTION_TOLERANCE
)
NUMBERS = count()
NORM = REGISTRY["fused_add_rms_norm"]


@pytest.fixture
def double() -> Iterator[Operator]:
    """A small operator with two providers, only one of them on the CPU by choice; it is not in the registry."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def check(x: torch.Tensor) -> None:
        if x.dim() != 1:
            raise ValueError(f"x must have one dimension, was {x.dim()}")

    name = f"double_{next(NUMBERS)}"  # the dispatcher keeps a name for good
    operator = Operator(
        name=name,
        schema="(Tensor x) -> Tensor",
        reference=twice,
        fake=lambda x: torch.empty_like(x),
        cost=lambda args, hints: Cost(4 * args["x"].numel(), 4, hints.get("flops", 0)),
        composition=lambda x, *, compute: x.to(compute) * 2,
        inputs=lambda make, n: (make.randn(n),),
        sweep=[{"n": 3}],
        workloads={},
        check=check,
    )
    operator.attach("ref", twice, ("cpu", "cuda"))
    yield operator
    assert name not in REGISTRY


def test_every_operator_has_a_reference_on_every_device() -> None:
    for name, operator in REGISTRY.items():
        assert operator.name == name
        assert operator.active["cpu"] == "ref"
        assert {"cpu", "cuda"} <= set(operator.active)
        for device, reason in operator.reason.items():
            assert reason, f"{name} on {device} does not say why"


def test_every_operator_has_what_the_suite_needs() -> None:
    """Zero, one and many rows, and workloads with names; anything else would be tested less than it seems."""
    for name, operator in REGISTRY.items():
        rows = {operator.inputs(Make(operator.dtypes[0]), **dims)[0].shape[0] for dims in operator.sweep}
        assert 0 in rows, name
        assert 1 in rows or name == "prefill_attention", name
        assert max(rows) > 3, name
        assert operator.workloads, name
        assert operator.tolerance == LOOSER.get(name, 2.0), f"{name}: a looser tolerance needs its reason"


def test_inputs_depend_on_the_seed_alone() -> None:
    for operator in REGISTRY.values():
        dims = operator.sweep[-1]
        one, same, other = (operator.inputs(Make(operator.dtypes[-1], seed=seed), **dims) for seed in (5, 5, 6))
        tensors = [index for index, value in enumerate(one) if isinstance(value, torch.Tensor)]
        assert all(same_bits(one[index], same[index]) for index in tensors)
        assert not all(same_bits(one[index], other[index]) for index in tensors)


def test_bind_fills_in_defaults() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3)
    named = REGISTRY["rms_norm"].bind(x, weight)
    assert list(named) == ["x", "weight", "eps"]
    assert named["x"] is x
    assert named["eps"] == 1e-6
    assert REGISTRY["linear"].bind(x, weight)["bias"] is None


def test_mutated_arguments_come_from_the_schema() -> None:
    assert REGISTRY["rms_norm"].mutated == ()
    assert REGISTRY["fused_add_rms_norm_"].mutated == ("x", "residual")
    assert REGISTRY["qk_norm_rope_cache_"].mutated == ("q", "k_cache", "v_cache")
    assert REGISTRY["qk_norm_rope_attention_"].mutated == ("out", "k_cache", "v_cache")
    assert REGISTRY["penalize_logits_"].mutates
    assert not REGISTRY["sample"].mutates


def test_the_operator_is_checked_in_every_provider(double: Operator) -> None:
    double.attach("triton", lambda x: x * 2 + 1, ("cpu",))
    for provider in ("ref", "triton"):
        with pytest.raises(ValueError, match="x must have one dimension, was 2"):
            double.providers[provider](torch.ones(2, 2))


def test_choice_argument_then_context_then_table(double: Operator) -> None:
    """Providers that can be told apart: 2 x and 2 x + 1."""
    double.attach("triton", lambda x: x * 2 + 1, ("cpu",))
    x = torch.ones(1)

    def value(backend: str | None = None) -> float:
        return float(double.overload(x, backend)(x))

    assert value() == 2.0  # the interpreter is never the default on the CPU
    assert value("triton") == 3.0
    with ops.backend("triton"):
        assert value() == 3.0
        assert value("ref") == 2.0
        with ops.backend("ref"):
            assert value() == 2.0
        with ops.backend(None):
            assert value() == 2.0
        assert value() == 3.0
    assert value() == 2.0
    double.choose("cpu", "triton", "measured")
    assert value() == 3.0
    assert double.reason["cpu"] == "measured"


def test_context_leaves_operators_without_the_provider_alone(double: Operator) -> None:
    with ops.backend("cuda"):
        assert double.overload(torch.ones(1), None) is double.providers["ref"]


def test_context_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), ops.backend("triton"):
        raise RuntimeError("on purpose")
    x = torch.ones(2, 4)
    assert NORM.overload(x, None) is NORM.providers["ref"]


def test_preference_on_a_gpu_is_compiled_then_triton_then_reference(double: Operator) -> None:
    assert PREFERENCE == ("cuda", "triton", "ref")
    assert double.active["cuda"] == "ref"
    double.attach("triton", lambda x: x, ("cuda",))
    assert double.active["cuda"] == "triton"
    double.attach("cuda", None, ("cuda",))
    assert double.active["cuda"] == "cuda"
    assert "first present" in double.reason["cuda"]


def test_unknown_providers_are_named_with_the_choices(double: Operator) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of \['ref'\] for tensors on cpu, was 'hip'"):
        double.overload(torch.ones(1), "hip")
    with pytest.raises(ValueError, match="has no provider 'hip'; it has ref"):
        double.choose("cpu", "hip", "")
    with pytest.raises(ValueError, match=r"backend must be one of \['cuda', 'triton', 'ref'\] or None, was 'hip'"):
        ops.backend("hip").__enter__()


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_unknown_backend_argument_of_every_public_function(name: str) -> None:
    from tests.contract.harness import batch_args, public

    operator = REGISTRY[name]
    with pytest.raises(
        ValueError, match=rf"^{name}: backend must be one of \[.*'ref'.*\] for tensors on cpu, was 'fast"
    ):
        public(operator, "fastest")(*batch_args(operator, 2))


def test_costs_take_hints(double: Operator) -> None:
    cost = double.cost_of(torch.ones(5), flops=7)
    assert (cost.bytes_read, cost.bytes_written, cost.flops, cost.unit, cost.bytes) == (20, 4, 7, "fp32", 24)


def test_an_operator_without_a_gradient_names_its_overload(double: Operator) -> None:
    out = double.overload(torch.ones(1), None)(torch.ones(3, requires_grad=True))
    with pytest.raises(NotImplementedError, match=rf"rooflight::{double.name}\.ref has no gradient"):
        out.sum().backward()


def test_make_is_reproducible_and_typed() -> None:
    make = Make(torch.float16, seed=3)
    assert make.randn(2, 3).dtype == torch.float16
    assert torch.equal(make.randn(4), Make(torch.float16, seed=3).randn(4))
    assert not torch.equal(make.randn(4), make.randn(4, salt=1))
    assert torch.equal(make.randn(4, scale=2.0), (make.randn(4).float() * 2).half())
