"""Fakes in another floating dtype. Run: ``pytest tests/trace/test_converted_fakes.py``."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lightning_memfit.applied_in_a_trace import autocast_context
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.step_program import program_of
from lightning_memfit.trace.training_step import trace_window


def test_floating_tensors_change_their_dtype_and_others_do_not() -> None:
    fakes = fakes_in(new_fake_mode(), torch.bfloat16)
    weight = nn.Parameter(torch.zeros(3, 4))
    fake = fakes.of(weight)
    assert isinstance(fake, nn.Parameter) and fake.dtype is torch.bfloat16
    assert fake.untyped_storage().nbytes() == 24 and fakes.of(weight) is fake
    assert fakes.of(torch.zeros(3, dtype=torch.float64)).dtype is torch.bfloat16
    assert fakes.of(torch.zeros(3, dtype=torch.long)).dtype is torch.long
    already = torch.zeros(3, dtype=torch.bfloat16)
    assert fakes.of(already).untyped_storage().nbytes() == 6


def test_layout_and_shared_storages_are_kept() -> None:
    fakes = fakes_in(new_fake_mode(), torch.bfloat16)
    flat = torch.zeros(24)
    one, two = fakes.of(flat[4:16].view(3, 4).t()), fakes.of(flat)
    assert (one.shape, one.stride(), one.storage_offset()) == ((4, 3), (1, 4), 4)
    assert one.untyped_storage()._cdata == two.untyped_storage()._cdata
    assert two.untyped_storage().nbytes() == 48


def test_without_a_dtype_fakes_are_as_their_originals() -> None:
    assert fakes_in(new_fake_mode(), None).of(torch.zeros(3)).dtype is torch.float32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        self.head.weight = nn.Parameter(self.inner.weight[:4].clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)) + torch.ones(16))  # a tensor of the default dtype


def test_a_step_on_them_is_that_of_a_converted_module() -> None:
    module, batch = Normed(), torch.zeros(32, 16)
    converted = copy.deepcopy(module).to(torch.bfloat16)

    def program(m: nn.Module) -> object:
        return program_of(
            m, loss=lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW, step_context=autocast_context("bf16-true")
        )

    faked = predict_memory(trace_window(program(module), batch, floating=torch.bfloat16))  # type: ignore[arg-type]
    real = predict_memory(trace_window(program(converted), batch.bfloat16()))  # type: ignore[arg-type]
    plain = predict_memory(
        trace_window(program_of(module, loss=lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW), batch)
    )
    assert faked == real
    assert faked.by_category["parameters"] * 2 == plain.by_category["parameters"]
    assert faked.peak_allocated_bytes < 0.6 * plain.peak_allocated_bytes
    assert torch.get_default_dtype() is torch.float32
