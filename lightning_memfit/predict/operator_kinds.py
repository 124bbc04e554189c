"""What kind of work an operator does, and how much: the link between a timeline and the rates of a device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from lightning_memfit.hardware.rates import UNITS, Kind
from lightning_memfit.trace.timeline import Operation


class Work(NamedTuple):
    """The work of one operator, divided into the equal steps that it takes one after the other."""

    kind: Kind | None
    """Kind of operator; ``None`` where no kernel runs: nothing is left but the call itself."""
    amount: float
    """FLOPs or bytes of one step, as ``UNITS`` says for the kind."""
    steps: int
    """Number of steps."""


_KINDS: Mapping[Kind, str] = {
    "matmul": "mm addmm mv addmv dot linear mkldnn_linear _scaled_mm addr ger",
    "batched_matmul": "bmm baddbmm addbmm",
    "attention": """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward
        _efficient_attention_forward""",
    "attention_backward": """_scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward _flash_attention_backward _efficient_attention_backward""",
    "convolution": "convolution _convolution convolution_overrideable _slow_conv2d_forward mkldnn_convolution",
    "convolution_backward": "convolution_backward convolution_backward_overrideable _slow_conv2d_backward",
    "recurrent": "mkldnn_rnn_layer _cudnn_rnn",
    "recurrent_backward": "mkldnn_rnn_layer_backward _cudnn_rnn_backward",
    "transcendental": """gelu gelu_backward tanh sigmoid silu silu_backward mish mish_backward softplus
        softplus_backward elu elu_backward exp exp2 expm1 log log2 log10 log1p log_sigmoid_forward log_sigmoid_backward
        sin cos tan erf erfc erfinv rsqrt sqrt pow logit atan2 sinh cosh asin acos atan logaddexp logcumsumexp
        binary_cross_entropy binary_cross_entropy_backward glu glu_backward hardswish hardswish_backward""",
    "copy": """clone copy contiguous cat stack select_backward slice_backward slice_scatter select_scatter repeat roll
        flip constant_pad_nd unsafe_split unsafe_split_with_sizes split_copy pixel_shuffle pixel_unshuffle
        as_strided_scatter tril triu unfold_backward im2col col2im repeat_interleave""",
    "cast": "_to_copy to",
    "fill": """zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero fill eye arange
        linspace scalar_tensor nll_loss_backward nll_loss2d_backward""",
    "reduction": """sum mean amax amin max min prod norm linalg_vector_norm var var_mean std std_mean argmax argmin any
        all cumsum cumprod count_nonzero logsumexp mse_loss sort topk""",
    "softmax": "_softmax",
    "masked_softmax": "_safe_softmax _masked_softmax",
    "softmax_backward": "_softmax_backward_data _masked_softmax_backward",
    "log_softmax": "_log_softmax",
    "log_softmax_backward": "_log_softmax_backward_data",
    "layer_norm": "native_layer_norm native_group_norm _fused_rms_norm rms_norm",
    "layer_norm_backward": "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward",
    "batch_norm": "native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm",
    "batch_norm_backward": "native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward",
    "pooling": """max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
        max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
        upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward
        upsample_bicubic2d upsample_bicubic2d_backward grid_sampler_2d grid_sampler_2d_backward""",
    "random": """bernoulli native_dropout rand rand_like randn randn_like normal uniform randint random exponential
        randperm multinomial rrelu_with_noise""",
    "gather": "embedding gather index index_select take take_along_dim _embedding_bag masked_select",
    "scatter": """embedding_dense_backward index_add index_put _index_put_impl scatter scatter_add scatter_reduce
        index_copy index_fill _embedding_bag_dense_backward masked_scatter""",
    "fused_optimizer": "_fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_foreach_non_finite_check_and_unscale",
    "quantised_optimizer": "optimizer_update_8bit_blockwise",
    "unquantised_optimizer": "optimizer_update_32bit",
}
_KIND_OF: Mapping[str, Kind] = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_NO_KERNEL = """empty empty_like new_empty empty_strided new_empty_strided empty_permuted lift_fresh nll_loss_forward
    nll_loss2d_forward transpose t set resize _unsafe_view detach alias view_as_real view_as_complex"""
_WITHOUT_KERNEL = frozenset(_NO_KERNEL.split())
_ONLY_WHAT_IS_WRITTEN = frozenset({"nll_loss_backward", "nll_loss2d_backward"})
_SCATTERS_INTO_ZEROS = frozenset({"embedding_dense_backward", "_embedding_bag_dense_backward"})
_FILLS_IN_PLACE = frozenset({"zero_", "fill_"})


def work_of(operation: Operation) -> Work:
    """Say what an operator does and how much of it.

    Matrix products, convolutions, attention and recurrent layers count FLOPs, everything else the bytes of arguments
    and results. Where an operator reads only a part of an argument (rows of an embedding), that part counts.
    """
    name = operation.op.split(".")[1] if operation.op.count(".") >= 1 else operation.op
    kind = _kind_of(name)
    if kind is None:
        return Work(None, 0.0, operation.inner_calls)
    steps = operation.inner_calls if name.startswith("mkldnn_rnn_layer") else 1
    if UNITS.get(kind) == "flops":
        if operation.flops:
            return Work(kind, operation.flops / steps, steps)
        kind = "elementwise"  # a product that the counter does not know, such as of a matrix and a vector, moves memory
    return Work(kind, _bytes_of(name, kind, operation) / steps, steps)


@functools.cache
def _kind_of(name: str) -> Kind | None:
    plain = name.removeprefix("_foreach_").rstrip("_")
    if plain in _WITHOUT_KERNEL:
        return None
    return _KIND_OF.get(plain, "elementwise")


def _bytes_of(name: str, kind: Kind, operation: Operation) -> float:
    if name in _ONLY_WHAT_IS_WRITTEN:
        return sum(output.allocated_bytes for output in operation.outputs)
    if kind == "gather":  # as much is read as is written
        return 2 * sum(output.allocated_bytes for output in operation.outputs)
    if name in _SCATTERS_INTO_ZEROS:  # rows are read and written; the zeros are told by the outputs
        return 2 * (operation.moved_bytes - sum(output.allocated_bytes for output in operation.outputs))
    if name in _FILLS_IN_PLACE:  # the tensor is an argument and the result, and is only written
        return operation.moved_bytes / 2
    return operation.moved_bytes
