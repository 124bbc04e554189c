"""The engine is told when a step follows, and multiplies gradients once. A stand-in for the engine; the real one trains
in ``tests/ranks``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_memfit.apply.deepspeed_engine import ZeroExchange, engine_of, let_lightning_accumulate
from lightning_memfit.apply.gradient_exchange import exchange_of
from lightning_memfit.errors import UnsupportedError


class Optimizer:
    custom_loss_scaler = False
    external_loss_scale: float | None = None

    @property
    def loss_scale(self) -> float:
        return 8.0 if self.external_loss_scale is None or not self.custom_loss_scaler else self.external_loss_scale

    def override_loss_scale(self, scale: float) -> None:
        self.custom_loss_scaler, self.external_loss_scale = True, scale


class Engine:
    def __init__(self) -> None:
        self.boundaries: list[bool | None] = []
        self.scales: list[float] = []
        self.optimizer = Optimizer()
        self.managed = True

    def managed_gradient_accumulation(self) -> bool:
        return self.managed

    stage = 2

    def zero_optimization_stage(self) -> int:
        return self.stage

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self.boundaries.append(is_boundary)

    def step(self) -> None:
        self.scales.append(self.optimizer.loss_scale)


def strategy_with(engine: Any, *, accumulates: bool = False, stage: int = 2) -> Any:
    strategy: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    loop = SimpleNamespace(_should_accumulate=lambda: accumulates)
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(fit_loop=loop))
    strategy._model, engine.stage = engine, stage
    return strategy


def test_a_step_follows_the_last_slice_of_the_last_batch_alone() -> None:
    for accumulates, expected in ((False, [False, True]), (True, [False, False])):
        engine = Engine()
        exchange = exchange_of(strategy_with(engine, accumulates=accumulates))
        for is_last in (False, True):
            with exchange.around_slice(is_last=is_last):
                pass
        assert engine.boundaries == expected


def test_after_an_error_the_engine_counts_by_itself_again() -> None:
    engine = Engine()
    with pytest.raises(KeyError), ZeroExchange(strategy_with(engine)).around_slice(is_last=False):
        raise KeyError
    assert engine.boundaries == [False, None]


def test_gradients_are_multiplied_in_one_step_by_another_loss_scale() -> None:
    # the engine divides by the scale: a factor of 2 is half of 8
    engine = Engine()
    exchange = ZeroExchange(strategy_with(engine))
    before = dict(vars(engine))
    exchange.rescale(None, 2.0)
    engine.step()
    engine.step()
    assert engine.scales == [4.0, 8.0] and vars(engine).keys() == before.keys()


def test_a_factor_whose_step_was_left_out_is_not_that_of_the_next() -> None:
    # of a window that was not stepped; then the engine divides by 8 / 4, and by its own 8 again
    engine = Engine()
    exchange = ZeroExchange(strategy_with(engine))
    before = dict(vars(engine))
    exchange.rescale(None, 2.0)
    with exchange.around_slice(is_last=True):  # whose backward multiplies by the engine's own scale
        assert engine.optimizer.loss_scale == 8.0 and not engine.optimizer.custom_loss_scaler
    exchange.rescale(None, 4.0)
    engine.step()
    engine.step()
    assert engine.scales == [2.0, 8.0] and vars(engine).keys() == before.keys()
    assert not engine.optimizer.custom_loss_scaler and engine.optimizer.external_loss_scale is None


def test_the_scale_is_put_back_where_the_step_fails() -> None:
    class Failing(Engine):
        def step(self) -> None:
            raise KeyError

    engine = Failing()
    ZeroExchange(strategy_with(engine)).rescale(None, 2.0)
    with pytest.raises(KeyError):
        engine.step()
    assert engine.optimizer.loss_scale == 8.0 and not engine.optimizer.custom_loss_scaler


def test_no_slice_is_left_out_in_any_stage() -> None:
    """One behind the last backward would tell the engine that no step follows."""
    assert all(ZeroExchange(strategy_with(Engine(), stage=stage)).in_every_slice for stage in (1, 2, 3))
    assert ZeroExchange(strategy_with(Engine())).never() is None


def test_lightning_counts_the_batches_until_it_is_taken_back() -> None:
    strategy = strategy_with(Engine())
    undo = let_lightning_accumulate(strategy)
    assert not strategy.handles_gradient_accumulation and isinstance(strategy, DeepSpeedStrategy)
    assert type(strategy).__name__ == "DeepSpeedStrategy"
    with strategy.block_backward_sync():
        pass
    undo()
    undo()
    assert type(strategy) is DeepSpeedStrategy and strategy.handles_gradient_accumulation


def test_other_names_of_lightning_or_deepspeed_are_named() -> None:
    with pytest.raises(UnsupportedError, match="has no property handles_gradient_accumulation"):
        let_lightning_accumulate(SimpleNamespace())
    engine = Engine()
    del engine.optimizer
    with pytest.raises(UnsupportedError, match=r"has no DeepSpeedEngine\.optimizer, by which MemFit tells"):
        engine_of(strategy_with(engine))
    engine = Engine()
    engine.optimizer = SimpleNamespace(loss_scale=1.0)  # type: ignore[assignment]
    with pytest.raises(
        UnsupportedError, match=r"ZeROOptimizer\.override_loss_scale, ZeROOptimizer\.custom_loss_scaler"
    ):
        engine_of(strategy_with(engine))
    engine = Engine()
    engine.managed = False
    with pytest.raises(UnsupportedError, match="managed_gradient_accumulation=false in your DeepSpeed configuration"):
        engine_of(strategy_with(engine))
