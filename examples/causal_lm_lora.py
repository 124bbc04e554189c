"""LoRA (peft) on a causal language model of transformers, inside a memory budget. Nothing is downloaded.

The base model is made from a configuration, and its weights are random: this shows how the parts fit together, not what
fine-tuning can do. For a real one, put AutoModelForCausalLM.from_pretrained(...) and a tokenizer in the two places that
are marked. Needs transformers and peft.

    python examples/causal_lm_lora.py                      # about a minute on one core
    python examples/causal_lm_lora.py --budget 60MiB       # more memory: batches are neither divided nor recomputed
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memfit import MemFit
from lightning_memfit.units import format_bytes


class LoraLanguageModel(LightningModule):
    """A frozen base, adapters on its linear layers, and the loss that transformers forms by itself."""

    def __init__(self, width: int = 128, layers: int = 4, learning_rate: float = 1e-2) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=256,
            use_cache=False,
        )
        base = LlamaForCausalLM(config)  # a real run: AutoModelForCausalLM.from_pretrained(...)
        with warnings.catch_warnings():  # peft asks transformers by a name that is to go
            warnings.simplefilter("ignore", FutureWarning)
            self.model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over the tokens that are predicted: labels other than -100, behind the first of each sample."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The same of held-out lines."""
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Only adapters are trained, so that gradients and states are small: activations fill the memory here."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def lines_of_source() -> list[bytes]:
    """Lines of argparse's own source, as text that every Python has."""
    lines = Path(argparse.__file__).read_bytes().splitlines(keepends=True)
    return [line for line in lines if len(line) > 8]


def collate(lines: list[bytes]) -> dict[str, Tensor]:
    """Bytes as tokens (a real run: a tokenizer), padded to the longest line of the batch."""
    longest = max(map(len, lines))
    tokens = torch.tensor([list(line.ljust(longest, b"\0")) for line in lines])
    padding = torch.arange(longest) >= torch.tensor([[len(line)] for line in lines])
    return {"input_ids": tokens, "attention_mask": (~padding).long(), "labels": tokens.masked_fill(padding, -100)}


def main() -> None:
    """Train the adapters, and say what was chosen and what was needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="15MiB", help="bytes of torch's allocator, such as 15MiB; or auto")
    parser.add_argument("--lines", type=int, default=960, help="lines of text to train on")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", default="outputs/causal_lm_lora", help="folder of plan.yaml")
    options = parser.parse_args()
    seed_everything(1, verbose=False)

    lines = lines_of_source()
    train = DataLoader(lines[: options.lines], batch_size=16, shuffle=True, drop_last=True, collate_fn=collate)
    validation = DataLoader(lines[options.lines : options.lines + 64], batch_size=8, collate_fn=collate)
    # Slices have unequally many tokens. Weighing them by samples, the default, would be another loss than the mean over
    # the tokens of the batch; a model that shifts its labels itself, as those of transformers do, wants "next-tokens".
    memfit = MemFit(effective_batch_size=16, budget=options.budget, loss_weight="next-tokens", verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[memfit],
        default_root_dir=options.output,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LoraLanguageModel(options.width, options.layers)
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, train, validation)

    plan, measured = memfit.plan, memfit.measured
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"trained          {trained:,} of {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    print(f"plan             {plan.candidate.label}")
    print(f"planned for      {plan.planned_batch}")
    print(f"budget           {format_bytes(plan.budget.budget_bytes)}")
    print(f"predicted peak   {format_bytes(plan.forecast.predicted_peak_bytes)}")
    print(f"measured peak    {format_bytes(measured.measured_peak_allocated_bytes)}")
    print(f"validation loss  {before:.3f} to {trainer.callback_metrics['val_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
