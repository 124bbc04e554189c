"""Hidden bytes of the fused attention kernels on CUDA."""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_memfit.predict.cuda_temporaries.rule import (
    HALF_DTYPES,
    CudaArchitecture,
    HiddenBytes,
    Rule,
    argument,
    between,
    blocks,
    exactly,
    is_contiguous,
    round_up,
    tensor_argument,
    tensor_bytes,
)
from lightning_memfit.trace.timeline import Signature, TensorShape

_MOST_SPLITS = 128
_HEADS_FIRST = (0, 2, 1, 3)


class _Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    head_dim: int


def _sizes(tensor: TensorShape, heads_first: bool) -> _Sizes:
    batch, first, second, head_dim = tensor.size
    return _Sizes(batch, first, second, head_dim) if heads_first else _Sizes(batch, second, first, head_dim)


def _heads_first(signature: Signature) -> bool:
    return "_scaled_dot_product_" in signature.op


def flash_forward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Accumulators of the flash-attention forward when it splits the keys over multiprocessors that would idle.

    1. Blocks: ``m = batch x heads x ceil(queries / 64)``; ``n = ceil(keys / block)`` with a block of 256 keys for head
       dimensions up to 64, 128 up to 128, 64 above.
    2. One split if there is dropout, or if ``m`` fills 80 % of twice the multiprocessors. Otherwise the smallest number
       of splits with 85 % of the best occupancy.
    3. With more than one split: float32 ``splits x batch x heads x queries`` of log-sum-exp and the same times the head
       dimension rounded to 32 (64 above 128) of output.

    The log-sum-exp, the random state and the padded head dimension are outputs, or visible to a trace: the padding to
    a multiple of 8 is done above the operator.

    Source: ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``set_params_splitkv`` and
    ``num_splits_heuristic``.

    Ignores: FlashAttention 3 and 4 when registered instead; calls with one query and grouped heads.
    """
    query, key = tensor_argument(signature, 0, "query"), tensor_argument(signature, 1, "key")
    if query is None or key is None or len(query.size) != 4:
        return None
    heads_first = _heads_first(signature)
    if not heads_first and tensor_argument(signature, 3, "cum_seq_q") is not None:
        return None
    dropout = argument(signature, 3, "dropout_p", 0.0) if heads_first else argument(signature, 7, "dropout_p", 0.0)
    q, keys = _sizes(query, heads_first), _sizes(key, heads_first).queries
    rounded = round_up(q.head_dim, 32 if q.head_dim <= 128 else 64)
    key_blocks = -(-keys // (256 if q.head_dim <= 64 else 128 if q.head_dim <= 128 else 64))
    query_blocks = q.batch * q.heads * -(-q.queries // 64)

    def accumulators(splits: int) -> int:
        rows = splits * q.batch * q.heads * q.queries
        return blocks(4 * rows, 4 * rows * rounded) if splits > 1 else 0

    if dropout:
        return exactly(0, "flash attention with dropout does not split the keys")
    if architecture.multiprocessors is None:
        most = max(1, min(_MOST_SPLITS, key_blocks))
        return between(0, accumulators(most), "split-key accumulators, if there are multiprocessors to spare")
    splits = _splits(query_blocks, 2 * architecture.multiprocessors, key_blocks)
    return exactly(accumulators(splits), f"float32 accumulators of {splits} split(s) of the keys")


def _splits(query_blocks: int, slots: int, key_blocks: int) -> int:
    if query_blocks >= 0.8 * slots:
        return 1
    most = min(_MOST_SPLITS, slots, key_blocks)
    eligible = [n for n in range(1, most + 1) if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]
    waves = {splits: query_blocks * splits / slots for splits in eligible}
    occupancy = {splits: wave / math.ceil(wave) for splits, wave in waves.items()}
    best = max(occupancy.values(), default=0.0)
    return next((splits for splits in eligible if occupancy[splits] >= 0.85 * best), 1)


def flash_backward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Accumulators of the flash-attention backward.

    1. ``rows = batch x round_up(queries, 128)``; for sequences of different lengths ``total queries + 128 x batch``.
    2. float32 ``dq_accum``: rows x heads x head dimension rounded to 32 (64 above 128). Deterministic algorithms keep
       ``ceil(multiprocessors / (batch x heads))`` copies.
    3. float32 ``softmax_d``: rows x heads.
    4. With fewer key heads than query heads: ``dk`` and ``dv`` for every query head, in the dtype of the query.
    5. Copies of the gradient and of the output if they are not contiguous as (batch, queries, heads, head dimension).

    Source: ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd`` and ``mha_varlen_bwd``;
    ``attention_backward.cu``, ``_flash_attention_backward``.

    Ignores: FlashAttention 3 and 4 when registered instead.
    """
    tensors = [tensor_argument(signature, index, "") for index in range(5)]
    grad, query, key, _, out = tensors
    if grad is None or query is None or key is None or out is None:
        return None
    lengths = tensor_argument(signature, 6, "cum_seq_q")
    if lengths is not None and len(query.size) == 3:
        total, heads, head_dim = query.size
        batch, key_rows, key_heads = lengths.size[0] - 1, key.size[0], key.size[1]
        rows, order = total + 128 * batch, None
    elif len(query.size) == 4:
        heads_first = _heads_first(signature)
        batch, heads, queries, head_dim = _sizes(query, heads_first)
        keys = _sizes(key, heads_first)
        rows, key_rows, key_heads = batch * round_up(queries, 128), batch * keys.queries, keys.heads
        order = _HEADS_FIRST if heads_first else None
    else:
        return None
    rounded = round_up(head_dim, 32 if head_dim <= 128 else 64)
    copies = [tensor_bytes(tensor) for tensor in (grad, out) if not is_contiguous(tensor, order)]
    expanded = [key_rows * heads * head_dim * 2] * 2 if key_heads != heads else []

    def total_bytes(splits: int) -> int:
        return blocks(4 * rows * heads, 4 * splits * rows * heads * rounded, *copies, *expanded)

    reason = "float32 dq_accum and softmax_d, dk and dv of every query head if grouped, copies that are not contiguous"
    if not architecture.deterministic_algorithms:
        return exactly(total_bytes(1), reason)
    if architecture.multiprocessors is None:
        return between(total_bytes(1), total_bytes(-(-512 // (batch * heads))), reason + "; deterministic copies")
    return exactly(total_bytes(-(-architecture.multiprocessors // (batch * heads))), reason + "; deterministic copies")


def efficient_forward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Output accumulator of the memory-efficient forward, which only half types with large heads need.

    float32 ``batch x queries x heads x value dimension`` if the larger head dimension exceeds 128, where the kernel can
    no longer keep its output in registers; nothing for float32, which accumulates in the output itself.

    Source: ``mem_eff_attention/kernel_forward.h``, ``kNeedsOutputAccumulatorBuffer``; ``attention.cu``,
    ``_efficient_attention_forward``.

    Ignores: batches of more than 65,535, which are cut into chunks.
    """
    query, value = tensor_argument(signature, 0, "query"), tensor_argument(signature, 2, "value")
    if query is None or value is None or len(query.size) != 4:
        return None
    if query.dtype not in HALF_DTYPES or max(query.size[3], value.size[3]) <= 128:
        return exactly(0, "the kernel keeps its output in registers or in place")
    rows = math.prod(query.size[:3])
    return exactly(blocks(4 * rows * value.size[3]), "float32 accumulator of the output")


def efficient_backward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Row sums and staging areas of the memory-efficient backward.

    1. ``delta``: float32 batch x heads x queries. Half types compute it in the kernel; float32 multiplies gradient and
       output first, so that the product and its sum are alive besides it (before the staging area is).
    2. The staging area of a kernel with tiles of I queries and J keys, per batch and head:
       ``ceil(queries / I) x ceil(head_dim / J)`` tiles of ``16 + 4 x I x J`` bytes for dq; for half types whose head
       dimension limit exceeds I moreover ``splits x J x round_up(dim, I)`` float32 for each of dk and dv.
    3. ``splits = min(ceil(keys / J), 200 // (batch x heads))`` and at least 1 where dk and dv are staged.
    4. A copy of the gradient if it is not contiguous as (batch, queries, heads, head dimension).
    5. The gradient of the bias is an output; its rows are padded to 16 elements.

    Heads of up to 64 have one tile size (64 x 64) from compute capability 8.0 on: exact. Larger ones take the first of
    a list of kernels that fits into shared memory: an interval over the list.

    Source: ``mem_eff_attention/kernel_backward.h``, ``Params::workspace_size``; ``kernels/cutlassB.h``;
    ``attention_backward.cu``, ``_efficient_attention_backward``.

    Ignores: batches of more than 65,535, which are cut into chunks; compute capability below 7.0.
    """
    grad, query = tensor_argument(signature, 0, "grad_out_"), tensor_argument(signature, 1, "query")
    key, value = tensor_argument(signature, 2, "key"), tensor_argument(signature, 3, "value")
    if grad is None or query is None or key is None or value is None or len(query.size) != 4:
        return None
    heads_first = _heads_first(signature)
    q, keys, value_dim = _sizes(query, heads_first), _sizes(key, heads_first).queries, value.size[3]
    half = query.dtype in HALF_DTYPES
    rows = q.batch * q.heads * q.queries
    copy = 0 if is_contiguous(grad, _HEADS_FIRST if heads_first else None) else tensor_bytes(grad)
    product = 0 if half else blocks(4 * rows * value_dim) + (blocks(4 * rows) if q.heads > 1 and q.queries > 1 else 0)
    tiles = _backward_tiles(max(q.head_dim, value_dim), half, architecture)
    sizes = [
        blocks(copy, 4 * rows) + max(product, blocks(_staging(q, keys, value_dim, i, j, limit, half, architecture)))
        for i, j, limit in tiles
    ]
    return between(min(sizes), max(sizes), "float32 row sums, staging area of dq (and of dk, dv for large heads)")


def _backward_tiles(head_dim: int, half: bool, architecture: CudaArchitecture) -> list[tuple[int, int, int]]:
    """Tiles (queries, keys) and head dimension limit of the kernels that may be the first that fits."""
    if head_dim <= 64:
        return [(64, 64, 32 if head_dim <= 32 else 64)]
    limit = 128 if head_dim <= 128 else 65536
    if half and limit == 128 and architecture.compute_capability >= (8, 0):
        little_shared_memory = architecture.compute_capability in ((8, 6), (8, 9))
        up_to_96 = [(128, 64, 96)] if head_dim <= 96 and little_shared_memory else []
        return [*up_to_96, (128, 128, 128), (64, 64, 128)]
    return [(128, 64, limit), (64, 64, limit)]


def _staging(
    q: _Sizes, keys: int, value_dim: int, i: int, j: int, limit: int, half: bool, architecture: CudaArchitecture
) -> int:
    groups = q.batch * q.heads
    floats = -(-q.queries // i) * -(-q.head_dim // j) * (4 + i * j)
    if half and limit > i:
        splits = 1 if architecture.deterministic_algorithms else max(1, min(-(-keys // j), 200 // groups))
        floats += splits * j * (round_up(q.head_dim, i) + round_up(value_dim, i))
    return 4 * groups * round_up(floats, 4)


def cudnn_attention(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Workspace of cuDNN's attention, which only cuDNN itself knows.

    At least nothing. At most, as an assumption of what the same computation needs elsewhere: in the backward what
    flash attention accumulates (float32 dq and row sums) and moreover dk and dv of every query head in float32.

    Source: ``aten/src/ATen/native/cudnn/MHA.cpp``, ``run_cudnn_SDP_fprop`` and ``run_cudnn_SDP_bprop``: the size is
    what ``mha_graph->get_workspace_size()`` answers. The upper end is ours, not cuDNN's.
    """
    backward = "backward" in signature.op
    query = tensor_argument(signature, 1 if backward else 0, "query")
    key = tensor_argument(signature, 2 if backward else 1, "key")
    if query is None or key is None or len(query.size) != 4:
        return None
    if not backward:
        return between(0, blocks(4 * math.prod(query.size[:3])), "workspace that cuDNN asks for")
    batch, heads, queries, head_dim = query.size
    rounded = round_up(head_dim, 64)
    rows = batch * heads * (round_up(queries, 128) + 2 * round_up(key.size[2], 128))
    return between(0, blocks(4 * rows * rounded, 4 * rows), "workspace that cuDNN asks for")


RULES = (
    Rule(
        operators=("_scaled_dot_product_flash_attention", "_flash_attention_forward"),
        formula="splits x batch x heads x queries x (1 + head_dim rounded to 32, above 128 to 64) x 4 B if the keys "
        "are split to fill the multiprocessors, else 0",
        kind="exact or interval",
        source="transformers/cuda/flash_attn/flash_api.cpp set_params_splitkv, num_splits_heuristic",
        versions="read at pytorch 03b7c19d (2025); 2.2 and later",
        compute=flash_forward,
    ),
    Rule(
        operators=("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"),
        formula="batch x round_up(queries, 128) x heads x (1 + head_dim rounded) x 4 B; grouped heads: 2 x batch x "
        "keys x heads x head_dim x 2 B; copies of what is not contiguous; deterministic: dq_accum times "
        "ceil(multiprocessors / (batch x heads))",
        kind="exact",
        source="transformers/cuda/flash_attn/flash_api.cpp mha_bwd, mha_varlen_bwd",
        versions="read at pytorch 03b7c19d (2025); 2.2 and later",
        compute=flash_backward,
    ),
    Rule(
        operators=("_scaled_dot_product_efficient_attention", "_efficient_attention_forward"),
        formula="half types with head_dim above 128: batch x queries x heads x value_dim x 4 B, else 0",
        kind="exact",
        source="transformers/cuda/mem_eff_attention/kernel_forward.h kNeedsOutputAccumulatorBuffer",
        versions="header of 2.13; 2.1 and later",
        compute=efficient_forward,
    ),
    Rule(
        operators=("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"),
        formula="batch x heads x queries x 4 B of row sums, and a staging area of tiles for dq, for large heads of "
        "half types also for dk and dv; float32 multiplies gradient and output first",
        kind="exact or interval",
        source="transformers/cuda/mem_eff_attention/kernel_backward.h workspace_size; attention_backward.cu",
        versions="header of 2.13 and pytorch 00afd8f2 (2025); 2.1 and later",
        compute=efficient_backward,
    ),
    Rule(
        operators=("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
        formula="0 to batch x heads x queries x 4 B; backward: 0 to float32 dq, dk, dv of every query head",
        kind="interval",
        source="cudnn/MHA.cpp run_cudnn_SDP_fprop, run_cudnn_SDP_bprop (upper end assumed)",
        versions="2.5 and later",
        compute=cudnn_attention,
    ),
)
"""The rules of this module."""
