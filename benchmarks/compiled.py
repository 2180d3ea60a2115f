"""Models compiled whole and block by block, by hand and with `fit` in half of the activations'
memory: CPU seconds of a step, all in turn, the peak, whether gradients are those of the same
compiled code by itself, and how many graphs were compiled once training ran.

    python benchmarks/compiled.py [--rounds 7] [--only llama|vit]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fair import one_thread
from torch import nn
from torch._dynamo.utils import counters

import gradfit as gf


@dataclass
class Shape:
    """A model, a batch, and where its blocks are."""

    name: str
    make: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]
    blocks: Callable[[nn.Module], Any]
    loss_fn: Callable[..., Any]  # with its count, which a compiled graph does not say


def llama() -> Shape:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        vocab_size=1000, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 1000, (8, 96))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return Shape(
        "Llama, 6 layers",
        lambda: LlamaForCausalLM(config),
        batch,
        lambda m: m.model.layers,
        gf.losses.causal_lm,
    )


def vit() -> Shape:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6,
        image_size=64, patch_size=8, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {"pixel_values": torch.rand(16, 3, 64, 64), "labels": torch.randint(0, 10, (16,))}
    return Shape(
        "ViT, 6 layers",
        lambda: ViTForImageClassification(config),
        batch,
        _vit_blocks,
        gf.losses.classification,
    )


def _vit_blocks(model: Any) -> Any:
    """Where they are depends on the version of transformers."""
    return [one for one in model.modules() if type(one).__name__ == "ViTLayer"]


def compiled(shape: Shape, model: nn.Module, way: str) -> Any:
    """The model compiled as a whole, block by block, or not."""
    if way == "whole":
        return torch.compile(model)
    for block in shape.blocks(model) if way == "by block" else ():
        block.compile()
    return model


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


def peak_of(model: nn.Module, optimizer: Any, batch: Any) -> tuple[int, int]:
    """The most bytes of a step, and what is there between two of them."""
    with gf.meter(model, optimizer, batch) as live:
        by_hand(model, optimizer, batch)
        optimizer.zero_grad()
    return live.peak_bytes, live.current_bytes


def half_of_activations(model: nn.Module, optimizer: Any, batch: Any) -> int:
    """Half of what the passes take beside parameters, state, gradients and the batch."""
    peak, static = peak_of(model, optimizer, batch)
    gradients = sum(p.nbytes for p in model.parameters())
    return int((peak + static + gradients) / 2)


def run(shape: Shape, rounds: int) -> None:
    torch.manual_seed(0)
    first = shape.make()
    turns: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    for way in ("not compiled", "whole", "by block"):
        hand, ours = (compiled(shape, copy.deepcopy(first), way) for _ in range(2))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (hand, ours)]
        for _ in range(2):
            by_hand(hand, optimizers[0], shape.batch)
        by_hand(ours, optimizers[1], shape.batch)
        budget = half_of_activations(ours, optimizers[1], shape.batch)
        notes[way] = ""
        turns[way] = lambda m=hand, o=optimizers[0]: by_hand(m, o, shape.batch)
        started = time.process_time()
        try:
            step = gf.fit(ours, optimizers[1], shape.loss_fn, shape.batch, memory=budget)
        except gf.BudgetInfeasible as refusal:
            notes[way] = f"fit at {budget / 2**20:.1f} MiB refused: {refusal.min_bytes / 2**20:.1f}"
            continue
        fitted = time.process_time() - started
        step(shape.batch)
        report = gf.audit(ours, shape.loss_fn, shape.batch, plan=step.plan)
        plan = str(step.plan).split("; predicted")[0]
        notes[f"{way}, fit"] = (
            f"{plan}; bits {'equal' if report.identical else 'DIFFER'}; fit {fitted:.1f} s;"
            f" budget {budget / 2**20:.1f} MiB"
        )
        turns[f"{way}, fit"] = lambda step=step: step(shape.batch)
    graphs = counters["stats"]["unique_graphs"]
    taken: dict[str, list[float]] = {name: [] for name in turns}
    peaks: dict[str, float] = {}
    for _ in range(rounds):
        for name, turn in turns.items():
            started = time.process_time()
            result = turn()
            taken[name].append(time.process_time() - started)
            if result is not None:
                peaks[name] = max(peaks.get(name, 0), result.peak_bytes / 2**20)
    plain = statistics.median(taken["not compiled"])
    more = counters["stats"]["unique_graphs"] - graphs
    print(f"{shape.name}: {more} graphs compiled while training")
    for name, seconds in taken.items():
        peak = f"; peak {peaks[name]:.1f} MiB" if name in peaks else ""
        print(
            f"  {name:<18} {1e3 * statistics.median(seconds):7.1f} ms,"
            f" {statistics.median(seconds) / plain:.2f} of not compiled{peak}"
            + (f"; {notes[name]}" if notes.get(name) else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="part of a shape's function name")
    options = parser.parse_args()
    print(f"{one_thread()}; torch {torch.__version__}; CPU seconds, medians, all in turn")
    warnings.filterwarnings("error", message=".*gradfit.*")  # dynamo names what it cannot trace
    for make in (llama, vit):
        if options.only in make.__name__:
            run(make(), options.rounds)


if __name__ == "__main__":
    main()
