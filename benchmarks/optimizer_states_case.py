"""One optimizer's states and step in 32 and in 8 bits, or one training run, for ``benchmarks.optimizer_states``.

    python -m benchmarks.optimizer_states_case states AdamW --rounds 15
    python -m benchmarks.optimizer_states_case train --seed 0 --optimizer-states 8bit --steps 300

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memfit import MemFit
from lightning_memfit.apply.optimizer_levers import with_levers
from lightning_memfit.demo.byte_gpt import ByteGPT
from lightning_memfit.demo.stdlib_text import StdlibText

_UNTIMED_ROUNDS = 2  # the first step creates the states
_VALIDATION_BATCHES = 24


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that has an 8-bit form."""

    running_averages: int
    """That it keeps for each parameter."""
    make: Callable[[Iterable[nn.Parameter]], Optimizer]
    """With states in 32 bits."""


def _bitsandbytes(name: str, **options: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    # torch has neither Lion nor AdEMAMix: their 32-bit form is bitsandbytes' own.
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        import bitsandbytes

        optimizer: Optimizer = getattr(bitsandbytes.optim, name)(parameters, **options)
        return optimizer

    return make


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "AdamW": OptimizerKind(2, partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)),
    "Adam": OptimizerKind(2, partial(torch.optim.Adam, lr=1e-3)),
    "Lion": OptimizerKind(1, _bitsandbytes("Lion", lr=1e-4, weight_decay=0.1)),
    "SGD momentum": OptimizerKind(1, partial(torch.optim.SGD, lr=1e-2, momentum=0.9)),
    "RMSprop": OptimizerKind(1, partial(torch.optim.RMSprop, lr=1e-3)),
    "AdEMAMix": OptimizerKind(3, _bitsandbytes("AdEMAMix", lr=1e-3)),
}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What the states of some parameters really take."""

    parameters: int
    """Elements."""
    state_bytes: int
    """Running averages, with the scales of quantised ones."""

    @property
    def per_parameter(self) -> float | None:
        """Bytes per element; ``None`` if there are none."""
        return self.state_bytes / self.parameters if self.parameters else None


@dataclass(frozen=True, kw_only=True)
class StatesResult:
    """One optimizer with states in 32 and in 8 bits, on the demo's GPT."""

    optimizer: str
    """Key of ``OPTIMIZERS``."""
    quantised: StateBytes
    """Of the 8-bit form: parameters whose states are in 8 bits."""
    kept: StateBytes
    """Of the 8-bit form: embeddings and small tensors, in 32 bits."""
    table_bytes: int
    """Tables of codes, shared by all parameters."""
    full: StateBytes
    """All parameters with the states in 32 bits."""
    full_seconds: tuple[float, ...]
    """Wall-clock seconds of each step in 32 bits."""
    quantised_seconds: tuple[float, ...]
    """The same in 8 bits, in turns with it."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """One training run of the demo's GPT with AdamW."""

    seed: int
    """Of weights and order of the data."""
    optimizer_states: str
    """``"as-configured"``, 32 bits in a plain Trainer; or ``"8bit"`` by MemFit."""
    train_losses: tuple[float, ...]
    """Of each optimizer step, in nats per byte."""
    validation_loss: float
    """After the last step, in nats per byte."""
    seconds: float
    """Wall-clock seconds of the fit, planning and warm-up included."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    work = parser.add_subparsers(dest="work", required=True)
    states = work.add_parser("states", help="state bytes and seconds per step of one optimizer")
    states.add_argument("optimizer", choices=OPTIMIZERS)
    states.add_argument("--rounds", type=int, default=15, help="timed steps of each kind")
    training = work.add_parser("train", help="one training run")
    training.add_argument("--seed", type=int, required=True)
    training.add_argument("--optimizer-states", choices=("as-configured", "8bit"), required=True)
    training.add_argument("--steps", type=int, default=300, help="optimizer steps")
    chosen = parser.parse_args(arguments)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    result: Any
    if chosen.work == "states":
        result = measure_states(chosen.optimizer, ByteGPT(), rounds=chosen.rounds)
    else:
        result = train(chosen.seed, chosen.optimizer_states, steps=chosen.steps)
    print(json.dumps(dataclasses.asdict(result)))


# States and steps


def measure_states(name: str, module: nn.Module, *, rounds: int) -> StatesResult:
    """Step both forms of an optimizer in turns, on copies of a module with equal gradients; look at their states."""
    kind, twin = OPTIMIZERS[name], copy.deepcopy(module)
    full = kind.make(module.parameters())
    quantised = with_levers(kind.make(twin.parameters()), twin, optimizer_states="8bit", implementation="as-configured")
    torch.manual_seed(0)
    for parameter, other in zip(module.parameters(), twin.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter) * 1e-3
        other.grad = parameter.grad.clone()
    seconds: dict[Optimizer, list[float]] = {full: [], quantised: []}
    for round_number in range(_UNTIMED_ROUNDS + rounds):
        for optimizer in (full, quantised) if round_number % 2 else (quantised, full):
            began = time.perf_counter()
            optimizer.step()
            seconds[optimizer].append(time.perf_counter() - began)
    quantised_bytes, kept_bytes = bytes_of_states(quantised)
    _, full_bytes = bytes_of_states(full)
    return StatesResult(
        optimizer=name,
        quantised=quantised_bytes,
        kept=kept_bytes,
        table_bytes=_bytes_of(tensor for key, tensor in _state_tensors(quantised) if key.startswith("qmap")),
        full=full_bytes,
        full_seconds=tuple(seconds[full][_UNTIMED_ROUNDS:]),
        quantised_seconds=tuple(seconds[quantised][_UNTIMED_ROUNDS:]),
    )


def bytes_of_states(optimizer: Optimizer) -> tuple[StateBytes, StateBytes]:
    """The states as they lie in memory: of the parameters that have some in 8 bits, and of all others."""
    found = {True: (0, 0), False: (0, 0)}
    for parameter, state in optimizer.state.items():
        # Without step counts, and without the tables, which belong to no parameter.
        tensors = [value for key, value in _tensors_of(state) if key != "step" and not key.startswith("qmap")]
        in_8_bits = any(tensor.dtype is torch.uint8 for tensor in tensors)
        parameters, size = found[in_8_bits]
        found[in_8_bits] = (parameters + parameter.numel(), size + _bytes_of(tensors))
    quantised, kept = (StateBytes(parameters=n, state_bytes=size) for n, size in (found[True], found[False]))
    return quantised, kept


def _state_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    return (pair for state in optimizer.state.values() for pair in _tensors_of(state))


def _tensors_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((key, value) for key, value in state.items() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# Training


class _TrainLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *arguments: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def train(seed: int, optimizer_states: str, *, steps: int) -> TrainingResult:
    """Train a small GPT on the source of Python's library; in 8 bits through MemFit, else in a plain Trainer."""
    seed_everything(seed, verbose=False)
    module = ByteGPT(d_model=128, num_layers=2, num_heads=4, max_sequence_length=64)
    data = StdlibText(sequence_length=64, batch_size=16, validation_batch_size=16, max_bytes=2**21)
    losses = _TrainLosses()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            limit_val_batches=_VALIDATION_BATCHES,
            default_root_dir=directory,
            callbacks=[losses],
            plugins=_plugins(optimizer_states, data.batch_size),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        began = time.perf_counter()
        trainer.fit(module, datamodule=data)
        seconds = time.perf_counter() - began
        (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    return TrainingResult(
        seed=seed,
        optimizer_states=optimizer_states,
        train_losses=tuple(losses.losses),
        validation_loss=validated["val_loss"],
        seconds=seconds,
    )


def _plugins(optimizer_states: str, batch_size: int) -> list[Any]:
    if optimizer_states == "as-configured":
        return []
    # Nothing else is left to choose, so that the states are the only difference.
    memfit = MemFit(
        precision="32-true",
        activation_checkpointing="none",
        micro_batch_size=batch_size,
        optimizer_states="8bit",
        optimizer_implementation="as-configured",
        verbose=False,
    )
    return [memfit]


if __name__ == "__main__":
    main()
