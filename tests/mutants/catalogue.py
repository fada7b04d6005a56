"""One-line faults that the suite must find: the list to extend when a new kind of fault is thought of.

Each names a file under src/rooflight, a piece of its text that stands there exactly once, what replaces it, and the
tests that should fail: a path under tests/ and a `-k` expression, as narrow as possible, since each fault costs a run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str


AUTOGRAD, CONTRACT, NORM, PAGED, ROPE = (
    f"ops/{name}.py" for name in ("autograd", "contract", "norm", "paged_attention", "rope")
)
SAMPLE, STEP, GRADIENT = "ops/sample.py", "ops/qk_norm_rope_cache.py", "ops/norm_backward.py"
TRITON, TRITON_GRADIENT, TRITON_LAYER, TRITON_LAYER_GRADIENT, PARTIALS = (
    f"kernels/triton/{name}.py" for name in ("norm", "norm_backward", "layer_norm", "layer_norm_backward", "partials")
)
OF = {
    name: f"ops/test_{name}.py"
    for name in (
        "attention",
        "layer_norm",
        "norm",
        "penalties",
        "qk_norm_rope_attention",
        "qk_norm_rope_cache",
        "rope",
        "sample",
    )
}
GRAPHS, OPTIONS = "engine/test_graph_runner.py", "engine/test_options.py"
RUNNER, BATCH, STATE, DRAWS = (
    f"engine/{name}.py" for name in ("graph_runner", "static_batch", "logit_state", "options")
)
VALUES, LAYOUTS, GRADIENTS, MUTATION, ERRORS, COST = (
    f"contract/test_{name}.py" for name in ("values", "layouts", "gradients", "mutation", "errors", "cost")
)

MUTANTS = [
    # Attention
    Mutant(
        "mask dropped",
        PAGED, "    hidden = key > position\n", "    hidden = key < 0\n",
        OF["attention"], "br_026_causal",
    ),
    Mutant(
        "causal mask lined up at the top left",
        PAGED, "torch.arange(first, first + rows,", "torch.arange(0, rows,",
        OF["attention"], "br_026_causal",
    ),
    Mutant(
        "window one key too long in the mask",
        PAGED, "key <= position - window", "key < position - window",
        OF["attention"], "br_027_window_shows and 4",
    ),
    Mutant(
        "window one key too short in what is gathered",
        PAGED, "max(0, start - window + 1)", "max(0, start - window + 2)",
        OF["attention"], "br_027_window_shows and 4",
    ),
    Mutant(
        "window one key too short in a later block of rows",
        PAGED, "start + row - window + 1 - first_key", "start + row - window + 2 - first_key",
        VALUES, "sweep and prefill_attention.ref and float32 and 150 and window",
    ),
    Mutant(
        "a row that sees nothing is NaN",
        PAGED, "hidden.all(-1, keepdim=True), 0)", "hidden.all(-1, keepdim=True), float('nan'))",
        OF["attention"], "br_008_rows",
    ),
    Mutant(
        "LSE without its logarithm",
        PAGED, "torch.logsumexp(scores, -1).view", "scores.exp().sum(-1).view",
        OF["attention"], "lse_is_the",
    ),
    Mutant(
        "block table ignored",
        PAGED, "pages = table[", "pages = torch.arange(len(table), device=table.device)[",
        OF["attention"], "br_009 and inf",
    ),
    Mutant(
        "query heads mapped to the wrong KV head",
        PAGED, "(rows, kv_heads, group, dim).permute(1, 2, 0, 3)", "(rows, group, kv_heads, dim).permute(2, 1, 0, 3)",
        OF["attention"], "br_025 and 14 and 64",
    ),
    Mutant(
        "rows of no sequence keep what was in memory",
        PAGED, "q.new_zeros(q.shape)", "q.new_empty(q.shape)",
        OF["attention"], "rows_of_no_sequence",
    ),
    Mutant("scale forgotten", PAGED, ".mul_(scale)", "", OF["attention"], "scale_is_taken"),
    Mutant(
        "an empty part leaks into a merge",
        "ops/merge_attention.py", "torch.where(empty_b, out_a, out)", "out",
        OF["attention"], "br_008_merge",
    ),
    # Norms
    Mutant(
        "the sum is squared before it is rounded",
        NORM, "return _reference(total, weight, eps), total",
        "return _reference(x.float() + residual.float(), weight, eps).to(x.dtype), total",
        OF["norm"], "br_003",
    ),
    Mutant(
        "eps forgotten",
        NORM, "x.contiguous(), weight.shape, weight, eps)", "x.contiguous(), weight.shape, weight, 0.0)",
        OF["norm"], "rms_norm_by_hand",
    ),
    Mutant(
        "FP32 weight rounded to the input's dtype",
        NORM, "weight.shape, weight.float(), eps)", "weight.shape, weight.to(x.dtype).float(), eps)",
        OF["norm"], "br_004_fp32",
    ),
    Mutant(
        "squares in the input's dtype",
        NORM, "torch.rms_norm(x.contiguous(), weight.shape, weight, eps)",
        "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight",
        OF["norm"], "br_001_fp16",
    ),
    Mutant(
        "the in-place form leaves the residual as it was",
        NORM, "_reference(residual.add_(x),", "_reference(residual + x,",
        VALUES, "sweep and fused_add_rms_norm_.ref and float32",
    ),
    Mutant(
        "the functional form writes into its input",
        NORM, "total = (x + residual).contiguous()", "total = residual.add_(x)",
        VALUES, "only_what_the_schema and fused_add_rms_norm.ref",
    ),
    Mutant(
        "the gradient of the residual is dropped",
        NORM, "grad_residual = None if grad_residual is None else rows(grad_residual)", "grad_residual = None",
        OF["norm"], "gradient_of_the_residual",
    ),
    Mutant(
        "the gradient of the norm forgets the mean",
        GRADIENT, "g - normalised * (g * normalised).mean(-1, keepdim=True)", "g",
        GRADIENTS, "gradcheck and rms_norm",
    ),
    Mutant(
        "gradients go to the kernel with the strides that they come with",
        GRADIENT, "        return tensor\n    return tensor.contiguous()", "        return tensor\n    return tensor",
        OF["norm"], "br_021_sum and triton",
    ),
    Mutant(
        "the gradient forgets which provider was asked for",
        GRADIENT, "return ctx.provider if asked_for else None", "return None",
        OF["norm"], "runs_on_the_provider and triton",
    ),
    Mutant(
        "the variance of what is not centred",
        "ops/layer_norm.py", "centred.square().mean", "values.square().mean",
        OF["layer_norm"], "by_hand and ref",
    ),
    # Triton
    Mutant(
        "mean over the wrong count",
        TRITON, "tl.sum(total * total, 1)[:, None] / hidden_size", "tl.sum(total * total, 1)[:, None] / BLOCK",
        VALUES, "sweep and fused_add_rms_norm.triton and 255",
    ),
    Mutant(
        "the kernel squares the sum before it is rounded",
        TRITON, "\n        total = rounded.to(tl.float32)", "\n        total = total + residual",
        OF["norm"], "br_003",
    ),
    Mutant(
        "masked lanes count into the sum of squares",
        TRITON, "\n    total = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)",
        "\n    total = tl.load(x_ptr + row * x_stride + column, mask=inside, other=1.0)",
        VALUES, "sweep and fused_add_rms_norm.triton and 255",
    ),
    Mutant(
        "the kernel writes one element beyond the row",
        TRITON, "\n    tl.store(out_ptr + row * out_stride + column, out, mask=inside)",
        "\n    tl.store(out_ptr + row * out_stride + column, out, mask=(row < num_rows) & (column < hidden_size + 1))",
        LAYOUTS, "all_arguments and fused_add_rms_norm_.triton and row_slice",
    ),
    Mutant(
        "the residual walked with the stride of x",
        TRITON, "\n        residual = tl.load(residual_ptr + row * residual_stride",
        "\n        residual = tl.load(residual_ptr + row * x_stride",
        LAYOUTS, "every_argument and fused_add_rms_norm.triton and row_slice",
    ),
    Mutant(
        "only the last piece of a wide row is squared",
        TRITON, "squares += total * total", "squares = total * total",
        OF["norm"], "test_rows_wider_than_one and triton and 20000",
    ),
    Mutant(
        "masked lanes count into the variance",
        TRITON_LAYER, "centred = tl.where(column < hidden_size, total - mean, 0.0)", "centred = total - mean",
        VALUES, "sweep and layer_norm.triton and 255",
    ),
    Mutant(
        "the weight gradient of a program's last rows alone",
        TRITON_GRADIENT, "weight_sum += product", "weight_sum = product",
        VALUES, "sweep and rms_norm_backward.triton and 33",
    ),
    Mutant(
        "the next row is the same row",
        TRITON_GRADIENT, "tl.load(x_ptr + (row + step) * x_stride", "tl.load(x_ptr + row * x_stride",
        VALUES, "sweep and rms_norm_backward.triton and 33",
    ),
    Mutant(
        "rows beyond the last are zero divided by zero",
        TRITON_GRADIENT, "product = tl.where(inside, product, 0.0)", "product = product + 0.0",
        OF["norm"], "backward_by_hand and triton",
    ),
    Mutant(
        "the gradient of a wide row forgets the rows before it",
        TRITON_GRADIENT, "tl.load(partial_ptr + column, mask=inside, other=0.0) + grad", "grad",
        OF["norm"], "gradients_of_rows_wider and triton and 20000",
    ),
    Mutant(
        "the last partial sum alone",
        PARTIALS, "total += tl.load(", "total = tl.load(",
        VALUES, "sweep and rms_norm_backward.triton and 33",
    ),
    Mutant(
        "the gradient of the bias is that of the weight",
        TRITON_LAYER_GRADIENT, "bias_sum += grad", "bias_sum += product",
        OF["layer_norm"], "backward_by_hand and triton",
    ),
    Mutant(
        "the kernel's in-place form leaves the residual as it was",
        TRITON, "_launch(x, residual, weight, x, residual, eps)",
        "_launch(x, residual, weight, x, torch.empty_like(residual), eps)",
        VALUES, "sweep and fused_add_rms_norm_.triton and float32",
    ),
    Mutant(
        "the interpreter rounds ties away from zero",
        "kernels/triton/interpreter.py", "0x7FFF + ((bits >> 16) & 1)", "0x8000",
        "kernels/test_interpreter.py", "by_hand",
    ),
    # Activation
    Mutant(
        "silu on the wrong half",
        "ops/activation.py", "F.silu(wide(gate)).mul_(up)", "F.silu(wide(up)).mul_(gate)",
        "ops/test_activation.py", "by_hand",
    ),
    Mutant(
        "the fake has a wrong dtype",
        "ops/activation.py", "x.new_empty(*x.shape[:-1], x.shape[-1] // 2)",
        "x.new_empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.float32)",
        VALUES, "layout_that_the_fake and silu",
    ),
    # RoPE and the cache
    Mutant(
        "rotation the other way round",
        ROPE, "(a * cos - b * sin, b * cos + a * sin)", "(a * cos + b * sin, b * cos - a * sin)",
        OF["rope"], "quarter_turns",
    ),
    Mutant(
        "interleaved and half pairs exchanged",
        ROPE, "if interleaved else ((2, half), -2)", "if not interleaved else ((2, half), -2)",
        OF["rope"], "quarter_turns",
    ),
    Mutant(
        "the part that is not turned is changed",
        ROPE, "torch.cat((turned, x[..., 2 * half :]), -1)", "torch.cat((turned, -x[..., 2 * half :]), -1)",
        OF["rope"], "partial_rotation",
    ),
    Mutant(
        "the gradient turns forwards",
        ROPE, "-cos_sin[:, half:]), 1)", "cos_sin[:, half:]), 1)",
        GRADIENTS, "gradcheck and rope",
    ),
    Mutant(
        "turned by the positions of other tokens",
        STEP, "look_up(cos_sin, positions,", "look_up(cos_sin, positions.flip(0),",
        OF["qk_norm_rope_cache"], "equals_norm_then_rope and False and True",
    ),
    Mutant(
        "keys normalised with the weight of the queries",
        STEP, "(wide(k), k_weight, eps)", "(wide(k), q_weight, eps)",
        OF["qk_norm_rope_cache"], "equals_norm_then_rope",
    ),
    Mutant(
        "slot -1 writes the last slot",
        STEP, "if where and min(where) < 0:", "if False:",
        OF["qk_norm_rope_cache"], "br_068",
    ),
    Mutant(
        "values are not written",
        STEP, "    v_cache[pages, :, offsets] = v", "    v_cache.add_(0)",
        OF["qk_norm_rope_cache"], "page_and_offset",
    ),
    Mutant(
        "the value of a lone token is not written",
        STEP, "v_cache[page, :, offset].copy_(v[0])", "pass",
        VALUES, "sweep and qk_norm_rope_cache_.ref and float32",
    ),
    Mutant(
        "attention with its step turns the caller's query",
        "ops/qk_norm_rope_attention.py", "turned = q.clone(memory_format=torch.contiguous_format)", "turned = q",
        OF["qk_norm_rope_attention"], "padded_row and ref",
    ),
    Mutant(
        "attention with its step forgets its window",
        "ops/qk_norm_rope_attention.py", "scale, window, False, splits)[0])", "scale, 0, False, splits)[0])",
        OF["qk_norm_rope_attention"], "equals_the_two and ref",
    ),
    # Linear
    Mutant(
        "a packed weight forgets its bias",
        "ops/linear.py", "_linear_pointwise(rows, weight, bias,", "_linear_pointwise(rows, weight, None,",
        "ops/test_linear.py", "packed",
    ),
    # Sampling
    Mutant(
        "top-p drops the token that reaches it",
        SAMPLE, "beyond = before >=", "beyond = before + ordered >=",
        OF["sample"], "top_p_keeps",
    ),
    Mutant("top-k keeps one too many", SAMPLE, "order[top_k:]", "order[top_k + 1 :]", OF["sample"], "ties_are_broken"),
    Mutant("temperature multiplies", SAMPLE, "double() / temp", "double() * temp", OF["sample"], "filters_come"),
    Mutant("Philox with seven rounds", SAMPLE, "in range(10)", "in range(7)", OF["sample"], "uniform_is_philox"),
    Mutant(
        "the upper half of the position is lost",
        SAMPLE, "position & mask, (position >> 32) & mask, zero, zero", "position & mask, zero, zero, zero",
        OF["sample"], "uniform_is_philox",
    ),
    Mutant(
        "a row with NaN gives a token",
        SAMPLE, "(best == best) & (best >", "(best != best) | (best >",
        OF["sample"], "br_054_rows",
    ),
    Mutant(
        "the repetition penalty divides negative logits",
        "ops/penalties.py", "logits * repetition)", "logits / repetition)",
        OF["penalties"], "br_057_repetition",
    ),
    # The contract
    Mutant(
        "version counters are not bumped",
        AUTOGRAD, "torch.autograd.graph.increment_version(args[index])", "pass",
        MUTATION, "version_counters and fused_add_rms_norm_.ref",
    ),
    Mutant(
        "arguments that require gradients are taken",
        AUTOGRAD, "if torch.is_grad_enabled():", "if False:",
        MUTATION, "require_gradients_are_refused and rope_",
    ),
    Mutant(
        "an operator without a gradient returns None",
        AUTOGRAD, 'raise NotImplementedError(f"{name} has no gradient")',
        "return (None,) * len(overload._schema.arguments)",
        GRADIENTS, "without_a_gradient and linear",
    ),
    Mutant(
        "meta tensors are not checked",
        CONTRACT, "_with_checks(self.fake, self.check)", "self.fake",
        ERRORS, "refused_on_meta and rms_norm",
    ),
    Mutant(
        "a shape is not checked",
        "ops/checks.py", "if tensor.shape != other.shape:", "if tensor.dim() != other.dim():",
        ERRORS, "every_argument and fused_add_rms_norm.ref and (wider or longer)",
    ),
    Mutant(
        "a tensor is counted that the operator does not move",
        NORM, "Cost(2 * row + weight", "Cost(3 * row + weight",
        COST, "hand_count and fused_add_rms_norm",
    ),
    # The runtime of a GPU, and what it is made of
    Mutant(
        "padded rows of a graph write to the first slot",
        "engine/static_batch.py", "starts % size, -1),", "starts % size, 0),",
        GRAPHS, "never_written",
    ),
    Mutant(
        "a prompt's chunk of one token is drawn for",
        "engine/graph_runner.py", "len(row.tokens) == 1 and row.samples", "len(row.tokens) == 1",
        GRAPHS, "chunks_of_one and 4",
    ),
    Mutant(
        "tokens of a mixed step in the order of its columns",
        "engine/graph_runner.py", "[columns[index] for index in drawing]", "list(columns.values())",
        GRAPHS, "beside_prompts",
    ),
    # Draws with options
    Mutant(
        "a token of a launch does not count for the next one",
        STATE, "(tokens >= 0).int())", "(tokens < 0).int())",
        OPTIONS, "no_token_is_repeated",
    ),
    Mutant(
        "counts of who was there before stay",
        STATE, "tables.counts.index_fill_(0, given[\"counted\"], 0)", "tables.counts.index_fill_(0, places[:0], 0)",
        OPTIONS, "written_anew",
    ),
    Mutant(
        "a place is known by the number of its request",
        STATE, "return sequence, sequence.preemptions,", "return sequence.request_id, sequence.preemptions,",
        OPTIONS, "relied_on and another",
    ),
    Mutant(
        "a place is known in spite of a preemption",
        STATE, "return sequence, sequence.preemptions,", "return sequence, 0,",
        OPTIONS, "relied_on and preempted",
    ),
    Mutant(
        "a launch that failed has counted",
        STATE, "if self._notes.pop(row.place, None) !=", "if self._notes.get(row.place, None) !=",
        OPTIONS, "relied_on and fails",
    ),
    Mutant(
        "tokens of the host count as those of the device",
        RUNNER, "self._state.forget(plan.rows)", "self._state.forget(())",
        OPTIONS, "counted_by_the_host",
    ),
    Mutant(
        "what is forgotten stays counted",
        STATE, "_note(sequence, _drawn_at(row) + many)", "_note(sequence, len(sequence.tokens))",
        OPTIONS, "forgotten and launch or itself or written_when",
    ),
    Mutant(
        "end tokens are banned one token too long",
        STATE, "(num_tokens >= tables.min_lens", "(num_tokens > tables.min_lens",
        OPTIONS, "waits_for_min",
    ),
    Mutant(
        "who asks for nothing goes by what its place was left with",
        BATCH, "place if place in optional else spare for", "place for",
        OPTIONS, "written_anew",
    ),
    Mutant(
        "log-probabilities of the logits that were changed",
        DRAWS, "else logits.clone()", "else logits",
        OPTIONS, "all_kinds and 8",
    ),
    Mutant(
        "log-probabilities of the last step alone",
        DRAWS, "out[first : first + many].copy_", "out[:many].copy_",
        OPTIONS, "all_kinds and 8",
    ),
    Mutant(
        "log-probabilities of the first row",
        DRAWS, "part[: len(tokens), column]", "part[: len(tokens), 0]",
        OPTIONS, "all_kinds and 8",
    ),
    Mutant(
        "one report for all tokens of a launch",
        "engine/core.py", "for report in reported[request.id][:got])",
        "for report in reported[request.id][:1] * got)",
        OPTIONS, "alone and 2",
    ),
    Mutant(
        "places of the tables are rows of the batch",
        "kernels/triton/penalties.py", "place = tl.load(places_ptr + row)", "place = row",
        OF["penalties"], "places_say and triton",
    ),
    Mutant(
        "a ban that a bias lifts",
        "ops/penalties.py", "logits.masked_fill_(banned[:, :beyond], float(\"-inf\"))",
        "logits.sub_(banned[:, :beyond] * 50.0)",
        OF["penalties"], "ban_wins and ref",
    ),
    Mutant(
        "a kernel that bans nothing",
        "kernels/triton/penalties.py", "mask=mine & (value == float(\"-inf\")))", "mask=mine & (value > 1e30))",
        OF["penalties"], "ban_wins and triton",
    ),
    Mutant(
        "a sequence moves on at its limit",
        "ops/advance.py", "(tokens >= 0) & (positions + 1 < limits)", "(tokens >= 0) & (positions + 1 <= limits)",
        "ops/test_advance.py", "stands_still_at",
    ),
    Mutant(
        "a tile's mask one key too long",
        "kernels/triton/attend.py", "(key[None, :] <= position[:, None])", "(key[None, :] <= position[:, None] + 1)",
        "kernels/test_attention_tiles.py", "end_at_a_border",
    ),
    Mutant(
        "a whole prompt without its mask",
        "ops/prompt_attention.py", "is_causal=True", "is_causal=False",
        VALUES, "sweep and prompt_attention and float32 and 33",
    ),
]  # fmt: skip
