"""Slices of one of several ranks: when gradients are exchanged, and that no rank leaves the others waiting."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_memfit.apply.gradient_exchange import DdpExchange, NoExchange
from lightning_memfit.apply.sharding import set_bucket_view
from lightning_memfit.apply.slicing import BatchDivider
from lightning_memfit.errors import BatchStructureError, UnsupportedError
from lightning_memfit.observe.lone_rank import without_other_ranks
from lightning_memfit.plan import BatchSplit
from lightning_memfit.ranks import OneRank
from lightning_memfit.trace.fake_collectives import answer_collectives
from lightning_memfit.trace.fake_module import new_fake_mode
from tests.apply.test_micro_batches import cross_entropy, fit_sliced, make_module, make_samples

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
LIGHTNING = importlib.import_module("lightning.pytorch")


class TwoRanks(OneRank):
    """This rank of two that are alike: means are its own."""

    count = 2
    is_alone = False


class Noting(NoExchange):
    """Notes around which slices gradients may be exchanged, and in which something went backward."""

    def __init__(self) -> None:
        self.slices: list[bool] = []

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.slices.append(is_last)
        return nullcontext()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def texts(tokens: list[int]) -> DataLoader[Any]:
    """One batch; of each sample so many labels count."""
    samples = []
    for count in tokens:
        labels = torch.zeros(6, dtype=torch.int64)
        labels[count:] = -100
        samples.append({"x": torch.ones(6, 5, dtype=torch.float64), "labels": labels})
    return DataLoader(samples, batch_size=len(tokens))


def token_module() -> Any:
    return make_module(LIGHTNING, training_step=lambda self, batch, batch_idx: cross_entropy(self, batch))


def test_gradients_are_exchanged_in_the_last_slice_of_a_batch_alone() -> None:
    exchange = Noting()
    loader = DataLoader(make_samples(12), batch_size=6)
    slicing = {"ranks": TwoRanks(), "exchange": exchange}
    fit_sliced(LIGHTNING, make_module(LIGHTNING), loader, num_slices=3, accumulate=2, slicing=slicing)
    assert exchange.slices == [False, False, True] * 2


@pytest.mark.parametrize(
    ("tokens", "last"),
    [([2, 3, 0], [False, True, False]), ([0, 0, 0], [False, False, True])],
    ids=["the last slice has no token", "none has"],
)
def test_the_last_slice_that_weighs_something_exchanges(tokens: list[int], last: list[bool]) -> None:
    exchange, module = Noting(), token_module()
    slicing = {"ranks": TwoRanks(), "exchange": exchange, "loss_weight": "tokens"}
    fit_sliced(LIGHTNING, module, texts(tokens), num_slices=3, slicing=slicing)
    assert exchange.slices == last
    # It went backward at least once: a rank without a token exchanges gradients of 0, whatever its loss is.
    (gradients,) = module.gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert any(bool(gradient.any()) for gradient in gradients) == (tokens != [0, 0, 0])


def test_a_step_without_a_loss_is_refused_before_other_ranks_wait_for_it() -> None:
    module = make_module(LIGHTNING, training_step=lambda self, batch, batch_idx: None)
    slicing = {"ranks": TwoRanks(), "exchange": Noting()}
    with pytest.raises(UnsupportedError, match=r"returned None for a slice of batch 0 \(of 3\) on rank 0, and 2 ranks"):
        fit_sliced(LIGHTNING, module, DataLoader(make_samples(6), batch_size=6), num_slices=3, slicing=slicing)


def divided(samples: int, *, as_many: int) -> list[int]:
    split = BatchSplit(effective_batch_size=8, loader_batch_size=8, slice_sizes=(3, 3, 2))
    divider = BatchDivider(split=split, split_batch=None, loss_weight="samples")
    return [part.samples for part in divider.divide(torch.zeros(samples, 2), lambda own: max(own, as_many))]


def test_a_short_batch_is_divided_into_as_many_slices_as_those_of_other_ranks() -> None:
    assert divided(4, as_many=1) == [2, 2]
    assert divided(4, as_many=3) == [2, 1, 1]
    with pytest.raises(BatchStructureError, match=r"has 2 samples, and another rank divides its own into 3 slices"):
        divided(2, as_many=3)


class Strategy:
    """What DDP's exchange needs of Lightning's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.model.no_sync():
            yield


def test_ddp_is_told_in_the_forward_whether_it_will_exchange(one_rank: None) -> None:
    model = DistributedDataParallel(nn.Linear(10, 3))
    exchange = DdpExchange(Strategy(model))
    with exchange.around_slice(is_last=False):
        assert not model.require_backward_grad_sync
    with exchange.around_slice(is_last=True):
        assert model.require_backward_grad_sync
    with exchange.never():
        assert not model.require_backward_grad_sync and not model.require_forward_param_sync
    assert model.require_backward_grad_sync and model.require_forward_param_sync
    assert exchange.held_bytes() == 4 * (10 * 3 + 3)  # a bucket's element for each of every parameter


def test_a_wrapper_setting_is_given_back_as_it_was() -> None:
    strategy: Any = type("DDP", (), {"_ddp_kwargs": {"find_unused_parameters": True}})()
    undo = set_bucket_view(strategy, True)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    undo()
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_code_of_one_rank_that_would_wait_for_the_others_is_an_error(one_rank: None) -> None:
    tensor = torch.ones(2)
    with pytest.raises(UnsupportedError, match="exchanges tensors with other ranks"), without_other_ranks():
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    with without_other_ranks():
        assert float(tensor.sum()) == 2


def test_an_exchange_of_fakes_is_answered_without_one(one_rank: None) -> None:
    answer_collectives()
    with new_fake_mode():
        fake: Tensor = torch.ones(2)
        dist.all_reduce(fake)
        assert tuple(fake.shape) == (2,)
