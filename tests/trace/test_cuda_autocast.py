"""Autocast casts what it casts on CUDA. Run: ``pytest tests/trace/test_cuda_autocast.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import profile

from lightning_memfit.trace import cuda_autocast as lists
from lightning_memfit.trace.cuda_autocast import cuda_autocast

_HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
_MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": lists.LOWER_PRECISION,
    "AT_FORALL_FP32": lists.FLOAT32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": lists.FLOAT32_RESULT,
    "AT_FORALL_PROMOTE": lists.WIDEST,
}


# Lists of torch 2.11 lack what came later; what torch does not have is not overridden.
_LATER = frozenset() if torch.__version__ >= (2, 12) else frozenset({"rms_norm"})


def _without_named_dimensions(names: set[str]) -> set[str]:
    """Overloads for named dimensions, which torch 2.13 has no more."""
    return {name for name in names if "imname" not in name and "names_" not in name}


def _under_autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cuda", dtype=dtype, cache_enabled=False)


@pytest.mark.parametrize("macro", _MACROS)
def test_the_lists_are_those_of_the_installed_torch(macro: str) -> None:
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", _HEADER.read_text(), re.DOTALL)
    assert body is not None, f"torch has no {macro}: change trace/cuda_autocast.py"
    entries = re.findall(r"_\(([^()]*)\)", body.group(1))
    names = {".".join(part.strip() for part in entry.split(",")) for entry in entries}
    assert _without_named_dimensions(names) == _MACROS[macro] - _LATER


def test_every_operator_with_a_rule_on_cuda_has_one_here() -> None:
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    known = frozenset().union(*_MACROS.values(), lists.NORMS, lists.BANNED) - _LATER
    # Nothing calls cuDNN's own operators but torch, with arguments that are cast already; recurrent layers cast theirs
    # in trace/cuda_recurrent.py.
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    assert _without_named_dimensions(registered) - known <= cudnn
    assert known <= registered


def test_layer_norm_softmax_and_sums_are_float32_and_products_are_not() -> None:
    tensor = torch.ones(4, 8)
    with cuda_autocast(), _under_autocast():
        product = F.linear(tensor, torch.ones(8, 8))
        found = {
            "product": product.dtype,
            "layer_norm": F.layer_norm(product, (8,)).dtype,
            "softmax": product.softmax(-1).dtype,
            "sum": product.sum().dtype,
            "norm": product.norm().dtype,
            "norm of rows": torch.norm(product, dim=1).dtype,
            "mean": product.mean().dtype,
            "widest": torch.tensordot(product, tensor.t(), dims=1).dtype,
        }
    low, high = torch.bfloat16, torch.float32
    assert found == {
        "product": low,
        "layer_norm": high,
        "softmax": high,
        "sum": high,
        "norm": high,
        "norm of rows": high,
        "mean": low,
        "widest": high,
    }


def test_autocast_without_a_dtype_has_the_one_of_cuda() -> None:
    tensor = torch.ones(4, 8)
    with cuda_autocast():
        with torch.autocast("cuda"):
            assert F.linear(tensor, torch.ones(8, 8)).dtype is torch.float16
        with torch.autocast("cpu"):
            assert F.linear(tensor, torch.ones(8, 8)).dtype is torch.bfloat16


def test_cross_entropy_keeps_16_bits_up_to_the_logarithms_of_probabilities() -> None:
    # On the CPU cross_entropy_loss has a rule of its own; on CUDA its parts have: log_softmax is told its dtype.
    logits, targets = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    with cuda_autocast(), _under_autocast():
        assert F.cross_entropy(logits, targets).dtype is torch.float32
        assert logits.log_softmax(-1, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with (
        cuda_autocast(),
        _under_autocast(torch.float16),
        pytest.raises(RuntimeError, match="unsafe to autocast on CUDA"),
    ):
        F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))


def test_parameters_are_cast_once_as_long_as_autocast_lasts_if_its_cache_is_on() -> None:
    weight, inputs = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8)

    def casts(*, cache_enabled: bool, times: int = 1) -> int:
        with profile() as seen, cuda_autocast():
            for _ in range(times):
                with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cache_enabled):
                    F.linear(F.linear(inputs, weight), weight)
        return sum(event.count for event in seen.key_averages() if event.key == "aten::_to_copy")

    # The inputs once, and the weight for either of two products, or for both, or for both in either of two forwards.
    assert (casts(cache_enabled=False), casts(cache_enabled=True), casts(cache_enabled=True, times=2)) == (3, 2, 4)


def test_everything_is_as_before_at_the_end_also_where_something_was_raised() -> None:
    constructor, clear = torch.amp.autocast_mode.autocast.__init__, torch.clear_autocast_cache
    with pytest.raises(KeyError), cuda_autocast():
        raise KeyError
    assert torch.amp.autocast_mode.autocast.__init__ is constructor
    assert torch.clear_autocast_cache is clear
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(torch.ones(4, 8), torch.ones(8, 8))
        assert low.dtype is torch.bfloat16
        assert low.sum().dtype is torch.bfloat16  # the CPU has no rule for it
