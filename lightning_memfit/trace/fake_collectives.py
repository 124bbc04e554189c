"""Exchanges with other ranks on fakes: answered at once, with nothing sent.

Adapter for ``torch.distributed._tools.fake_collectives``, whose import teaches fake tensors the operators of
``torch.distributed``. Without it an exchange on fakes would wait for ranks that do something else.
"""

from __future__ import annotations

import importlib

import torch.distributed as dist


def answer_collectives() -> None:
    """Let exchanges of fakes be answered, where a process group exists that could be asked."""
    if dist.is_available() and dist.is_initialized():
        importlib.import_module("torch.distributed._tools.fake_collectives")
