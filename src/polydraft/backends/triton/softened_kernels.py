"""The Triton kernel behind `polydraft.backends.triton.softened`. Imported only where Triton is there."""

import triton
import triton.language as tl


@triton.jit
def _scores(logits, column_C, columns, temperature, TEMPERED: tl.constexpr):
    """Return logits over the temperature, in float32; minus infinity past the end."""
    score_C = tl.load(logits + column_C, mask=column_C < columns, other=float("-inf")).to(tl.float32)
    return score_C / temperature if TEMPERED else score_C


@triton.jit(do_not_specialize=["nodes"])
def soften(
    logits, temperatures, probs, nodes, columns, logits_row, logits_node,
    TEMPERED: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the softmax of each node's logits, at once where a program can hold all of them; grid [B · G]."""
    place = tl.program_id(0).to(tl.int64)
    row = place // nodes
    logits += row * logits_row + (place % nodes) * logits_node
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    probs += place * columns
    column_C = tl.arange(0, BLOCK)
    if AT_ONCE:
        score_C = _scores(logits, column_C, columns, temperature, TEMPERED)
        weight_C = tl.exp(score_C - tl.max(score_C, 0))
        tl.store(probs + column_C, weight_C / tl.sum(weight_C, 0), mask=column_C < columns)
    else:
        # First the peak alone: a block of minus infinities must not stand for it.
        peak_C = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, columns, BLOCK):
            peak_C = tl.maximum(peak_C, _scores(logits, start + column_C, columns, temperature, TEMPERED))
        peak = tl.max(peak_C, 0)
        sum_C = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            sum_C += tl.exp(_scores(logits, start + column_C, columns, temperature, TEMPERED) - peak)
        total = tl.sum(sum_C, 0)
        for start in range(0, columns, BLOCK):
            weight_C = tl.exp(_scores(logits, start + column_C, columns, temperature, TEMPERED) - peak)
            tl.store(probs + start + column_C, weight_C / total, mask=start + column_C < columns)
