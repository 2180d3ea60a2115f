"""Tiles against what people do by hand, on a Llama with a large vocabulary: peak bytes and CPU
seconds of one pass.

Everything runs in turn, round by round, in one process: what disturbs one disturbs all. The peak is
`gf.meter`'s, the time the least CPU time of the rounds. `python benchmarks/tile.py [--tokens 1024]
[--rounds 3]`; `--long 8192 16384` for the peaks of long sequences, `--tokens 8192 --fit "450 MiB"`
for a budget that is less than one row's logits, `--tokens 2048 --fit "300 MiB" --rounds 5` for the
time of its steps beside the loop by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

import gradfit as gf

MIB = 2**20
Run = Callable[[], torch.Tensor]


def make_model(words: int, layers: int = 4, width: int = 256) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=688 * width // 256,
        num_hidden_layers=layers, num_attention_heads=8, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


@contextlib.contextmanager
def checkpointed_blocks(model: Any) -> Iterator[None]:
    layers = list(model.model.layers)
    for layer in layers:
        own = type(layer).forward.__get__(layer)
        layer.forward = lambda *args, own=own, **kwargs: checkpoint(
            own, *args, use_reentrant=False, **kwargs
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def chunked_loss(model: Any, tokens: torch.Tensor, size: int = 256) -> torch.Tensor:
    """What people write: the head and the cross-entropy in chunks, each checkpointed."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    labels = tokens[0, 1:]

    def one(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(states).float(), targets, reduction="sum")

    parts = zip(hidden.split(size), labels.split(size), strict=True)
    return sum(checkpoint(one, *part, use_reentrant=False) for part in parts) / len(labels)


def fused_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """torch's own, with its chunks (2.13)."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    return F.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden, model.lm_head.weight, tokens[0, 1:], options=LinearCrossEntropyOptions()
    )


def plain_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def by_hand(model: Any, tokens: torch.Tensor) -> dict[str, Run]:
    def within(around: Callable[[Any], Any], loss: Callable[..., torch.Tensor]) -> Run:
        def run() -> torch.Tensor:
            with around(model):
                value = loss(model, tokens)
                value.backward()
            return value.detach()

        return run

    nothing: Callable[[Any], Any] = lambda _: contextlib.nullcontext()  # noqa: E731
    return {
        "plain": within(nothing, plain_loss),
        "blocks checkpointed": within(checkpointed_blocks, plain_loss),
        "chunked cross-entropy by hand": within(nothing, chunked_loss),
        "both by hand": within(checkpointed_blocks, chunked_loss),
        "F.linear_cross_entropy by hand": within(nothing, fused_loss),
        "F.linear_cross_entropy, blocks checkpointed": within(checkpointed_blocks, fused_loss),
        "gf.tile": within(gf.tile, plain_loss),
        "gf.tile, logits alone": within(lambda model: gf.tile(model, modules=[]), plain_loss),
    }


def planned(model: Any, tokens: torch.Tensor, points: int) -> dict[str, Run]:
    """gradfit's trade-off, with tiles and without: one profile, and a plan for each memory."""
    found = gf.profile(model, plain_loss, tokens)
    runs: dict[str, Run] = {}
    for tile in (True, False):
        for plan in gf.frontier(found, points=points, tile=tile):
            name = f"gradfit{'' if tile else ', tile=False'}: {plan.peak_bytes / MIB:.0f} MiB"

            def run(plan: gf.Plan = plan) -> torch.Tensor:
                with gf.apply(model, plan):
                    loss = plain_loss(model, tokens)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss.detach()

            runs[name] = run
    return runs


def measure(model: Any, tokens: torch.Tensor, runs: dict[str, Run], rounds: int) -> None:
    peaks, seconds = {}, {name: float("inf") for name in runs}
    expected: Any = None
    for number in range(rounds + 1):
        for name, run in runs.items():
            model.zero_grad()
            gc.collect()
            if number == 0:
                with gf.meter(model, tokens) as live:
                    loss = float(run())
                peaks[name] = live.peak_bytes
                expected = loss if expected is None else expected
                assert abs(loss - expected) < 1e-4 * expected, name
                continue
            started = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - started)
    plain = next(iter(runs))
    for name in runs:
        memory, taken = peaks[name] / peaks[plain] - 1, seconds[name] / seconds[plain] - 1
        print(
            f"{name:46} {peaks[name] / MIB:7.0f} MiB {memory:+6.0%} {seconds[name]:7.2f} s"
            f" {taken:+6.0%}",
            flush=True,
        )


def long_sequences(words: int, lengths: list[int], *, layers: int, width: int, tile: bool) -> None:
    """The peak of one pass of each length: it grows with tokens × hidden states, not with tokens ×
    words.
    """
    for length in lengths:
        model = make_model(words, layers, width)
        tokens = torch.randint(0, words, (1, length), generator=torch.Generator().manual_seed(1))
        with (
            gf.tile(model, size=128) if tile else contextlib.nullcontext(),
            gf.meter(model, tokens) as live,
        ):
            plain_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        logits = length * words * 4
        shape = f"1 × {length} × {words}, {layers} layers of {width}"
        how = "gf.tile(size=128)" if tile else "plain"
        print(
            f"{shape}, {how}: {live.peak_bytes / MIB:.0f} MiB; the logits alone:"
            f" {logits / MIB:.0f} MiB",
            flush=True,
        )


def long_fit(words: int, length: int, memory: str, *, layers: int, width: int) -> None:
    """`fit` where one row's logits alone are more than the budget."""
    model = make_model(words, layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, words, (1, length), generator=torch.Generator().manual_seed(1))
    with gf.meter(model, tokens) as live:
        step = gf.fit(model, optimizer, plain_loss, tokens, memory=memory)
    first, second = step(tokens), step(tokens)
    print(
        f"1 × {length} × {words}, {layers} layers of {width}, fit at {memory}: {step.plan}",
        flush=True,
    )
    print(
        f"while fitting {live.peak_bytes / MIB:.0f} MiB, "
        f"in a step {second.peak_bytes / MIB:.0f} MiB; "
        f"loss {first.loss:.4f} → {second.loss:.4f}",
        flush=True,
    )


def beside_hand(
    words: int, length: int, memory: str, rounds: int, *, layers: int, width: int
) -> None:
    """Whole steps of `fit` and of the loop by hand, in turn."""
    by_hand = make_model(words, layers, width)
    model = copy.deepcopy(by_hand)
    tokens = torch.randint(0, words, (1, length), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (by_hand, model)]

    def plain() -> None:
        plain_loss(by_hand, tokens).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    step = gf.fit(model, optimizers[1], plain_loss, tokens, memory=memory)
    with gf.meter(by_hand, tokens) as live:
        plain()
    peak = [step(tokens), step(tokens)][-1].peak_bytes
    taken: list[tuple[float, float]] = []
    for _ in range(rounds):
        started = time.process_time()
        plain()
        between = time.process_time()
        step(tokens)
        taken.append((between - started, time.process_time() - between))
    hand, ours = (min(seconds) for seconds in zip(*taken, strict=True))
    print(
        f"by hand {live.peak_bytes / MIB:.0f} MiB, {hand:.2f} s; fit {peak / MIB:.0f} MiB,"
        f" {ours:.2f} s: {ours / hand:.3f} of the least,"
        f" {statistics.median(b / a for a, b in taken):.3f} by the median of {rounds} rounds",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", type=int, default=8, help="of gradfit's trade-offs")
    parser.add_argument(
        "--by-hand", action="store_true", help="leave out what gradfit plans, which takes a while"
    )
    parser.add_argument(
        "--long", type=int, nargs="*", help="peaks of these lengths, and nothing else"
    )
    parser.add_argument("--fit", help="a budget for fit at --tokens, and nothing else")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = {"layers": options.layers, "width": options.width}
    if options.long is not None:
        long_sequences(options.words, options.long, tile=True, **size)
        return
    if options.fit is not None:
        long_fit(options.words, options.tokens, options.fit, **size)
        if options.tokens <= 4096:
            beside_hand(options.words, options.tokens, options.fit, options.rounds, **size)
        return
    model = make_model(options.words, **size)
    tokens = torch.randint(
        0, options.words, (1, options.tokens), generator=torch.Generator().manual_seed(1)
    )
    print(
        f"torch {torch.__version__}, {options.layers}-layer Llama, 1 × {options.tokens} ×"
        f" {options.words}, one thread",
        flush=True,
    )
    runs = by_hand(model, tokens)
    if options.by_hand:
        measure(model, tokens, runs, options.rounds)
        return
    runs |= planned(model, tokens, options.points)
    measure(model, tokens, runs, options.rounds)


if __name__ == "__main__":
    main()
