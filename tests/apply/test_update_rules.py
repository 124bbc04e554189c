"""Update rules compared in 32 bits, and what is refused by name. Run: ``pytest tests/apply/test_update_rules.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memfit.apply.update_rules import MEASURED_DIFFERENCES, eight_bit_form, public_name, rule_obstacle

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes", exc_type=ImportError)
Make = Callable[[list[nn.Parameter]], Optimizer]
STEPS = 24


class Reference(Optimizer):
    """An optimizer written down from its paper."""

    def __init__(self, parameters: Iterable[Any], **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": 0.1, **defaults})
        self._rule = defaults["rule"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                self._rule(group, parameter, parameter.grad, state)


def lion(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    """Chen et al., arXiv:2302.06675, algorithm 2; and the variants of third-party libraries."""
    lr, weight_decay, (beta1, beta2) = group["lr"], group["weight_decay"], (0.9, 0.99)
    variant = group.get("variant")
    if variant == "maximize":
        gradient = -gradient
    if variant == "coupled":
        gradient = gradient + weight_decay * parameter
        weight_decay = 0.0
    factor = {"decoupled": lr / 1e-3, "fixed": 1.0, "corrected": lr**2 / 1e-3}.get(variant, lr)
    parameter.mul_(1 - factor * weight_decay)
    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
    update = (beta1 * momentum + (1 - beta1) * gradient).sign()
    if variant == "cautious":
        mask = (update * gradient > 0).to(gradient.dtype)
        update = update * mask / mask.mean().clamp(min=1e-3)
    parameter.sub_(update, alpha=lr)
    momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)


def ademamix(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    """Pagliardini et al., arXiv:2409.03137, algorithm 1; the schedules of section 3."""
    (beta1, beta2, beta3), alpha, step, horizon = (0.9, 0.999, 0.9999), 5.0, state["step"], group.get("horizon")
    if horizon is not None:
        alpha = min(step / horizon * alpha, alpha)
        log1, log3, done = math.log(beta1), math.log(beta3), step / horizon
        beta3 = min(math.exp(log1 * log3 / ((1 - done) * log3 + done * log1)), beta3)
    fast, slow, second = (state.setdefault(name, torch.zeros_like(parameter)) for name in ("fast", "slow", "second"))
    fast.mul_(beta1).add_(gradient, alpha=1 - beta1)
    slow.mul_(beta3).add_(gradient, alpha=1 - beta3)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second / (1 - beta2**step)).sqrt() + 1e-8
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_((fast / (1 - beta1**step) + alpha * slow) / denominator, alpha=group["lr"])


def followed(make: Make, *, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters after some steps with a falling learning rate and gradients that depend on the parameters."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 80), (33,), (5, 7, 3)]
    parameters = [nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = make(parameters)
    first = [float(group["lr"]) for group in optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            scaled = lr * (1 - 0.5 * step / STEPS)
            group["lr"] = torch.tensor(scaled) if isinstance(group["lr"], Tensor) else scaled
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator) * (
                0.1 + torch.rand(parameter.shape, generator=generator)
            )
            parameter.grad = (noise + 0.3 * parameter.detach().float()).to(dtype)
        optimizer.step()
    return [parameter.detach().double() for parameter in parameters]


def difference(original: Make, other: Make) -> float:
    """Largest distance between the results of both over the distance that the original covered."""
    ends = zip(followed(original), followed(other), followed(original, steps=0), strict=True)
    return max(((a - b).norm() / (a - start).norm()).item() for a, b, start in ends)


AdamW, Adam = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), partial(torch.optim.Adam, lr=1e-2)
SGD, RMSprop = partial(torch.optim.SGD, lr=1e-2, momentum=0.9), partial(torch.optim.RMSprop, lr=1e-2)
OurAdamW, OurAdam = partial(bnb.optim.AdamW, lr=1e-2, weight_decay=0.1), partial(bnb.optim.Adam, lr=1e-2)
OurSGD, OurRMSprop = partial(bnb.optim.SGD, lr=1e-2, momentum=0.9), partial(bnb.optim.RMSprop, lr=1e-2)
OurLion = partial(bnb.optim.Lion, lr=1e-3, weight_decay=0.1)
OurAdEMAMix = partial(bnb.optim.AdEMAMix, lr=1e-2, weight_decay=0.1)
Lion, AdEMAMix = partial(Reference, rule=lion), partial(Reference, rule=ademamix, lr=1e-2)

SAME: dict[str, tuple[Make, Make]] = {
    "AdamW": (AdamW, OurAdamW),
    "AdamW, large eps and short memory": (
        partial(AdamW, eps=1e-2, betas=(0.5, 0.7)),
        partial(OurAdamW, eps=1e-2, betas=(0.5, 0.7)),
    ),
    "AdamW, the learning rate a tensor": (
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), weight_decay=0.1),
        lambda p: bnb.optim.AdamW(p, lr=torch.tensor(1e-2), weight_decay=0.1),
    ),
    "Adam": (partial(Adam, eps=1e-3), partial(OurAdam, eps=1e-3)),
    "Adam, weight decay decoupled": (partial(Adam, weight_decay=0.1, decoupled_weight_decay=True), OurAdamW),
    "SGD": (partial(SGD, weight_decay=0.1), partial(OurSGD, weight_decay=0.1)),
    "RMSprop": (
        partial(RMSprop, weight_decay=0.1, alpha=0.9, eps=1e-2),
        partial(OurRMSprop, weight_decay=0.1, alpha=0.9, eps=1e-2),
    ),
    "Lion": (Lion, OurLion),
    "AdEMAMix": (AdEMAMix, OurAdEMAMix),
    "AdEMAMix, scheduled": (
        partial(AdEMAMix, horizon=15),
        partial(OurAdEMAMix, t_alpha=15, t_beta3=15),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_rule_of_bitsandbytes_is_the_same(name: str) -> None:
    assert difference(*SAME[name]) < 3e-6


DIFFERENT: dict[str, tuple[Make, Make]] = {
    "Adam weight_decay=0.1": (partial(Adam, weight_decay=0.1), partial(OurAdam, weight_decay=0.1)),
    "Adam amsgrad": (partial(Adam, amsgrad=True, betas=(0.8, 0.9)), partial(OurAdam, amsgrad=True, betas=(0.8, 0.9))),
    "Adam maximize": (partial(Adam, maximize=True), OurAdam),
    "SGD nesterov": (partial(SGD, nesterov=True), partial(OurSGD, nesterov=True)),
    "SGD dampening=0.1": (partial(SGD, dampening=0.1), partial(OurSGD, dampening=0.1)),
    "RMSprop momentum=0.9": (partial(RMSprop, momentum=0.9), partial(OurRMSprop, momentum=0.9)),
    "RMSprop centered": (partial(RMSprop, centered=True), OurRMSprop),
    "timm caution": (partial(Lion, variant="cautious"), OurLion),
    "timm corrected_weight_decay": (partial(Lion, variant="corrected"), OurLion),
    "lion_pytorch decoupled_weight_decay": (partial(Lion, variant="decoupled"), OurLion),
    "pytorch_optimizer weight_decouple=False": (partial(Lion, variant="coupled"), OurLion),
    "pytorch_optimizer fixed_decay": (partial(Lion, variant="fixed"), OurLion),
}


@pytest.mark.parametrize("name", MEASURED_DIFFERENCES)
def test_what_is_said_about_a_difference_is_what_it_measures(name: str) -> None:
    assert difference(*DIFFERENT[name]) == pytest.approx(MEASURED_DIFFERENCES[name], rel=0.1)


def test_the_comparison_finds_a_wrong_rule() -> None:
    assert difference(AdamW, partial(OurAdamW, eps=1e-3)) > 1e-3


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64))]


FORMS: dict[str, tuple[Make, str]] = {
    "AdamW": (AdamW, "AdamW8bit"),
    "Adam": (Adam, "Adam8bit"),
    "SGD": (SGD, "SGD8bit"),
    "RMSprop": (RMSprop, "RMSprop8bit"),
    **{
        f"bitsandbytes {source}": (partial(getattr(bnb.optim, source), lr=1e-3), form)
        for source, form in {
            "AdamW": "AdamW8bit",
            "AdamW32bit": "AdamW8bit",
            "Adam": "Adam8bit",
            "PagedAdamW32bit": "AdamW8bit",
            "Lion": "Lion8bit",
            "Lion32bit": "Lion8bit",
            "RMSprop32bit": "RMSprop8bit",
            "AdEMAMix": "AdEMAMix8bit",
        }.items()
    },
    "bitsandbytes SGD32bit": (partial(bnb.optim.SGD32bit, lr=1e-3, momentum=0.5), "SGD8bit"),
    "bitsandbytes Adam, which decouples weight decay as its 8-bit form does": (
        partial(bnb.optim.Adam, weight_decay=0.1),
        "Adam8bit",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_known_optimizers_have_a_form(name: str) -> None:
    make, class_name = FORMS[name]
    optimizer = make(parameters())
    form = eight_bit_form(optimizer)
    assert form is not None and form.class_name == class_name
    assert rule_obstacle(optimizer) is None


REFUSED: dict[str, tuple[Make, str]] = {
    "Adam with weight decay": (
        partial(Adam, weight_decay=0.1),
        "torch.optim.Adam with weight_decay=0.1 cannot be quantised: bitsandbytes decouples weight decay from the "
        "gradient (measured: 15 % off after 24 steps)",
    ),
    "AdamW whose weight decay is coupled in a group": (
        lambda p: AdamW([{"params": p, "decoupled_weight_decay": False, "weight_decay": 0.2}]),
        "torch.optim.AdamW with weight_decay=0.2 cannot be quantised: bitsandbytes decouples weight decay",
    ),
    "amsgrad": (
        partial(AdamW, amsgrad=True),
        "with amsgrad=True cannot be quantised: bitsandbytes ignores it (measured: 7.9 %",
    ),
    "maximize": (
        partial(SGD, maximize=True),
        "torch.optim.SGD with maximize=True cannot be quantised: bitsandbytes only minimises",
    ),
    "nesterov": (
        partial(SGD, nesterov=True),
        "nesterov=True cannot be quantised: bitsandbytes ignores it (measured: 4.5 %",
    ),
    "dampening": (
        partial(SGD, dampening=0.1),
        "dampening=0.1 cannot be quantised: bitsandbytes ignores it (measured: 9.3 %",
    ),
    "SGD without momentum": (
        partial(torch.optim.SGD, lr=1),
        "momentum=0 cannot be quantised: without momentum there are no states",
    ),
    "RMSprop with momentum": (
        partial(RMSprop, momentum=0.9),
        "momentum=0.9 cannot be quantised: bitsandbytes ignores it (measured: 79 %",
    ),
    "RMSprop centered": (
        partial(RMSprop, centered=True),
        "centered=True cannot be quantised: bitsandbytes has no such form (measured: 1.7 %",
    ),
    "RMSprop without memory": (partial(RMSprop, alpha=0), "alpha=0 cannot be quantised: bitsandbytes refuses it"),
    "differentiable": (
        partial(AdamW, differentiable=True),
        "differentiable=True cannot be quantised: bitsandbytes' step cannot be",
    ),
    "capturable": (
        partial(AdamW, capturable=True),
        "capturable=True cannot be quantised: bitsandbytes counts its steps outside",
    ),
    "a tensor for betas": (
        partial(AdamW, betas=(torch.tensor(0.9), torch.tensor(0.99))),
        "with a tensor for betas cannot be quantised: bitsandbytes takes numbers",
    ),
    "one group of two": (
        lambda p: SGD([{"params": p[:1]}, {"params": p[1:], "nesterov": True}]),
        "torch.optim.SGD with nesterov=True in group 1 cannot be quantised",
    ),
    "an unknown optimizer": (
        torch.optim.Adagrad,
        "torch.optim.Adagrad cannot be quantised: no 8-bit form is known to follow its update rule",
    ),
    "8-bit states": (bnb.optim.AdamW8bit, "bitsandbytes.optim.AdamW8bit has 8-bit states already"),
    "8-bit states by option": (
        partial(bnb.optim.Lion, optim_bits=8),
        "bitsandbytes.optim.Lion has 8-bit states already",
    ),
    "LAMB": (
        bnb.optim.LAMB,
        "bitsandbytes.optim.LAMB cannot be quantised: bitsandbytes' 8-bit step leaves out the norm",
    ),
    "a broken form": (
        bnb.optim.AdEMAMix32bit,
        "AdEMAMix32bit cannot be quantised: its states hold one of the two momenta",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_bitsandbytes_would_do_otherwise_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    assert words in (rule_obstacle(make(parameters())) or "no obstacle")


def test_lamb_in_8_bits_really_leaves_out_the_norm() -> None:
    # 8-bit LAMB moves as 8-bit Adam does, to the bit; in 32 bits the two differ.
    def end(make: Make) -> Tensor:
        (parameter,) = weights = [nn.Parameter(torch.linspace(-1, 1, 4096))]
        optimizer = make(weights)
        for _ in range(3):
            parameter.grad = parameter.detach().clone()
            optimizer.step()
        return parameter.detach()

    assert torch.equal(end(partial(bnb.optim.LAMB8bit, lr=0.1)), end(partial(bnb.optim.Adam8bit, lr=0.1)))
    assert not torch.allclose(end(partial(bnb.optim.LAMB, lr=0.1)), end(partial(bnb.optim.Adam, lr=0.1)), atol=0.01)


def test_the_broken_form_really_fails() -> None:
    weights = parameters()
    optimizer = bnb.optim.AdEMAMix32bit(weights)
    weights[0].grad = torch.ones(64, 64)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        optimizer.step()


# Classes of the user


class Renamed(torch.optim.AdamW):
    """Only other defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)


class Stepping(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Extended(torch.optim.AdamW):
    def warm_up(self) -> None:
        self.param_groups[0]["lr"] = 0.0


def test_a_subclass_with_other_defaults_is_the_same_rule() -> None:
    for _ in range(2):  # the second instance finds the class wrapped in torch's profiling
        optimizer = Renamed(parameters())
        assert rule_obstacle(optimizer) is None
        assert eight_bit_form(optimizer) is not None


def test_a_subclass_with_a_step_of_its_own_is_refused() -> None:
    name = public_name(Stepping)
    assert name.endswith("test_update_rules.Stepping")
    assert rule_obstacle(Stepping(parameters())) == (
        f"{name} cannot be quantised: a step of its own would be lost, torch.optim.AdamW is what would be replaced"
    )


def test_a_subclass_with_methods_of_its_own_is_refused() -> None:
    assert "cannot be quantised: warm_up would be lost" in (rule_obstacle(Extended(parameters())) or "")


def test_a_step_exchanged_on_the_instance_is_refused() -> None:
    optimizer = AdamW(parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert "a step of its own would be lost" in (rule_obstacle(optimizer) or "")


def test_a_step_that_a_schedule_counts_is_the_same_step() -> None:
    optimizer = AdamW(parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert rule_obstacle(optimizer) is None


# Classes of third parties, known by name and options


def third_party(qualified_name: str, **options: Any) -> Optimizer:
    """An optimizer of that name with these options, as far as recognising it goes."""
    module, _, name = qualified_name.rpartition(".")
    cls = type(name, (Optimizer,), {"__module__": module, "step": lambda self, closure=None: None})
    weights, defaults = parameters(), {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
    made: Optimizer = cls(weights, defaults)
    return made


LIONS = {
    "lion_pytorch.lion_pytorch.Lion": {},
    "timm.optim.lion.Lion": {
        "caution": False,
        "corrected_weight_decay": False,
        "max_lr_snapshot": 1e-3,
        "foreach": None,
        "maximize": False,
    },
    "pytorch_optimizer.optimizer.lion.Lion": {"weight_decouple": True, "fixed_decay": False, "foreach": None},
}


@pytest.mark.parametrize("name", LIONS)
def test_lions_of_third_parties_are_known_by_name(name: str) -> None:
    optimizer = third_party(name, **LIONS[name])
    assert rule_obstacle(optimizer) is None
    form = eight_bit_form(optimizer)
    assert form is not None and form.class_name == "Lion8bit"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("timm.optim.lion.Lion", {"caution": True}, "caution=True cannot be quantised"),
        ("timm.optim.lion.Lion", {"corrected_weight_decay": True}, "corrected_weight_decay=True cannot be quantised"),
        ("timm.optim.lion.Lion", {"maximize": True}, "maximize=True cannot be quantised"),
        ("pytorch_optimizer.optimizer.lion.Lion", {"weight_decouple": False}, "weight_decouple=False cannot be"),
        ("pytorch_optimizer.optimizer.lion.Lion", {"fixed_decay": True}, "fixed_decay=True cannot be quantised"),
        (
            "lion_pytorch.lion_pytorch.Lion",
            {"new_option": 2},
            "new_option=2 cannot be quantised: bitsandbytes does not",
        ),
        ("pytorch_optimizer.optimizer.ademamix.AdEMAMix", {}, "it counts steps per group"),
        ("elsewhere.Lion", {}, "elsewhere.Lion cannot be quantised: no 8-bit form is known"),
    ],
)
def test_variants_of_third_parties_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    optimizer = third_party(name, **{**LIONS.get(name, {}), **options})
    assert words in (rule_obstacle(optimizer) or "no obstacle")


def test_options_that_a_library_keeps_on_the_instance_count() -> None:
    optimizer: Any = third_party("lion_pytorch.lion_pytorch.Lion")
    optimizer.decoupled_wd = True
    assert "decoupled_wd=True cannot be quantised: bitsandbytes multiplies weight decay" in (
        rule_obstacle(optimizer) or ""
    )
