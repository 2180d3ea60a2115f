"""Loops as people write them, with `fit`, against the same loop by hand: whole epochs, interleaved
batch by batch, CPU seconds.

Each loop has batches of its own kind: padded and unpadded ones mixed, graphs of many sizes, an
object that only `split=` can cut, lists of boxes, many lengths, a step of ten milliseconds, a
recurrent net, a compiled model. The
budget is one at which the loop by hand fits, or with `--tight` half of what that takes for
activations.

    python benchmarks/loops.py [--tight] [--epochs 3] [--only …]
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fair import one_thread
from torch import nn

import gradfit as gf

Loss = Callable[[nn.Module, Any], Any]


@dataclass
class Loop:
    """A model, its batches, its loss, and how the batches are cut."""

    name: str
    make: Callable[[], nn.Module]
    batches: list[Any]
    loss_fn: Loss
    split: Any = None


# ----------------------------------------------------------------------------------------- language


def causal_lm(layers: int = 4, width: int = 128) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_head=4, n_embd=width, vocab_size=500, n_positions=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lm_batch(
    rng: random.Random, length: int, *, padded: bool, rows: int = 8
) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 500, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows) if padded else ():
        mask[row, rng.randint(length // 2, length - 1) :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def lm_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def padded_mixed(rng: random.Random) -> Loop:
    batches = [lm_batch(rng, length, padded=rng.random() < 0.66) for length in (32, 48, 64, 96) * 4]
    return Loop("causal LM, padded and unpadded", causal_lm, batches, lm_loss)


def many_lengths(rng: random.Random) -> Loop:
    lengths = rng.sample(range(24, 144, 4), 30)
    return Loop(
        "causal LM, 30 lengths",
        causal_lm,
        [lm_batch(rng, n, padded=True) for n in lengths],
        lm_loss,
    )


def token_budget(rng: random.Random) -> Loop:
    """Many short rows or few long ones, of 768 tokens together."""
    lengths = [rng.choice((12, 16, 24, 32, 48, 64, 96)) for _ in range(20)]
    batches = [lm_batch(rng, n, padded=False, rows=768 // n) for n in lengths]
    return Loop("causal LM, a budget of tokens", causal_lm, batches, lm_loss)


class TwoHeads(nn.Module):
    """A language model with a second head, of which this loop makes no use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = causal_lm(), nn.Linear(128, 10)

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.body(**batch)


def growing_lengths(rng: random.Random) -> Loop:
    batches = [lm_batch(rng, 16 + 4 * n, padded=False) for n in range(20)]
    return Loop("lengths that grow, and a head without use", TwoHeads, batches, lm_loss)


# ------------------------------------------------------------------------------------------- graphs


class GraphNet(nn.Module):
    """Messages along edges, three times; one number for each graph."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.message = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])
        self.update = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])
        self.out = nn.Linear(width, 1)

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, graphs: int
    ) -> torch.Tensor:
        h = self.embed(x)
        for message, update in zip(self.message, self.update, strict=True):
            sent = F.relu(message(torch.cat([h[edges[0]], h[edges[1]]], dim=1)))
            got = torch.zeros_like(h).index_add(0, edges[1], sent)
            h = h + F.relu(update(torch.cat([h, got], dim=1)))
        pooled = torch.zeros(graphs, h.size(1)).index_add(0, graph, h)
        return self.out(pooled).squeeze(1)


def graphs_of(rng: random.Random, count: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for _ in range(count):
        nodes = rng.randint(8, 60)
        edges = torch.randint(0, nodes, (2, rng.randint(2 * nodes, 6 * nodes)))
        found.append({"x": torch.rand(nodes, 16), "edges": edges, "y": torch.rand(1)})
    return found


def collate(graphs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([graph["x"].size(0) for graph in graphs])
    starts = torch.cumsum(sizes, 0) - sizes
    return {
        "x": torch.cat([graph["x"] for graph in graphs]),
        "edges": torch.cat(
            [graph["edges"] + start for graph, start in zip(graphs, starts, strict=True)], dim=1
        ),
        "graph": torch.repeat_interleave(torch.arange(len(graphs)), sizes),
        "y": torch.cat([graph["y"] for graph in graphs]),
    }


def parts_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    sizes = torch.bincount(batch["graph"]).tolist()
    owner = batch["graph"][batch["edges"][0]]
    found, start = [], 0
    for number, size in enumerate(sizes):
        edges = batch["edges"][:, owner == number] - start
        found.append(
            {
                "x": batch["x"][start : start + size],
                "edges": edges,
                "y": batch["y"][number : number + 1],
            }
        )
        start += size
    return found


def split_graphs(batch: dict[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    graphs = parts_of(batch)
    if size >= len(graphs):
        yield batch
        return
    for start in range(0, len(graphs), size):
        yield collate(graphs[start : start + size])


def graph_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    found = model(batch["x"], batch["edges"], batch["graph"], len(batch["y"]))
    return F.mse_loss(found, batch["y"], reduction="sum"), len(batch["y"])


def graphs_as_dict(rng: random.Random) -> Loop:
    batches = [collate(graphs_of(rng, 16)) for _ in range(40)]
    return Loop("40 graphs' sizes, dict and split=", GraphNet, batches, graph_loss, split_graphs)


class GraphBatch:
    """As PyTorch Geometric's `Batch`: an object with tensors as attributes, which nothing but its
    own code can cut.
    """

    def __init__(self, content: dict[str, torch.Tensor]) -> None:
        self.content = content

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "content" or name not in self.content:
            raise AttributeError(name)
        return self.content[name]


def split_objects(batch: GraphBatch, size: int) -> Iterator[GraphBatch]:
    return (GraphBatch(part) for part in split_graphs(batch.content, size))


def object_loss(model: nn.Module, batch: GraphBatch) -> tuple[torch.Tensor, int]:
    return graph_loss(model, batch.content)


def graphs_as_objects(rng: random.Random) -> Loop:
    batches = [GraphBatch(collate(graphs_of(rng, 16))) for _ in range(20)]
    return Loop(
        "an object like Geometric's Batch and split=", GraphNet, batches, object_loss, split_objects
    )


# -------------------------------------------------------------------------------------------- boxes


class Boxes(nn.Module):
    """One number for each box of an image, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64),
        )  # fmt: skip
        self.box, self.out = nn.Linear(4, 64), nn.Linear(64, 1)

    def forward(self, images: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        counts = torch.tensor([len(of_image) for of_image in boxes])
        seen = torch.repeat_interleave(self.image(images), counts, dim=0)
        return self.out(F.relu(seen + self.box(torch.cat(boxes)))).squeeze(1)


def box_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    images, boxes, targets = batch
    wanted = torch.cat(targets)
    return F.mse_loss(model(images, boxes), wanted, reduction="sum"), len(wanted)


def split_boxes(batch: Any, size: int) -> Iterator[Any]:
    images, boxes, targets = batch
    for start in range(0, len(boxes), size):
        end = start + size
        yield images[start:end], boxes[start:end], targets[start:end]


def lists_of_boxes(rng: random.Random) -> Loop:
    batches = []
    for _ in range(40):
        counts = [rng.randint(0, 7) for _ in range(16)]
        boxes, targets = [torch.rand(n, 4) for n in counts], [torch.rand(n) for n in counts]
        batches.append((torch.rand(16, 3, 32, 32), boxes, targets))
    return Loop("lists of 0 to 7 boxes and split=", Boxes, batches, box_loss, split_boxes)


# ---------------------------------------------------------------------------- short steps, compiled


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(192, 192), nn.GELU(), nn.LayerNorm(192)]
    return nn.Sequential(*layers, nn.Linear(192, 10))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def ten_milliseconds(rng: random.Random) -> Loop:
    batches = [{"x": torch.rand(64, 192), "y": torch.randint(0, 10, (64,))} for _ in range(20)]
    return Loop("a step of ten milliseconds", mlp, batches, classify)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(100, 32), nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.embed(x))[0]).transpose(1, 2)


def recurrent(rng: random.Random) -> Loop:
    tokens = [torch.randint(0, 100, (32, 25)) for _ in range(20)]
    batches = [{"x": both[:, :-1], "y": both[:, 1:]} for both in tokens]
    return Loop("a GRU", Recurrent, batches, classify)


def compiled(rng: random.Random) -> Loop:
    batches = [{"x": torch.rand(64, 192), "y": torch.randint(0, 10, (64,))} for _ in range(20)]
    return Loop("a compiled model", lambda: torch.compile(mlp()), batches, classify)


LOOPS = (
    padded_mixed, many_lengths, token_budget, growing_lengths, graphs_as_dict, graphs_as_objects,
    lists_of_boxes, ten_milliseconds, recurrent, compiled,
)  # fmt: skip

# ----------------------------------------------------------------------------------------- the race


def hand_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss, batch: Any
) -> None:
    optimizer.zero_grad()
    found = loss_fn(model, batch)
    loss = found[0] / found[1] if isinstance(found, tuple) else found
    loss.backward()
    optimizer.step()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    for batch in loop.batches:
        hand_step(model, optimizer, loop.loss_fn, batch)


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = run()
    return time.process_time() - started, result


def hand_peak(loop: Loop) -> tuple[int, int]:
    """The most bytes that an epoch by hand takes, and how many of them are not there between two
    steps.
    """
    torch.manual_seed(0)
    model = loop.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with gf.meter(
        model, optimizer, [getattr(batch, "content", batch) for batch in loop.batches]
    ) as live:
        by_hand(model, optimizer, loop)
        optimizer.zero_grad()
    return live.peak_bytes, live.peak_bytes - live.current_bytes


def run(loop: Loop, *, tight: bool, epochs: int) -> None:
    peak, passing = hand_peak(loop)
    static = peak - passing
    copies = sum(p.nbytes for p in loop.make().parameters())
    budget = int(peak - passing / 2) if tight else int(peak + 3 * copies + (4 << 20))
    torch.manual_seed(0)
    hand, ours = loop.make(), loop.make()
    ours.load_state_dict(hand.state_dict())
    hand_optimizer = torch.optim.AdamW(hand.parameters(), lr=1e-4)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-4)
    by_hand(hand, hand_optimizer, loop)  # warm, compiled
    try:
        fit_seconds, step = seconds(
            lambda: gf.fit(
                ours, optimizer, loop.loss_fn, loop.batches[0], memory=budget, split=loop.split
            )
        )
    except gf.BudgetInfeasible as refusal:
        print(
            f"{loop.name:<46} refused: at least {refusal.min_bytes / 2**20:.2f} MiB, the budget is"
            f" {budget / 2**20:.2f}",
            flush=True,
        )
        return
    gc.collect()  # of all that was imported, too: it takes as long as several steps
    ratios, slow, highest, plain = [], 0, 0, 0.0
    for _ in range(epochs):
        plain = ours_total = 0.0
        for place, batch in enumerate(loop.batches):
            taken = {}

            def mine(batch: Any = batch) -> Any:
                return step(batch)

            def theirs(batch: Any = batch) -> Any:
                return hand_step(hand, hand_optimizer, loop.loss_fn, batch)

            turns = [mine, theirs] if place % 2 else [theirs, mine]  # each goes first as often
            for turn in turns:
                taken[turn], result = seconds(turn)
                highest = highest if result is None else max(highest, result.peak_bytes)
            plain += taken[theirs]
            ours_total += taken[mine]
            slow += taken[mine] > 5 * taken[theirs]
        ratios.append(ours_total / plain)
    per_step = plain / len(loop.batches)
    print(
        f"{loop.name:<46} hand {1e3 * per_step:6.1f} ms a step; fit {fit_seconds / per_step:5.0f}"
        " steps; epochs "
        + " ".join(f"{ratio:5.2f}" for ratio in ratios)
        + f"; {slow} slow steps, {len(step.known)} plans; peak {highest / budget:.2f} of the budget"
        + f" ({budget / 2**20:.1f} MiB, {static / 2**20:.1f} static)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tight", action="store_true", help="half of the activations' bytes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a loop's function name")
    options = parser.parse_args()
    print(
        f"{one_thread()}; torch {torch.__version__}; CPU seconds as ratios to the loop by hand,"
        " epoch by epoch"
    )
    warnings.simplefilter("ignore")
    for make in LOOPS:
        if options.only in make.__name__:
            torch.manual_seed(0)
            run(make(random.Random(0)), tight=options.tight, epochs=options.epochs)


if __name__ == "__main__":
    main()
