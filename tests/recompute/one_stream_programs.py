"""Random programs as models: profiled, then run along plans made from their own profile.

`python one_stream_programs.py FIRST COUNT` runs the programs with these seeds and prints one line
of JSON.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf

sys.path.insert(0, str(Path(__file__).parents[1] / "tape"))

from tape_programs import COLUMNS, OPERATIONS, ROWS

# What they do is decided by numbers that a profile, which draws other ones, need not have had.
UNSTEADY = {"branch_on_value", "loop_on_value", "masked_select", "nonzero"}
EXTRA: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    # torch takes another operator for it where a dispatch mode looks.
    "max_pool_without_gradient": lambda a, b, c: F.max_pool1d(a.detach()[None], 3, 1, 1)[0] * b,
    "add_sparse": lambda a, b, c: (
        (a * 1).add_(torch.eye(ROWS, COLUMNS, dtype=a.dtype).to_sparse()) * b
    ),
    "sparse_result": lambda a, b, c: (
        a * torch.eye(ROWS, COLUMNS, dtype=a.dtype).to_sparse().to_dense()
    ),
    "sparse_product": lambda a, b, c: torch.sparse.mm(
        torch.eye(ROWS, dtype=a.dtype).to_sparse(), a
    ),
    "chunks": lambda a, b, c: torch.cat(
        [part.sigmoid_() for part in (a * 1).unsafe_chunk(2, 1)], 1
    ),
    "same_again": lambda a, b, c: a.contiguous().to(a.dtype) * 1,
    "metered": lambda a, b, c: _metered(a, b),
}
NAMES = sorted((OPERATIONS.keys() - UNSTEADY) | EXTRA.keys())


def _metered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with gf.meter():
        return F.max_pool1d(a.detach()[None], 3, 1, 1)[0] + b


class Program(nn.Module):
    """A random program on two parameters and a batch of one row."""

    def __init__(self, seed: int, names: list[str] = NAMES) -> None:
        super().__init__()
        dice = random.Random(seed)
        numbers = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [torch.randn(ROWS, COLUMNS, generator=numbers) for _ in range(2)]
        )
        self.batch = torch.randn(1, ROWS, COLUMNS, generator=numbers)
        self.program = [
            (dice.choice(names), dice.randrange(30), dice.randrange(30), dice.randrange(30))
            for _ in range(dice.randint(2, 16))
        ]
        # Found out once: torch refuses some writes only with gradients, or only in dropout itself,
        # and without the error this would be another program.
        self.refused: set[int] = set()
        copy.deepcopy(self)._run(self.batch, self.refused.add)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x)

    def _run(self, x: torch.Tensor, refuse: Callable[[int], object] | None = None) -> torch.Tensor:
        """All operations but those that torch refuses; `refuse` is told which these are."""
        made = [*self.weights, x[0] * 1, self.weights[0] * 1.0]
        for position, (name, a, b, c) in enumerate(self.program):
            if position in self.refused:
                continue
            operation = OPERATIONS.get(name) or EXTRA[name]
            try:
                made.append(operation(made[a % len(made)], made[b % len(made)], c))
            except RuntimeError:  # torch refuses to write there
                if refuse is None:
                    raise
                refuse(position)
                continue
            if c % 3 == 0 and len(made) > 6:
                del made[2 + c % (len(made) - 4)]
        return torch.stack([tensor.double().square().sum() for tensor in made[-3:]]).sum()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


def gradients(
    model: nn.Module, batch: torch.Tensor, plan: gf.Plan | None
) -> list[torch.Tensor] | str:
    """What a step gives, or the name of what refused it."""
    model.zero_grad()
    torch.manual_seed(3)
    try:
        if plan is None:
            loss = loss_of(model, batch)
        else:
            with gf.apply(model, plan):
                loss = loss_of(model, batch)
        loss.backward()
    except (gf.ActivationOverwritten, gf.UnsupportedOp) as refusal:
        return type(refusal).__name__
    except RuntimeError as error:
        refusals = ("inplace", "does not require grad", "more than one element")
        if not any(words in str(error) for words in refusals):
            raise
        return "refused by torch"
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def random_plan(profile: gf.Profile, dice: random.Random) -> gf.Plan:
    """One that keeps and rebuilds at random what can be rebuilt."""
    plan = gf.plan(profile, memory="1 GiB")
    makers = [value.operation for value in profile.values]
    actions = tuple(
        (
            "rebuild"
            if action == "keep"
            and maker is not None
            and profile.operations[maker].replayable
            and dice.random() < 0.5
            else action
        )
        for action, maker in zip(plan.actions, makers, strict=True)
    )
    return dataclasses.replace(plan, actions=actions, heard=len(plan.operations))


def judge(seed: int, names: list[str] = NAMES) -> str:
    """Profile a program and follow plans from its profile: "equal", "refused", or what is wrong."""
    dice = random.Random(-seed)
    model = Program(seed, names)
    batch = model.batch
    plain = gradients(copy.deepcopy(model), batch, None)
    if isinstance(plain, str):
        return "refused"
    try:
        profile = gf.profile(model, loss_of, batch)
    except (gf.MisuseError, gf.UnsupportedOp):
        return "refused"
    plans = [random_plan(profile, dice), *gf.frontier(profile, points=2)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for plan in plans:
            for _ in range(2):  # the second forward is not heard to its end
                ours = gradients(model, batch, plan)
                if isinstance(ours, str):
                    return "refused"
                if len(ours) != len(plain) or not all(
                    bool(((a == b) | ((a != a) & (b != b))).all())
                    for a, b in zip(ours, plain, strict=True)
                ):
                    return "gradients differ"
    left = [str(one.message) for one in said if "plan" in str(one.message)]
    return left[0] if left else "equal"


def main(first: int, count: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    verdicts: dict[int, str] = {}
    for seed in range(first, first + count):
        try:
            verdicts[seed] = judge(seed)
        except Exception as error:
            verdicts[seed] = f"{type(error).__name__}: {error}"
    wrong = {
        seed: verdict for seed, verdict in verdicts.items() if verdict not in ("equal", "refused")
    }
    counts = {verdict: list(verdicts.values()).count(verdict) for verdict in ("equal", "refused")}
    print(json.dumps({**counts, "wrong": dict(list(wrong.items())[:8]), "wrong_count": len(wrong)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
