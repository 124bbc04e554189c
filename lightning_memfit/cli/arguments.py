"""What the command line takes, and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

from lightning_memfit import plan
from lightning_memfit._version import __version__
from lightning_memfit.cli.batch_text import SYNTAX
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.search.strategies import STRATEGIES

FITS = 0
"""Exit code: fits on every device asked for."""
DOES_NOT_FIT = 1
"""Exit code: does not fit on at least one of them."""
BAD_REQUEST = 2
"""Exit code: the request cannot be used, and the message says what to write instead."""
CANNOT_TELL = 3
"""Exit code: fits on some and cannot be told for the others, such as a step that cannot be traced."""

RUNNING = ("fit", "sweep")
"""The commands that train."""
SHELLS = ("bash", "zsh", "tcsh")
"""The shells that completion scripts are made for."""

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
  memfit plan model=byte_gpt memfit.effective_batch_size=64 hardware=a100-40gb
  memfit plan hardware=a100-80gb devices=8 model=llama_70b

"""
_PLAN_WORDS = """Predicts, without running a step and without the device, whether training fits, and with which plan.

Of your own code: --model names a function that returns a LightningModule, or (module, loss, optimizer), or a
module to go with --loss and --optimizer. It is called on torch's meta device if that works, so that a large model
takes no memory.
Of a Hydra application: write its overrides, as for its training script; model, data, trainer and memfit are made as
that makes them, and the batch is the first of its train dataloader."""


_FIT_WORDS = """Trains what a Hydra config names: model, data, trainer and memfit, as its overrides say. Hydra's own
flags work too: --cfg job prints the config, --info defaults where it comes from."""
_FIT_EXAMPLES = """examples:
  memfit fit model=byte_gpt memfit.budget=56MiB
  memfit fit memfit=report
  memfit fit --cfg job

"""
_SWEEP_WORDS = """Forecasts every combination of the values given with commas, leaves out what cannot fit, and trains
the rest, cheapest first, through the launcher that is configured; ends with one table and one picture. It is the same
as the application's own -m with hydra/sweeper=memfit, and another sweeper can be named. A sweep that was interrupted
goes on where it stopped if hydra.sweep.dir names its folder."""
_SWEEP_EXAMPLES = """examples:
  memfit sweep memfit.effective_batch_size=8,16 model.num_layers=2,6 memfit.budget=56MiB
  memfit sweep hydra/launcher=joblib hydra.launcher.n_jobs=2 model=byte_gpt,byte_lstm
  memfit sweep hydra.sweep.dir=sweeps/mine model.num_layers=2,4,6

"""
_RUNNING_CODES = f"""exit codes:
  {FITS}  trained; of a sweep, at least one job, and none failed
  {DOES_NOT_FIT}  does not fit, nothing was trained
  {BAD_REQUEST}  the request cannot be used; the message says what to write instead
  {CANNOT_TELL}  training failed, of a sweep that of one job at least
"""
_EXPLAIN_CODES = f"""exit codes:
  {FITS}  a plan was explained
  {DOES_NOT_FIT}  the run did not fit, and it was said why
  {BAD_REQUEST}  there is no such record, or it cannot be read
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Options and overrides may be mixed.

    Raises:
        SystemExit: with :data:`BAD_REQUEST` for an unknown option, and 0 after ``--help`` and ``--version``.
    """
    parser, subparsers = _parsers()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in RUNNING:
        arguments.words = rest  # overrides and Hydra's own flags, in the order in which they were written
        return arguments
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or (rest and arguments.command != "plan"):
        subparsers[arguments.command].error(f"unknown: {' '.join(unknown or rest)}")
    if arguments.command == "plan":
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def completion_script(shell: str) -> str:
    """A script that completes ``memfit`` in a shell.

    Args:
        shell: one of :data:`SHELLS`.

    Raises:
        ConfigurationError: if shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ConfigurationError(
            "Shell completion needs shtab, which is not installed. pip install 'lightning-memfit[cli]'"
        ) from error
    script: str = shtab.complete(_parsers()[0], shell=shell)
    return script


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="memfit",
        description="Will it fit, and how?",
        allow_abbrev=False,
        epilog="memfit plan --help, and --help of the others, tells more.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-memfit {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{plan,fit,sweep,explain,hardware,completion}"
    )
    planner = commands.add_parser(
        "plan",
        help="predict whether training fits on a device, and with which plan",
        description=_PLAN_WORDS,
        epilog=_PLAN_EXAMPLES + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_plan_arguments(planner)
    fit = _running_parser(commands, "fit", "train what a Hydra config names, under a plan", _FIT_WORDS, _FIT_EXAMPLES)
    sweep = _running_parser(
        commands,
        "sweep",
        "train every combination that fits; those that cannot are left out beforehand",
        _SWEEP_WORDS,
        _SWEEP_EXAMPLES,
    )
    explain = commands.add_parser(
        "explain",
        help="say why a run was planned as it was, from its plan.yaml",
        description="Prints the plan that a run left, why each lever is set as it is, everything that was passed over "
        "and why, and what was measured; or why the run does not fit.",
        epilog=_EXPLAIN_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    explain.add_argument(
        "path", metavar="PATH", help="a plan.yaml or no_fit.yaml, or the folder of the run that left it"
    )
    _add_output_arguments(explain)
    completion = commands.add_parser(
        "completion",
        help="print a script that completes this command in your shell",
        description='Prints a script for your shell. Of bash: eval "$(memfit completion bash)"',
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(json=False, debug=False)
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
    return parser, {
        "plan": planner, "fit": fit, "sweep": sweep, "explain": explain, "hardware": hardware, "completion": completion,
    }  # fmt: skip


def _running_parser(commands: Any, name: str, summary: str, words: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=words,
        epilog=examples + _RUNNING_CODES,
        usage=f"memfit {name} [--config-dir DIR] [--config-name NAME] [--json] [--debug] [key=value ...] [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config-dir", metavar="DIR", help="the folder of the config; conf if left out")
    parser.add_argument("--config-name", metavar="NAME", help="the primary config; config if left out")
    _add_output_arguments(parser)
    return parser


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
        help="local (the default, unless a config says hardware=...), cpu, cuda:0, or a GPU of the catalogue such as "
        "a100-40gb; repeat it for several",
    )
    where.add_argument("--budget", metavar="SIZE", help="what a plan may use of torch's allocator, such as 20GiB")
    where.add_argument("--headroom", metavar="SIZE", help="left free on purpose, such as 1GiB")
    where.add_argument(
        "--num-devices",
        type=int,
        metavar="N",
        help="devices of this kind in one node, over which every step is spread; 1, unless a config says devices=...",
    )
    where.add_argument(
        "--host-memory", metavar="SIZE", help="what all of them may keep on the host, such as 1TiB; unknown if left out"
    )
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
    levers.add_argument("--strategy", choices=("auto", *STRATEGIES), help="how training is spread over several devices")
    levers.add_argument("--offload", choices=("auto", *get_args(plan.Offload)), help="what DeepSpeed keeps on the host")
    levers.add_argument("--optimizer-implementation", choices=("auto", *get_args(plan.OptimizerImplementation)))


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    parser.add_argument("--debug", action="store_true", help="raise errors with their tracebacks")
