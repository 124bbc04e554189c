"""Which GPU is worth renting? Forecasts for GPUs that are not here, made in a minute on a laptop.

Every number is predicted. Memory is followed operator by operator under CUDA's rules and replayed through torch's
caching allocator; docs/accuracy-cuda.md compares it with peaks that others measured. Seconds are assumed shares of the
vendor's peak rates: they rank plans, and are no promise of how long a step takes.

    python examples/rent_a_gpu.py
    python examples/rent_a_gpu.py --layers 24 --width 2048 --gpus l40s a100-80gb h100-sxm
"""

from __future__ import annotations

import argparse

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_memfit import NoFeasiblePlanError, Plan, forecast
from lightning_memfit.forecasting import make_plans
from lightning_memfit.units import format_bytes


class GPT(nn.Module):
    """A decoder-only transformer; on the meta device its weights take no memory, whatever the size."""

    def __init__(self, width: int, layers: int, sequence: int, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, sequence, vocabulary)`` of the token behind each position."""
        hidden = self.embed(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean loss over the tokens of a batch."""
    return nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def row(gpu: str, found: Plan | NoFeasiblePlanError) -> list[str]:
    """One line of the table."""
    if isinstance(found, NoFeasiblePlanError):
        short = f"does not fit: {format_bytes(found.missing_bytes)} too much"
        return [gpu, format_bytes(found.budget_bytes), format_bytes(found.best_peak_bytes), "-", short]
    seconds = found.forecast.predicted_step_seconds
    return [
        gpu,
        format_bytes(found.budget.budget_bytes),
        format_bytes(found.forecast.predicted_peak_bytes),
        "unknown" if seconds is None else f"{seconds:.3g} s",
        found.candidate.label,
    ]


def main() -> None:
    """Plan one effective batch on every GPU, and print what fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=["t4", "rtx-4090", "a100-40gb", "h100-sxm"])
    parser.add_argument("--width", type=int, default=1536, help="channels, a multiple of 64")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=64, help="samples per optimizer step; the loader has 16")
    options = parser.parse_args()

    with torch.device("meta"):
        model = GPT(options.width, options.layers, options.sequence)
        shape = (16, options.sequence)  # of the loader's batches
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("inputs", "targets")}
    parameters = sum(parameter.numel() for parameter in model.parameters())

    # One given setting: what the step needs as it is written, in float32 and undivided.
    plain = forecast(model, batch, loss=next_token_loss, optimizer=torch.optim.AdamW, device=options.gpus[0])
    # The search: for every GPU the fastest plan within what that GPU leaves, with the same effective batch.
    plans = make_plans(
        model,
        batch,
        devices=options.gpus,
        effective_batch_size=options.batch,
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
    )

    table = Table(title=f"{parameters / 1e6:,.0f} million parameters, {options.batch} samples per step", box=box.SIMPLE)
    for heading in ("GPU", "budget", "least capacity", "step", "plan"):
        table.add_column(heading, overflow="fold")
    for gpu, found in plans.items():
        table.add_row(*row(gpu, found))
    console = Console()
    console.print(table)
    undivided = format_bytes(plain.peak_allocated_bytes)
    console.print(f"As it is written, a step on {shape[0]} samples would allocate {undivided} on {options.gpus[0]}.")
    console.print(
        "budget: the GPU's memory less its context and headroom. least capacity: what torch's allocator must reserve "
        "at least. step: seconds per optimizer step at assumed shares of the vendor's peak rates; they rank, and were "
        "not measured. Evaluation is not in these plans, and before training MemFit proves a plan on the GPU itself."
    )
    notes = {note: None for found in plans.values() if isinstance(found, Plan) for note in found.notes}
    for note in notes:
        console.print(f"- {note}")


if __name__ == "__main__":
    main()
