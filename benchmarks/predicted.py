"""What `gf.fit` predicts against what its steps take: peak bytes and seconds, on models from
`transformers`.

`python benchmarks/predicted.py [--quick]` prints a table and writes
benchmarks/results/predicted.txt. The peak is of all tensors of the whole step, optimizer included,
read by the meter in the second step, when the optimizer has its state. Seconds are CPU seconds of
one thread: what `fit` says, and the median of the steps that follow it at once. A shared machine
changes its pace by a quarter within a minute, so every row is made several times, a fresh model
fitted and its steps run, and has the median of the errors with the lowest and the highest. The
split, peaks and seconds are those of the fit with that error, the peak's error is the worst of all.
The extra time is beside the same micro-batches by hand, with nothing recomputed, in turn with those
steps.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from fair import one_thread
from torch import nn

import gradfit as gf
from gradfit.tree import size_of_batch, split_batch

ROOT = Path(__file__).parents[1]
SHARES = (1.0, 0.7, 0.4, 0.2)
Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], torch.Tensor]]


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def image_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).logits, batch["y"])


def tokens(rows: int, length: int = 64) -> torch.Tensor:
    return torch.randint(3, 512, (rows, length))


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3, 64, 64), "y": torch.arange(rows) % 4}


def models(layers: int) -> dict[str, Callable[[], Case]]:
    words: dict[str, Any] = {
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    size: dict[str, Any] = {
        "num_hidden_layers": layers, "hidden_size": 192, "num_attention_heads": 3,
        "intermediate_size": 768,
    }  # fmt: skip

    def gpt2() -> Case:
        config = hf.GPT2Config(n_layer=layers, n_embd=192, n_head=3, n_positions=64, **words)
        return hf.GPT2LMHeadModel(config), tokens(16), language_loss

    def bert() -> Case:
        return hf.BertForMaskedLM(hf.BertConfig(**size, **words)), tokens(16), language_loss

    def llama() -> Case:
        config = hf.LlamaConfig(**size, num_key_value_heads=1, max_position_embeddings=64, **words)
        return hf.LlamaForCausalLM(config), tokens(16), language_loss

    def t5() -> Case:
        config = hf.T5Config(
            num_layers=layers // 2,
            d_model=192,
            d_kv=64,
            d_ff=768,
            num_heads=3,
            vocab_size=512,
            decoder_start_token_id=0,
        )
        return hf.T5ForConditionalGeneration(config), tokens(16), language_loss

    def vit() -> Case:
        config = hf.ViTConfig(
            **size, image_size=64, patch_size=8, hidden_dropout_prob=0.1, num_labels=4
        )
        return hf.ViTForImageClassification(config), images(16), image_loss

    def resnet() -> Case:
        config = hf.ResNetConfig(
            depths=[layers // 4] * 4,
            hidden_sizes=[32, 64, 128, 256],
            embedding_size=32,
            layer_type="basic",
            num_labels=4,
        )
        return hf.ResNetForImageClassification(config), images(16), image_loss

    return {"GPT-2": gpt2, "BERT": bert, "Llama": llama, "T5": t5, "ViT": vit, "ResNet": resnet}


def made(make: Callable[[], Case]) -> tuple[Case, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = make()
    return case, torch.optim.AdamW(case[0].train().parameters(), lr=1e-4)


def plain_peak(make: Callable[[], Case]) -> int:
    (model, batch, loss_fn), optimizer = made(make)
    with gf.meter(model, optimizer, batch) as live:
        for _ in range(2):
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak_bytes


def plain_step(case: Case, optimizer: torch.optim.Optimizer, micro_batch: int) -> None:
    """What the step is compared with: the same micro-batches by hand, with nothing recomputed."""
    model, batch, loss_fn = case
    rows = size_of_batch(batch)
    for part in split_batch(batch, micro_batch):
        (loss_fn(model, part) * (size_of_batch(part) / rows)).backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds_of(run: Callable[..., object], *args: Any) -> float:
    started = time.process_time()
    run(*args)
    return time.process_time() - started


class Round(NamedTuple):
    """One fit, and the steps that came after it."""

    plan: gf.Plan
    peak_bytes: int
    seconds: float
    plain_seconds: float

    @property
    def error(self) -> float:
        return self.plan.step_seconds / self.seconds - 1

    @property
    def peak_error(self) -> float:
        return self.plan.peak_bytes / self.peak_bytes - 1


def one_round(make: Callable[[], Case], memory: int) -> Round:
    case, optimizer = made(make)
    by_hand, other = made(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gf.ExactnessWarning)
        step = gf.fit(case[0], optimizer, case[2], case[1], memory=memory)
    step(case[1])  # makes the optimizer's state
    with gf.meter(case[0], optimizer, case[1]) as live:
        step(case[1])
    plain_step(by_hand, other, step.plan.micro_batch)
    steps, plain = [], []
    for _ in range(5):
        steps.append(seconds_of(step, case[1]))
        plain.append(seconds_of(plain_step, by_hand, other, step.plan.micro_batch))
    return Round(step.plan, live.peak_bytes, statistics.median(steps), statistics.median(plain))


def rows_of(name: str, make: Callable[[], Case], rounds: int) -> list[str]:
    plain = plain_peak(make)
    lines = []
    for share in SHARES:
        try:
            fits = [one_round(make, int(plain * share * 1.02)) for _ in range(rounds)]
        except gf.BudgetInfeasible:
            continue
        fits.sort(key=lambda one: one.error)
        usual, worst = fits[len(fits) // 2], max((one.peak_error for one in fits), key=abs)
        plan = usual.plan
        lines.append(
            f"  {name:8}{share:6.0%}{plan.micro_batch:4} ×"
            f" {plan.steps:<3}{plan.peak_bytes / 1e6:10.2f}"
            f"{usual.peak_bytes / 1e6:10.2f}{worst:+8.1%}{plan.step_seconds:10.3f}"
            f"{usual.seconds:10.3f}"
            f"{usual.error:+8.1%}{fits[0].error:+9.1%}{fits[-1].error:+8.1%}{plan.extra_fraction:+10.1%}"
            f"{usual.seconds / usual.plain_seconds - 1:+9.1%}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small models, few rounds, nothing is written"
    )
    options = parser.parse_args()
    layers, rounds = (4, 1) if options.quick else (12, 5)
    ground = one_thread()
    lines = [
        (
            f"predicted, {datetime.date.today()}, torch {torch.__version__}, gradfit"
            f" {gf.__version__}, {ground}, {layers} layers, AdamW, {rounds} fits each"
        ),
        (
            f"  {'':8}{'budget':>6}{'split':>10}{'peak MB':>10}{'measured':>10}{'':>8}"
            f"{'step s':>10}{'measured':>10}{'':>8}"
            f"{'lowest':>9}{'highest':>8}{'extra':>10}{'measured':>9}"
        ),
    ]
    print("\n".join(lines), flush=True)
    for name, make in models(layers).items():
        lines += (now := rows_of(name, make, rounds))
        print("\n".join(now), flush=True)
    if not options.quick:
        (ROOT / "benchmarks" / "results" / "predicted.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
