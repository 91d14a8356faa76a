"""The kernels of `triton_map`, which says what they are for.

Parameters have no types: Triton reads annotations, and knows its own only. Pointers are named with
the shape of what they point to; `x_*` and `out_*` are the fields of a `KVMemory`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(
    t,
    table,
    block,
    token,
    block_tokens,
    first,
    HAS_TABLE: tl.constexpr,
):
    """Offsets of tokens within a layer, int64."""
    slot = t + first
    number = slot // block_tokens
    if HAS_TABLE:
        number = tl.load(table + number)
    return number.to(tl.int64) * block + (slot % block_tokens) * token


@triton.jit
def strip_kernel(
    x,
    table,
    x_layer,
    x_block,
    x_token,
    x_head,
    block_tokens,
    first,
    cos_TR,
    sin_TR,
    free_STHD,
    tokens,
    heads,
    HAS_TABLE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One source layer and head, BLOCK_T tokens: turn keys back."""
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (t < tokens)[:, None]
    d = tl.arange(0, HEAD_DIM)
    t = tl.minimum(t, tokens - 1)
    rows = _rows(t, table, x_block, x_token, block_tokens, first, HAS_TABLE)
    base = x + layer * x_layer + head * x_head + rows[:, None]
    own = tl.load(base + d[None, :]).to(tl.float32)
    # The other one of its pair comes from the cache, a moment later.
    half: tl.constexpr = TURNED // 2
    other_d = tl.where(d < half, d + half, tl.where(d < TURNED, d - half, d))
    other = tl.load(base + other_d[None, :]).to(tl.float32)
    angle = t[:, None] * half + (tl.minimum(d, TURNED - 1) % half)[None, :]
    cos = tl.load(cos_TR + angle)
    sin = tl.load(sin_TR + angle) * tl.where(d < half, -1.0, 1.0)[None, :]
    y = tl.where((d < TURNED)[None, :], own * cos + other * sin, own)
    out = free_STHD + ((layer * tokens + t) * heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out, y.to(free_STHD.dtype.element_ty), mask=inside)


@triton.jit
def map_kernel(
    x,
    x_table,
    x_layer,
    x_block,
    x_token,
    x_head,
    x_block_tokens,
    x_first,
    chosen_LK,
    weight_LGOF,
    bias_LGO,
    cos_TR,
    sin_TR,
    out,
    out_table,
    out_layer,
    out_block,
    out_token,
    out_head,
    out_block_tokens,
    out_first,
    tokens,
    layers,
    groups,
    near,
    X_HAS_TABLE: tl.constexpr,
    OUT_HAS_TABLE: tl.constexpr,
    SOURCE_DIM: tl.constexpr,
    SOURCE_HEADS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """HEADS whole heads of one target layer, BLOCK_T tokens.

    The two elements of a rotated pair are at the same place of two accumulators. TURNED = 0 leaves
    all elements as they are (values).
    """
    half: tl.constexpr = HEAD_DIM // 2
    outputs: tl.constexpr = GROUP_HEADS * HEAD_DIM
    head_tiles: tl.constexpr = GROUP_HEADS // HEADS
    features: tl.constexpr = CHOSEN * SOURCE_HEADS * SOURCE_DIM
    steps_of_head: tl.constexpr = SOURCE_DIM // BLOCK_K
    steps_of_layer: tl.constexpr = SOURCE_HEADS * steps_of_head

    # Tiles of one token tile first: they share its features. Then near tokens, then layers.
    pid = tl.program_id(0)
    head_tile = pid % head_tiles
    pid //= head_tiles
    token_tile = pid % near
    pid //= near
    layer = (pid % layers).to(tl.int64)
    pid //= layers
    stretches = tl.cdiv(tl.cdiv(tokens, BLOCK_T), near)
    group = pid // stretches
    t_all = ((pid % stretches) * near + token_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows beyond the last token repeat it and are not stored.
    t = tl.minimum(t_all, tokens - 1)

    j = tl.arange(0, HEADS * half)
    head = head_tile * HEADS + j // half
    in_head = j % half
    if TURNED == HEAD_DIM or TURNED == 0:
        one, two = in_head, in_head + half
    else:
        # Pairs are (d, d + TURNED / 2); the elements that stay are paired with each other.
        one = in_head + tl.where(in_head < TURNED // 2, 0, TURNED // 2)
        two = in_head + tl.where(in_head < TURNED // 2, TURNED // 2, half)
    k = tl.arange(0, BLOCK_K)
    matrix = (layer * groups + group) * outputs
    weights = weight_LGOF + matrix * features + k[:, None]
    w_one = weights + ((head * HEAD_DIM + one) * features)[None, :]
    w_two = weights + ((head * HEAD_DIM + two) * features)[None, :]
    rows = _rows(t, x_table, x_block, x_token, x_block_tokens, x_first, X_HAS_TABLE)
    x_rows = x + group * SOURCE_HEADS * x_head + rows[:, None] + k[None, :]
    chosen = chosen_LK + layer * CHOSEN

    acc_one = tl.zeros((BLOCK_T, HEADS * half), tl.float32)
    acc_two = tl.zeros((BLOCK_T, HEADS * half), tl.float32)
    steps: tl.constexpr = CHOSEN * steps_of_layer
    # Known one step ahead: Triton would spend its stages on a load whose address is itself loaded.
    source = tl.load(chosen)
    for step in range(steps):
        source_head = step % steps_of_layer // steps_of_head
        at = source.to(tl.int64) * x_layer + source_head * x_head + step % steps_of_head * BLOCK_K
        a = tl.load(x_rows + at).to(weight_LGOF.dtype.element_ty)
        b_one = tl.load(w_one + step * BLOCK_K)
        b_two = tl.load(w_two + step * BLOCK_K)
        if WIDEN:
            a, b_one, b_two = a.to(tl.float32), b_one.to(tl.float32), b_two.to(tl.float32)
        acc_one = tl.dot(a, b_one, acc_one, input_precision="ieee")
        acc_two = tl.dot(a, b_two, acc_two, input_precision="ieee")
        source = tl.load(chosen + tl.minimum(step + 1, steps - 1) // steps_of_layer)

    acc_one += tl.load(bias_LGO + matrix + head * HEAD_DIM + one)[None, :]
    acc_two += tl.load(bias_LGO + matrix + head * HEAD_DIM + two)[None, :]
    if TURNED > 0:
        turned_half: tl.constexpr = TURNED // 2
        angle = t[:, None] * turned_half + tl.minimum(in_head, turned_half - 1)[None, :]
        turns = (in_head < turned_half)[None, :]
        cos = tl.where(turns, tl.load(cos_TR + angle), 1.0)
        sin = tl.where(turns, tl.load(sin_TR + angle), 0.0)
        y_one = acc_one * cos - acc_two * sin
        y_two = acc_two * cos + acc_one * sin
    else:
        y_one, y_two = acc_one, acc_two
    out_rows = _rows(t, out_table, out_block, out_token, out_block_tokens, out_first, OUT_HAS_TABLE)
    to = out + layer * out_layer + out_rows[:, None]
    to += ((group * GROUP_HEADS + head).to(tl.int64) * out_head)[None, :]
    inside = (t_all < tokens)[:, None]
    tl.store(to + one[None, :], y_one.to(out.dtype.element_ty), mask=inside)
    tl.store(to + two[None, :], y_two.to(out.dtype.element_ty), mask=inside)
