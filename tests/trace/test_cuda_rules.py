"""Fakes of the CPU stand for tensors on a GPU. Run: ``pytest tests/trace/test_cuda_rules.py``.

That the whole gives what fakes on ``cuda`` give is in ``test_fake_cuda.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers

from lightning_memfit.trace.cpu_rules import CpuRules
from lightning_memfit.trace.cuda_rules import CudaRules
from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.gradient_scaling import with_scaled_loss
from lightning_memfit.trace.timeline import Operation, Timeline
from lightning_memfit.trace.training_step import LossFunction, OptimizerFactory, program_of, trace_window

CUDA = CudaRules(compute_capability=(8, 0))


def _traced(
    module: nn.Module,
    batch: torch.Tensor,
    loss: LossFunction,
    *,
    optimizer: OptimizerFactory = torch.optim.SGD,
    rules: DeviceRules = CUDA,
    scaled: bool = False,
) -> Timeline:
    program = replace(program_of(module, loss=loss, optimizer=optimizer), rules=rules)
    return trace_window(with_scaled_loss(program) if scaled else program, batch, collect_signatures=False)


def _operators(timeline: Timeline) -> list[str]:
    return [event.op for event in timeline.events if isinstance(event, Operation)]


def _residents(timeline: Timeline, category: str) -> list[int]:
    return [each.allocated_bytes for each in timeline.residents if each.category == category]


def test_dropout_keeps_flags() -> None:
    # 1,000 numbers of 4 bytes and a flag of 1 byte each; on the CPU the mask has 4 bytes too.
    timeline = _traced(nn.Linear(10, 100), torch.zeros(10, 10), lambda m, x: F.dropout(m(x), 0.5).sum())
    dropout = next(e for e in timeline.events if isinstance(e, Operation) and "native_dropout.d" in e.op)
    assert [output.allocated_bytes for output in dropout.outputs] == [4000, 1000]


def test_dropout_of_nothing_and_of_everything_needs_no_mask() -> None:
    for probability in (0.0, 1.0):
        timeline = _traced(
            nn.Linear(10, 100), torch.zeros(10, 10), lambda m, x, p=probability: F.dropout(m(x), p).sum()
        )
        assert not any("native_dropout" in op for op in _operators(timeline))


@pytest.mark.parametrize(
    ("optimizer", "counters"),
    [
        (lambda parameters: torch.optim.AdamW(parameters), 0),  # on the host
        (lambda parameters: torch.optim.AdamW(parameters, foreach=False), 0),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), 2),  # on the device, one for each parameter
        (lambda parameters: torch.optim.AdamW(parameters, capturable=True), 2),
    ],
)
def test_step_counters_count_where_they_are_on_the_device(optimizer: OptimizerFactory, counters: int) -> None:
    timeline = _traced(nn.Linear(10, 100), torch.zeros(10, 10), lambda m, x: m(x).sum(), optimizer=optimizer)
    states = _residents(timeline, "optimizer_states")
    assert states.count(4) == counters
    assert len(states) == 4 + counters


def test_what_is_filled_with_a_number_counts_as_on_the_device() -> None:
    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        factors = torch.tensor(0.5, device=batch.device).expand(10, 100).contiguous()
        return (module(batch) * factors).sum()

    timeline = _traced(nn.Linear(10, 100), torch.zeros(10, 10), loss)
    made = next(e for e in timeline.events if isinstance(e, Operation) and "clone" in e.op)
    assert [output.allocated_bytes for output in made.outputs] == [4000]  # 10 x 100 x 4


def test_optimizers_take_lists_of_tensors_by_themselves() -> None:
    module, batch = nn.Linear(10, 100), torch.zeros(10, 10)
    on_gpu = _operators(_traced(module, batch, lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW))
    on_cpu = _operators(_traced(module, batch, lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW, rules=CpuRules()))
    assert any("_foreach" in op for op in on_gpu)
    assert not any("_foreach" in op for op in on_cpu)


def test_statistics_of_batch_norm_in_16_bits_have_32() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.bfloat16())

    timeline = _traced(Net(), torch.zeros(2, 8, 4, 4), lambda m, x: m(x).float().sum())
    norm = next(e for e in timeline.events if isinstance(e, Operation) and "native_batch_norm.d" in e.op)
    # 256 numbers of 2 bytes; mean and deviation of 8 channels with 4 bytes each.
    assert [output.allocated_bytes for output in norm.outputs] == [512, 32, 32]


def test_a_recurrent_layer_is_one_operator_for_all_steps() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    timeline = _traced(Net(), torch.zeros(4, 10, 16), lambda m, x: m(x).sum())
    operators = _operators(timeline)
    assert operators.count("aten._cudnn_rnn.default") == operators.count("aten._cudnn_rnn_backward.default") == 1
    forward = next(e for e in timeline.events if isinstance(e, Operation) and e.op == "aten._cudnn_rnn.default")
    # Output (4, 10, 32), last states (2, 4, 32) twice; kept: 10 steps x 4 samples x 32 x (2 layers x 5 + 1 between).
    assert [o.allocated_bytes for o in forward.outputs][:4] == [5120, 1024, 1024, 10 * 4 * 32 * 11 * 4]
    assert all(size for size in _residents(timeline, "gradients"))


def test_a_gradient_scaler_scales_the_loss_and_unscales_gradients_in_place() -> None:
    module, batch = nn.Linear(10, 100), torch.zeros(10, 10)
    plain = _traced(module, batch, lambda m, x: m(x).sum())
    scaled = _traced(module, batch, lambda m, x: m(x).sum(), scaled=True)
    more = [op for op in _operators(scaled) if op not in _operators(plain)]
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in more
    assert (
        sum(o.allocated_bytes for e in scaled.events if isinstance(e, Operation) for o in e.outputs)
        - sum(o.allocated_bytes for e in plain.events if isinstance(e, Operation) for o in e.outputs)
        < 100
    )


def test_the_scaler_does_what_torchs_own_does_to_gradients() -> None:
    # torch/amp/grad_scaler.py calls the same operator for each dtype, with the inverse scale.
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    before = [gradient.clone() for gradient in gradients]
    optimizer = torch.optim.SGD(module.parameters())
    program = with_scaled_loss(program_of(module, loss=lambda m, x: m(x).sum(), optimizer=torch.optim.SGD))
    assert program.scale_loss(torch.tensor(2.0)).item() == 2 * 65536
    program.clip_gradients(optimizer)
    for gradient, old in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient, old / 65536)


def test_everything_is_as_before_at_the_end_also_where_something_was_raised() -> None:
    devices, types = optimizers._get_foreach_kernels_supported_devices, optimizers._foreach_supported_types
    with pytest.raises(KeyError), CUDA.behaviour():
        raise KeyError
    assert optimizers._get_foreach_kernels_supported_devices is devices
    assert optimizers._foreach_supported_types is types
    tensor = torch.zeros(2, 2, 4, 8)
    assert F.scaled_dot_product_attention(tensor, tensor, tensor).shape == tensor.shape
    assert F.dropout(torch.ones(8), 0.5, training=False).sum() == 8
    assert nn.LSTM(4, 4)(torch.zeros(1, 1, 4))[0].shape == (1, 1, 4)


def test_torch_still_has_the_names_that_are_patched() -> None:
    names = (
        "_get_foreach_kernels_supported_devices",
        "_get_capturable_supported_devices",
        "_foreach_supported_types",
    )
    for name in names:
        assert hasattr(optimizers, name), f"torch.optim.optimizer has no {name}: change trace/cuda_rules.py"
