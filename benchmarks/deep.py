"""Little memory: what plans take at 15 and 10 % of the activations, and with the least, beside what
the plans of another tree take.

`python benchmarks/deep.py predict plans.pkl` plans with the gradfit that is on the path, for
profiles that are made once (and kept in `profiles.pkl` beside it); `python benchmarks/deep.py run
before=plans.pkl now=plans.pkl` runs the plans of both by turns, and prints their bytes by the
meter, whether their gradients are plain PyTorch's bit for bit, and their CPU seconds as ratios to
plain next to them.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fair import one_thread, race
from frontier import Point, passes, peak_of, plainly
from frontier_models import Case, cases
from least_seconds import least_seconds

import gradfit as gf

MODELS = ("GPT-2", "ViT", "ResNet")
SHARES = (0.2, 0.15, 0.1, 0.0)


def chosen() -> list[Case]:
    found = [case for case in cases(quick=False) if case.name in MODELS]
    for case in found:
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return found


def profiles(path: Path) -> dict[str, tuple[Any, int]]:
    if not path.exists():
        made = {}
        for case in chosen():
            plain = peak_of(case, Point("plain", "", partial(passes, case, plainly)))
            made[case.name] = gf.profile(case.model, case.loss, case.batch), plain
        path.write_bytes(pickle.dumps(made))
    loaded: dict[str, tuple[Any, int]] = pickle.loads(path.read_bytes())
    return loaded


def planned(profile: Any, budget: int, rows: int) -> gf.Plan:
    # One of two micro-batches, since gradients are there before; in which norms have their own
    # statistics, for plain PyTorch too.
    return gf.plan(profile, memory=budget, batch_size=2 * rows, micro_batch=rows, exact=False)


def predict(path: Path) -> None:
    """Plans, by model and share, with what they predict and the bound."""
    one_thread()  # as they will run
    plans = {}
    for case in chosen():
        profile, plain = profiles(path.with_name("profiles.pkl"))[case.name]
        rows = case.batch["x"].size(0)
        graph = profile.at(rows, rows=rows)
        for share in SHARES:
            budget = graph.static_bytes + int(plain * share)
            try:
                plan = planned(profile, budget, rows)
            except gf.BudgetInfeasible as error:
                if share:
                    continue
                budget = error.min_bytes
                plan = planned(profile, budget, rows)
            bound = least_seconds(graph, budget) / graph.plain_seconds
            setting = f"{share:.0%}" if share else "the least"
            plans[case.name, setting] = plan, plan.peak_bytes - graph.static_bytes, bound, plain
    path.write_bytes(pickle.dumps(plans))


def gradients(case: Case, run: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run()
    found = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
    case.model.load_state_dict(state)  # statistics of norms
    return found


def compare(trees: dict[str, Path], rounds: int = 3) -> None:
    print(f"deep budgets, torch {torch.__version__}, {one_thread()}, {rounds} rounds by turns")
    found = {tree: pickle.loads(path.read_bytes()) for tree, path in trees.items()}
    print(
        f"{'':8}{'tree':8}{'budget':>10}{'predicted':>11}{'measured':>10}{'bits':>7}"
        f"{'bound':>8}{'predicted':>11}{'time':>8}{'by least':>10}"
    )
    for case in chosen():
        rows = [
            (tree, setting, *entry)
            for tree, plans in found.items()
            for (name, setting), entry in plans.items()
            if name == case.name
        ]
        runs = [partial(passes, case, plainly, row[2]) for row in rows]
        plainly_run = partial(passes, case, plainly)
        wanted = gradients(case, plainly_run)
        peaks = [peak_of(case, Point("", "", run)) for run in runs]
        equal = [
            all(torch.equal(a, b) for a, b in zip(gradients(case, run), wanted, strict=True))
            for run in runs
        ]
        times = race(plainly_run, runs, rounds=rounds)
        expected = {f"{row[2].plain_seconds / row[2].steps:.3f}" for row in rows}
        print(
            f"{case.name}: plain passes take {times[0].least:.3f} s here at least; in the profile"
            f" {' and '.join(sorted(expected))} s"
        )
        for row, peak, same, time in zip(rows, peaks, equal, times[1:], strict=True):
            tree, setting, plan, predicted, bound, plain = row
            print(
                f"{case.name:8}{tree:8}{setting:>10}{predicted / plain:>11.2%}{peak / plain:>10.2%}"
                f"{'equal' if same else 'OTHER':>7}{bound:>+8.1%}{plan.extra_fraction:>+11.1%}"
                f"{time.ratio - 1:>+8.1%}{time.least / times[0].least - 1:>+10.1%}",
                flush=True,
            )


def main() -> None:
    if sys.argv[1] == "predict":
        predict(Path(sys.argv[2]))
    else:
        pairs = [argument.split("=", 1) for argument in sys.argv[2:]]
        compare({tree: Path(path) for tree, path in pairs})


if __name__ == "__main__":
    main()
