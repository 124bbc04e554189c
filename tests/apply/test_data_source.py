"""Lightning and torch have the names that the adapters touch, and one that is missing is named."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning

from lightning_memfit.apply.loader import TrainLoader
from lightning_memfit.errors import UnsupportedError

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


@pytest.mark.parametrize("namespace", [lightning.pytorch, pytorch_lightning])
def test_lightning_has_the_names_that_the_adapter_touches(namespace: Any) -> None:
    trainer = namespace.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (trainer.fit_loop, val_loop):
        source = loop._data_source
        assert set(vars(source)) == {"instance", "name"}
        assert callable(type(source).dataloader)
        module = sys.modules[type(source).__module__]
        assert module.__name__.startswith(namespace.__name__)
        for name in ("_request_dataloader", "CombinedLoader", "_auto_add_worker_init_fn"):
            assert hasattr(module, name)
    assert val_loop._combined_loader is None
    combined = module.CombinedLoader([[1], [2]], "sequential")
    assert combined._mode == "sequential"
    assert combined.flattened == [[[1], [2]]] or combined.flattened == [[1], [2]]


def test_a_lightning_that_renamed_them_is_named() -> None:
    class Source:
        instance = None

    class Loop:
        pass

    class Trainer:
        limit_train_batches = 1.0
        fit_loop: Any = Loop()

    with pytest.raises(UnsupportedError, match="Loop has no attribute '_data_source' in this version of Lightning"):
        TrainLoader.request(Trainer())
    Trainer.fit_loop._data_source = Source()
    with pytest.raises(UnsupportedError, match=r"has no '_request_dataloader' in this version of Lightning; .* 2\.6\."):
        TrainLoader.request(Trainer())
