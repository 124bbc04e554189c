"""Objects of both of Lightning's packages are told apart, also where the class is the user's own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.upstream import NAMESPACES, defining_module, namespace_of, upstream_module


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_package_of_a_users_own_trainer_class_is_that_of_its_base(namespace: str) -> None:
    base: Any = importlib.import_module(namespace).Trainer
    trainer = type("OwnTrainer", (base,), {"__module__": "lightning_rod.own"})(logger=False, enable_checkpointing=False)
    assert namespace_of(trainer) == namespace
    assert upstream_module(trainer, "trainer.call").__name__ == f"{namespace}.trainer.call"
    assert defining_module(trainer, "Trainer").__name__ == f"{namespace}.trainer.trainer"


def test_another_trainer_is_refused_by_its_name_with_what_works() -> None:
    with pytest.raises(UnsupportedError) as raised:
        namespace_of(object())
    assert str(raised.value) == (
        "The Trainer is a builtins.object. MemFit works with the Trainer of: lightning.pytorch, pytorch_lightning. "
        "Derive yours from one of them."
    )
