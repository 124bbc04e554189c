"""Looks at compiled code leave the compiler alone. Run: ``pytest tests/observe/test_uncompiled.py``."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_memfit.observe.uncompiled import uncompiled


def test_nothing_is_compiled_and_no_shape_is_left_with_the_compiler() -> None:
    seen: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.append(tuple(inputs[0].shape))
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with uncompiled():
        assert torch.equal(function(torch.zeros(2, 3)), torch.ones(2, 3))
    assert seen == []
    function(torch.zeros(4, 3))
    function(torch.zeros(4, 3))
    assert seen == [(4, 3)], "one shape only, so that it is compiled for just that"
    torch._dynamo.reset()


def test_the_compilers_advice_on_global_hooks_is_not_given() -> None:
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with uncompiled(), warnings.catch_warnings():
            module(torch.zeros(1, 2))
    finally:
        handle.remove()
