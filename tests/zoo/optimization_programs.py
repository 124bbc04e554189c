"""Optimizers, and what people do around them: several, frozen and tied parameters, averages, clipping, closures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

from tests.zoo.loss_programs import of
from tests.zoo.models import WIDTH, Classifier, blocks
from tests.zoo.program import SGD_MOMENTUM, Program


class Adversarial(Classifier):
    """A generator and a discriminator, each with its optimizer, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        make, judge = self.optimizers()
        real, made = batch[0], self.blocks(batch[0].flip(-1))
        on_real, on_made = self.judge(real), self.judge(made.detach())
        loss = F.softplus(-on_real).mean() + F.softplus(on_made).mean()
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()
        make.zero_grad()
        self.manual_backward(F.softplus(-self.judge(made)).mean())
        make.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), **SGD_MOMENTUM), torch.optim.SGD(
            self.judge.parameters(), **SGD_MOMENTUM
        )


class ByHand(Classifier):
    """Manual optimization with one optimizer, which accumulates over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Critic(Adversarial):
    """The generator steps every third batch; parameters are toggled, gradients clipped, schedules stepped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        make, judge = self.optimizers()
        with judge.toggle_model():
            made = self.blocks(batch[0].flip(-1)).detach()
            judge.zero_grad()
            self.manual_backward(self.judge(made).mean() - self.judge(batch[0]).mean())
            self.clip_gradients(judge, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            judge.step()
        if batch_idx % 3 == 2:
            self.toggle_optimizer(make)
            make.zero_grad()
            self.manual_backward(-self.judge(self.blocks(batch[0].flip(-1))).mean())
            make.step()
            self.untoggle_optimizer(make)
            for schedule in self.lr_schedulers():
                schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.SGD(self.blocks.parameters(), **SGD_MOMENTUM),
            torch.optim.Adagrad(self.judge.parameters(), lr=0.01),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.9) for each in optimizers]


class Closures(Classifier):
    """Manual optimization in which the optimizer runs forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = super(Closures, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class NewtonianByHand(Closures):
    """Manual optimization with an optimizer that runs forward and backward several times, and keeps a history."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=6)


class SharpnessAware(torch.optim.Optimizer):
    """Takes the gradient at the worst point nearby; another optimizer, which it keeps, does the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, **SGD_MOMENTUM)

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm() + 1e-12
        moves = [p.grad * (0.05 / norm) for p in trained]
        for parameter, move in zip(trained, moves, strict=True):
            parameter.add_(move)
        closure()
        for parameter, move in zip(trained, moves, strict=True):
            parameter.sub_(move)
        self.base.step()
        return loss


class Sharp(Classifier):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters())


class Averaging(torch.optim.SGD):
    """Keeps averages of the parameters beside its states."""

    averages: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.averages is None:
            self.averages = [parameter.detach().clone() for parameter in parameters]
        for average, parameter in zip(self.averages, parameters, strict=True):
            average.lerp_(parameter.detach(), 0.1)
        return loss


class Averaged(Classifier):
    def configure_optimizers(self) -> Any:
        return Averaging(self.parameters(), **SGD_MOMENTUM)


class Compiled(Classifier):
    """One block is compiled in place, and one is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].compile(backend="aot_eager")
        self.blocks[2] = torch.compile(self.blocks[2], backend="aot_eager")


class Newtonian(Classifier):
    """An optimizer that runs forward and backward itself, several times per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=3)


class Searching(Newtonian):
    """The same with a line search."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")


class Groups(Classifier):
    """No weight decay on biases, and a learning rate per group that a schedule moves."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.SGD(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], **SGD_MOMENTUM
        )
        schedule = OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Amsgrad(Classifier):
    """An option that bitsandbytes takes and ignores."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, amsgrad=True)


class Plateau(Classifier):
    """A schedule that looks at a logged metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), **SGD_MOMENTUM)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss"},
        }


class Frozen(Classifier):
    """The first blocks get no gradients; the optimizer holds all parameters all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Tied(Classifier):
    """One matrix in two places, as embeddings and heads share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2][0].weight = self.blocks[0][0].weight


class Unused(Classifier):
    """A parameter that no step uses: it has no gradient, with and without recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Recomputing(Classifier):
    """Checkpoints itself, as many libraries' models do when asked."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


class RecomputingByHand(ByHand, Recomputing):
    """Checkpoints itself under manual optimization."""


class Unfreezing(Classifier):
    """Unfreezes its first block after the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.blocks[0].requires_grad_(self.current_epoch > 0)


class Penalised(Classifier):
    """The loss has a term of the weights, the same for every slice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 1e-3 * sum(p.square().sum() for p in self.parameters())


class Deep(Classifier):
    """More blocks than others, of which a skip goes around each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def clipping(value: float, algorithm: str) -> Any:
    def trainer() -> Mapping[str, Any]:
        return {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}

    return trainer


PROGRAMS = (
    Program(name="two optimizers by hand", make=of(Adversarial), not_sliced="manual optimization"),
    Program(name="a critic that steps more often", make=of(Critic), not_sliced="manual optimization"),
    Program(name="closures by hand", make=of(Closures), not_sliced="manual optimization"),
    Program(name="one optimizer by hand", make=of(ByHand), not_sliced="manual optimization"),
    Program(name="LBFGS by hand", make=of(NewtonianByHand), not_sliced="manual optimization", not_quantised="LBFGS"),
    # The worst point nearby is in the direction of the gradient's rounding, too.
    Program(name="sharpness-aware", make=of(Sharp), not_quantised="SharpnessAware", sliced_within=1e-4),
    Program(name="an optimizer that keeps averages", make=of(Averaged), not_quantised="Averaging"),
    # It divides by differences of gradients, which amplifies rounding: in float64 it is below 1e-9
    # (tests/apply/test_micro_batches.py). How many vectors a line search holds depends on values; at most is forecast.
    Program(name="LBFGS", make=of(Newtonian), not_quantised="LBFGS", sliced_within=1e-3),
    Program(
        name="LBFGS with a line search",
        make=of(Searching),
        not_quantised="LBFGS",
        sliced_within=1e-4,
        forecast_above=0.17,
    ),
    Program(name="parameter groups and OneCycleLR", make=of(Groups)),
    # Adam divides by the gradient's size, so that rounding moves weights whose gradient is nearly zero.
    Program(name="Adam with amsgrad", make=of(Amsgrad), not_quantised="amsgrad", sliced_within=1e-4),
    Program(name="ReduceLROnPlateau", make=of(Plateau)),
    Program(name="compiled blocks", make=of(Compiled), blocks=("blocks.1",)),
    Program(name="frozen parameters", make=of(Frozen)),
    Program(name="unfrozen later", make=of(Unfreezing)),
    Program(name="tied weights", make=of(Tied)),
    Program(name="unused parameters", make=of(Unused)),
    Program(name="a penalty of the weights", make=of(Penalised)),
    Program(name="skips around blocks", make=of(Deep)),
    Program(name="a model that checkpoints itself", make=of(Recomputing), recomputed_anyway=True),
    Program(
        name="a model that checkpoints itself by hand",
        make=of(RecomputingByHand),
        recomputed_anyway=True,
        not_sliced="manual optimization",
    ),
    Program(name="gradients clipped by norm", make=of(Classifier), trainer=clipping(0.5, "norm")),
    Program(name="gradients clipped by value", make=of(Classifier), trainer=clipping(0.01, "value")),
    Program(
        name="EMA of the weights", make=of(Classifier), trainer=lambda: {"callbacks": [EMAWeightAveraging(decay=0.9)]}
    ),
    Program(
        name="SWA",
        make=of(Classifier),
        trainer=lambda: {"callbacks": [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], "max_epochs": 3},
    ),
)
