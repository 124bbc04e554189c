"""What is planned, of a Hydra application: its config is composed from a folder, as the application does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_memfit.application.composed import answering_hydra, devices_of, subject_of_config
from lightning_memfit.application.subject import Subject
from lightning_memfit.cli.hydra_app import composition_words
from lightning_memfit.config import register_configs
from lightning_memfit.errors import ConfigurationError

CONFIG_DIR, CONFIG_NAME = "conf", "config"
"""Where the primary config is looked for if nothing else is said."""
SHAPES = Path(str(resources.files("lightning_memfit.shapes")))
"""The folder of the config that comes with the package: large models by their shapes."""
_OTHERWISE = "name your own code with --model and --batch"


@contextmanager
def composed_subject(
    *,
    config_dir: str | None,
    config_name: str | None,
    overrides: Sequence[str],
    real: bool,
    effective_batch_size: int | None = None,
    num_devices: int | None = None,
) -> Iterator[Subject]:
    """Compose a config, and make what it names; see :func:`~lightning_memfit.application.composed.subject_of_config`.

    Args:
        config_dir: the folder of the config, from the current one.
        config_name: the primary config.
        overrides: as for the application itself.
        real: make the module for real, not on ``meta``.
        effective_batch_size: the option, which outweighs the config: it decides how the loader's batches are cut.
        num_devices: the option, which outweighs the config's ``devices`` and ``trainer.devices``.

    Raises:
        ConfigurationError: if Hydra is not installed, or the config cannot be composed or made.
    """
    folder, name = Path(config_dir or CONFIG_DIR).resolve(), config_name or CONFIG_NAME
    if config_dir is None and config_name is None and _is_a_known_shape(overrides, folder):
        folder = SHAPES
    words = " ".join(overrides) or f"{folder.name}/{name}"
    with (
        _composed(folder, name, overrides) as config,
        subject_of_config(
            config,
            words=words,
            source=str(folder),
            otherwise=_OTHERWISE,
            real=real,
            effective_batch_size=effective_batch_size,
            num_devices=devices_of(config) if num_devices is None else num_devices,
        ) as subject,
    ):
        yield subject


def _is_a_known_shape(overrides: Sequence[str], folder: Path) -> bool:
    """Whether a model is asked for that the folder does not have, and this package does."""
    asked = [value for name, _, value in (each.partition("=") for each in overrides) if name == "model"]
    if not asked or (folder / "model" / f"{asked[-1]}.yaml").is_file():
        return False
    return (SHAPES / "model" / f"{asked[-1]}.yaml").is_file()


@contextmanager
def _composed(folder: Path, name: str, overrides: Sequence[str]) -> Iterator[Any]:
    """The config without its ``hydra`` part, ``${hydra:...}`` answered, its output folder a temporary one."""
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
    except ImportError as error:
        raise ConfigurationError(
            "Overrides of a Hydra config need hydra-core, which is not installed. pip install 'lightning-memfit[cli]', "
            "or name your own code with --model and --batch."
        ) from error
    from omegaconf import errors

    if not folder.is_dir():
        raise ConfigurationError(
            f"There is no folder {folder} to compose a config from. Name one with --config-dir, or your own code with "
            "--model and --batch."
        )
    register_configs()
    try:
        with initialize_config_dir(str(folder), version_base="1.3", job_name="memfit"):
            config = compose(name, overrides=list(overrides), return_hydra_config=True)
            with answering_hydra(config) as composed:
                yield composed
    except (HydraException, errors.OmegaConfBaseException) as error:
        raise ConfigurationError(composition_words(error, f"{folder.name}/{name}")) from error
