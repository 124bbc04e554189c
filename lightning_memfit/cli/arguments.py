"""What the command line takes, and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

from lightning_memfit import plan
from lightning_memfit._version import __version__
from lightning_memfit.cli.batch_text import SYNTAX

FITS = 0
"""Exit code: fits on every device asked for."""
DOES_NOT_FIT = 1
"""Exit code: does not fit on at least one of them."""
BAD_REQUEST = 2
"""Exit code: the request cannot be used, and the message says what to write instead."""
CANNOT_TELL = 3
"""Exit code: fits on some and cannot be told for the others, such as a step that cannot be traced."""

_EXIT_CODES = f"""exit codes:
  {FITS}  fits on every device asked for
  {DOES_NOT_FIT}  does not fit on at least one
  {BAD_REQUEST}  the request cannot be used; the message says what to write instead
  {CANNOT_TELL}  cannot tell for at least one, and does not fail to fit on any: the step cannot be traced, or what
     decides is not known of the device
"""
_PLAN_EXAMPLES = """examples:
  memfit plan --model my_models:gpt --batch my_models:batch --effective-batch-size 64 --device a100-40gb
  memfit plan --model my_models:gpt --batch 'inputs=4x512:int64[0..32000],targets=4x512:int64' --device t4 --device l4
  memfit plan model=byte_gpt trainer.max_steps=5 memfit.effective_batch_size=64 --device a100-40gb

"""
_PLAN_WORDS = """Predicts, without running a step and without the device, whether training fits, and with which plan.

Of your own code: --model names a function that returns a LightningModule, or (module, loss, optimizer), or a
module to go with --loss and --optimizer. It is called on torch's meta device if that works, so that a large model
takes no memory.
Of a Hydra application: write its overrides, as for its training script; model, data, trainer and memfit are made as
that makes them, and the batch is the first of its train dataloader."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Options and overrides may be mixed.

    Raises:
        SystemExit: with :data:`BAD_REQUEST` for an unknown option, and 0 after ``--help`` and ``--version``.
    """
    parser, subparsers = _parsers()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or (rest and arguments.command != "plan"):
        subparsers[arguments.command].error(f"unknown: {' '.join(unknown or rest)}")
    if arguments.command == "plan":
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="memfit", description="Will it fit, and how?", allow_abbrev=False, epilog="memfit plan --help tells more."
    )
    parser.add_argument("--version", action="version", version=f"lightning-memfit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,hardware}")
    planner = commands.add_parser(
        "plan",
        help="predict whether training fits on a device, and with which plan",
        description=_PLAN_WORDS,
        epilog=_PLAN_EXAMPLES + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_plan_arguments(planner)
    hardware = commands.add_parser(
        "hardware",
        help="describe this machine's devices, and the GPUs of the catalogue",
        description="Describes this machine's devices; with names, those; with --all, every GPU of the catalogue.",
        allow_abbrev=False,
    )
    hardware.add_argument("names", nargs="*", metavar="NAME", help="local, cpu, cuda:0, or such as a100-40gb")
    hardware.add_argument("--all", action="store_true", help="every GPU of the catalogue")
    hardware.add_argument("--sources", action="store_true", help="where each number comes from")
    _add_output_arguments(hardware)
    return parser, {"plan": planner, "hardware": hardware}


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of a Hydra config")
    what = parser.add_argument_group("what is trained, of your own code")
    what.add_argument("--model", metavar="MODULE:FUNCTION", help="makes the module; a class will do")
    what.add_argument(
        "--batch",
        metavar="MODULE:FUNCTION|SHAPES",
        help=f"makes one batch as the loader gives it (or a DataLoader); or its shapes: {SYNTAX}",
    )
    what.add_argument("--loss", metavar="MODULE:FUNCTION", help="loss(module, batch), in place of training_step")
    what.add_argument(
        "--optimizer", metavar="MODULE:FUNCTION", help="optimizer(parameters), in place of configure_optimizers"
    )
    composed = parser.add_argument_group("what is trained, of a Hydra application")
    composed.add_argument("--config-dir", metavar="DIR", help="the folder of its config; conf if left out")
    composed.add_argument("--config-name", metavar="NAME", help="the primary config; config if left out")
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="local (the default), cpu, cuda:0, or a GPU of the catalogue such as a100-40gb; repeat it for several",
    )
    where.add_argument("--budget", metavar="SIZE", help="what a plan may use of torch's allocator, such as 20GiB")
    where.add_argument("--headroom", metavar="SIZE", help="left free on purpose, such as 1GiB")
    _add_lever_arguments(parser)
    parser.add_argument("--real", action="store_true", help="make the module for real, not on torch's meta device")
    _add_output_arguments(parser)


def _add_lever_arguments(parser: argparse.ArgumentParser) -> None:
    levers = parser.add_argument_group("what is asked for; what is left out is chosen")
    levers.add_argument(
        "--effective-batch-size",
        type=int,
        metavar="N",
        help="samples per optimizer step; those of one batch if left out",
    )
    levers.add_argument("--micro-batch-size", type=int, metavar="N", help="samples of the largest slice of a batch")
    levers.add_argument("--precision", choices=("auto", *get_args(plan.Precision)))
    levers.add_argument(
        "--activation-checkpointing",
        action="append",
        metavar="auto|none|blocks|PATTERN",
        help="what is recomputed instead of saved; patterns of module names such as 'blocks.*', repeat it for several",
    )
    levers.add_argument("--optimizer-states", choices=("auto", *get_args(plan.OptimizerStates)))
    levers.add_argument("--optimizer-implementation", choices=("auto", *get_args(plan.OptimizerImplementation)))


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    parser.add_argument("--debug", action="store_true", help="raise errors with their tracebacks")
