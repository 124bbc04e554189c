"""``fully_shard`` for a model: which modules are gathered together, and which methods gather."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sharded_model import fully_shard, is_sharded
from lightning_memfit.trace.fake_ranks import fake_ranks
from lightning_memfit.trace.step_program import takes_batch_idx


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(2) as ranks:
        yield ranks


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        assert not isinstance(self.head.weight, DTensor)
        return self.head(batch).square().mean()


def sharded_names(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if is_sharded(part)]


def test_the_repeated_blocks_and_the_root_are_sharded(mesh: DeviceMesh) -> None:
    module = Net()
    keys, same = list(module.state_dict()), fully_shard(module, mesh=mesh)
    assert same is module and isinstance(module, FSDPModule)
    assert sharded_names(module) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert list(module.state_dict()) == keys


def test_groups_can_be_named_instead(mesh: DeviceMesh) -> None:
    assert sharded_names(fully_shard(Net(), mesh=mesh, groups=["blocks.1", "blocks.1.0", ""])) == [
        "", "blocks.1", "blocks.1.0",
    ]  # fmt: skip
    with pytest.raises(
        ConfigurationError, match=r"'block.1' is none of the 12 modules of Net. Close names: 'blocks.1'"
    ):
        fully_shard(Net(), mesh=mesh, groups=["block.1"])


def test_the_mesh_is_that_of_the_strategy_where_it_gave_one(mesh: DeviceMesh) -> None:
    module = Net()
    module._device_mesh = {"data_parallel": mesh}  # type: ignore[assignment]
    fully_shard(module)
    weight: Any = module.head.weight
    assert weight.device_mesh == mesh


def test_a_step_gathers_as_forward_does_and_is_what_lightning_took_it_for(mesh: DeviceMesh) -> None:
    module = fully_shard(Net(), mesh=mesh)
    step = module.training_step
    assert list(inspect.signature(step).parameters) == ["batch", "batch_idx"] and takes_batch_idx(step)
    assert is_overridden("training_step", module) and not is_overridden("validation_step", module)
    assert "training_step" in vars(module) and "validation_step" not in vars(module)
    step(torch.ones(3, 4), 0).backward()  # asserts that it sees whole parameters
    gradient: Any = module.head.weight.grad
    assert isinstance(gradient, DTensor) and gradient.to_local().shape == (1, 4)


def test_blocks_are_recomputed_after_sharding_and_gathered_no_more_often(mesh: DeviceMesh) -> None:
    calls = []
    module = fully_shard(Net(), mesh=mesh)
    module.blocks[1].register_forward_pre_hook(lambda part, args: calls.append(type(part[0].weight).__name__))
    undo = checkpoint_modules(module, ("blocks.0", "blocks.1", "blocks.2"))
    module.training_step(torch.ones(3, 4, requires_grad=True), 0).backward()
    # The hooks of a block run once: those that gather lie outside of what is recomputed.
    assert calls == ["Parameter"]
    undo()
    assert "forward" not in vars(module.blocks[0])
