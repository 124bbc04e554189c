"""A callback of Hydra that writes what the process is like in front of every job and after it, for tests of sweeps.

``+hydra.callbacks.probe._target_=tests.e2e.job_probe.JobProbe`` on the command line, and ``before.json`` and
``after.json`` are in the job's folder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import threading
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class JobProbe(Callback):
    """Looks at the process where a job begins and where it has ended.

    Args:
        measured: a cache of MemFit; what it knows of the device and its operators is put into the folder ``cache`` of
            each job, without plans and errors of forecasts, which one job keeps for the next on purpose.
    """

    def __init__(self, measured: str) -> None:
        self._measured = Path(measured)

    def on_job_start(self, config: DictConfig, **others: Any) -> None:
        """The job's folder is there, and its log is open."""
        self._folder = Path(config.hydra.runtime.output_dir)
        (self._folder / "cache").mkdir()
        for known in [*self._measured.glob("rates-*.json"), *self._measured.glob("operators-*.json")]:
            shutil.copy(known, self._folder / "cache")
        _write(self._folder / "before.json")

    def on_job_end(self, config: DictConfig, job_return: Any, **others: Any) -> None:
        """The job's function has returned."""
        _write(self._folder / "after.json")


def _write(path: Path) -> None:
    path.write_text(json.dumps(process_state(), indent=1, sort_keys=True), encoding="utf-8")


def process_state() -> dict[str, Any]:
    """Everything that a later job could notice, by name."""
    gc.collect()
    return {
        "random generators": _random_generators(),
        "environment": dict(os.environ),
        "working directory": str(Path.cwd()),
        "threads": sorted(f"{thread.name.split('-')[0]}, daemon {thread.daemon}" for thread in threading.enumerate()),
        "child processes": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "open files": _open_files(),
        "tensors": _tensors(),
        "warnings": sorted(repr(entry) for entry in warnings.filters),
        "signals": {
            name.name: repr(signal.getsignal(name)) for name in signal.valid_signals() if hasattr(name, "name")
        },
        "hooks of Python": [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.unraisablehook)],
        "streams": [repr(stream) for stream in (sys.stdout, sys.stderr)],
        "logging": _logging(),
        "torch": _torch(),
        "bitsandbytes": _bitsandbytes(),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _random_generators() -> dict[str, str]:
    state = np.random.get_state(legacy=True)
    return {
        "python": _digest(random.getstate()),
        "numpy": _digest((state[0], list(state[1]), *state[2:])),
        "torch": _digest(torch.get_rng_state().tolist()),
    }


def _open_files() -> list[str]:
    """What is open, without the job's own log, whose name is another one every time."""
    files = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
        if not target.endswith(".log"):
            files.append(target.split(":")[0])
    return sorted(files)


def _tensors() -> dict[str, int]:
    """Tensors that something still holds, by shape and dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asking some lazy modules of libraries for their class warns
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return dict(Counter(f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in found))


def _logging() -> dict[str, Any]:
    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in sorted(root.manager.loggerDict))]
    return {
        logger.name: [logger.level, logger.propagate, logger.disabled, [type(h).__name__ for h in logger.handlers]]
        for logger in loggers
        if logger.handlers or logger.level or logger.disabled
    }


def _torch() -> dict[str, Any]:
    modules, optimizers = (import_module(name) for name in ("torch.nn.modules.module", "torch.optim.optimizer"))
    counted = {
        f"{room.__name__}.{name}": len(hooks)
        for room in (modules, optimizers)
        for name, hooks in vars(room).items()
        if name.startswith("_global_") and hasattr(hooks, "__len__")
    }
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
        "precision of products": torch.get_float32_matmul_precision(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "flags of mkldnn": torch.backends.mkldnn.enabled,
        "global hooks": counted,
        "methods of optimizers": {
            name: [hash(method) for key, method in vars(kind).items() if key in ("step", "zero_grad", "__setstate__")]
            for name, kind in (("Optimizer", torch.optim.Optimizer), ("AdamW", torch.optim.AdamW))
        },
    }


def _bitsandbytes() -> dict[str, int] | None:
    """What the process-wide manager of bitsandbytes remembers of optimizers; ``None`` where nobody imported it."""
    if "bitsandbytes" not in sys.modules:
        return None
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    names = ("pid2config", "index2config", "module_weight_config_triple")
    return {name: len(getattr(manager, name, ())) for name in names}
