"""What a loader declares about its batches, and the same loader with another batch size."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_memfit.apply.handed_on import own_class


def declared_batch_size(loader: Any) -> int | None:
    """Samples per batch as the loader declares them; ``None`` if only the batches themselves tell."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def length_of(loader: Any) -> int | None:
    """Batches per epoch; ``None`` if the loader has no length. Asking leaves no note in the loader."""
    before = dict(vars(loader)) if isinstance(loader, DataLoader) else None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
    finally:
        if before is not None:  # asking notes the length in the loader, for a warning about longer datasets
            vars(loader).update(before)


def rebuild_obstacle(loader: Any) -> str | None:
    """Why the loader cannot be rebuilt with another batch size; ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if own_class(loader) is not DataLoader:
        return f"its class {own_class(loader).__name__} is a subclass of DataLoader, whose arguments are not known"
    if loader.batch_sampler is None:
        return "it has batch_size=None: its dataset yields whole batches"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its batch sampler is a {type(loader.batch_sampler).__name__}, whose batches are not known"
    return None


def rebuild(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """The same loader with ``batch_size`` samples per batch: same dataset, sampler object, workers and collation.

    Only for loaders that have no :func:`rebuild_obstacle`.
    """
    batch_sampler = loader.batch_sampler
    assert isinstance(batch_sampler, BatchSampler)
    settings: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
            "pin_memory_device",
            "in_order",
        )
    }
    if isinstance(loader.dataset, IterableDataset):
        settings.update(batch_size=batch_size, drop_last=loader.drop_last)
    elif loader.batch_size is None:
        settings.update(batch_sampler=BatchSampler(batch_sampler.sampler, batch_size, batch_sampler.drop_last))
    else:
        settings.update(batch_size=batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
    rebuilt: DataLoader[Any] = DataLoader(loader.dataset, **settings)
    for name, value in vars(loader).items():
        if not name.startswith("_") and name not in vars(rebuilt):
            setattr(rebuilt, name, value)
    return rebuilt


def describe(loader: Any) -> str:
    """One line for reports."""
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    try:
        samples = f"{len(loader.dataset):,} samples"  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        samples = "samples of unknown number"
    size = declared_batch_size(loader)
    batches = f"batches of {size}" if size else "batches as they come"
    return (
        f"{own_class(loader).__name__} over {samples} ({own_class(loader.dataset).__name__}), {batches}, "
        f"{type(loader.sampler).__name__}, {loader.num_workers} workers"
    )
