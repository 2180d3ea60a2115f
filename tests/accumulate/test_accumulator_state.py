"""Killed between any two micro-batches, and resumed from files without a pickle in them:
bit-identical.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gradfit as gf

SIZES = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]


class Run:
    """A small training run that can be stopped, written to files, and taken up again."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        dtype = torch.bfloat16 if "bf16" in kind else torch.float32
        self.model = nn.Sequential(
            nn.Embedding(12, 6, sparse="sparse" in kind), nn.Linear(6, 6), nn.Tanh()
        ).to(dtype)
        # Sparse gradients need an optimizer that takes them.
        make = torch.optim.SGD if "sparse" in kind else torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=0.05)
        options: dict[str, object] = {"clip": 0.5}
        if "bf16" in kind:
            options["dtype"] = torch.float32
        if "isolate" in kind:
            options |= {"isolate": True, "on_nonfinite": "skip"}
        if "adaptive" in kind:
            options |= {"strategy": gf.AdaptiveAccumulation(9)}
        else:
            options |= {"steps": 3}
        if "scaler" in kind:
            options["scaler"] = gf.LossScaler(512.0, growth_interval=2)
        self.acc = gf.GradientAccumulator(self.optimizer, **options)

    def micro_batch(self, at: int) -> None:
        generator = torch.Generator().manual_seed(at)
        rows = torch.randint(0, 12, (SIZES[at],), generator=generator)
        h = self.model(rows)
        if "nan" in self.kind and at == 4:
            h = h * float("nan")
        if "terms" in self.kind:
            self.acc.backward(
                terms={
                    "a": (h.square().mean(1).sum(), len(rows)),
                    "b": (h[:2, 0].sum(), min(2, len(rows))),
                }
            )
        elif "plain" in self.kind:
            h.square().mean().backward()
        else:
            self.acc.backward(h.square().mean(), weight=len(rows))

    def step(self) -> None:
        if "hand" in self.kind:
            if self.acc.is_ready:
                self.optimizer.step()
                self.optimizer.zero_grad()
        else:
            self.acc.step()

    def save(self, folder: Path) -> None:
        state = self.acc.state_dict()
        optimizer = self.optimizer.state_dict()
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"acc/{name}": value for name, value in state["tensors"].items()}
        for index, values in optimizer["state"].items():
            tensors |= {
                f"optimizer/{index}/{n}": v
                for n, v in values.items()
                if isinstance(v, torch.Tensor)
            }
        save_file(tensors, folder / "state.safetensors")
        rest = {"acc": state["window"], "groups": optimizer["param_groups"]}
        rest["scaler"] = self.acc.scaler.state_dict() if self.acc.scaler is not None else None
        (folder / "state.json").write_text(json.dumps(rest))

    def load(self, folder: Path) -> None:
        tensors, rest = (
            load_file(folder / "state.safetensors"),
            json.loads((folder / "state.json").read_text()),
        )
        pick = {kind: {} for kind in ("model", "acc", "optimizer")}
        for name, value in tensors.items():
            kind, _, key = name.partition("/")
            pick[kind][key] = value
        self.model.load_state_dict(pick["model"])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in pick["optimizer"].items():
            index, _, name = key.partition("/")
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
        if self.acc.scaler is not None:
            self.acc.scaler.load_state_dict(rest["scaler"])
        self.acc.load_state_dict({"tensors": pick["acc"], "window": rest["acc"]})


KINDS = [
    "default", "plain", "plain-hand", "hand", "bf16", "bf16-isolate", "isolate-nan", "terms",
    "terms-isolate-nan", "sparse", "sparse-isolate", "adaptive", "scaler", "scaler-isolate-nan",
    "bf16-scaler-isolate-nan",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_between_any_two_micro_batches(kind: str, tmp_path: Path) -> None:
    whole = Run(kind)
    for at in range(len(SIZES)):
        whole.micro_batch(at)
        whole.step()
    whole.acc.flush()
    for stop in range(len(SIZES)):
        first = Run(kind)
        for at in range(stop):
            first.micro_batch(at)
            first.step()
        first.save(tmp_path)
        second = Run(kind)
        second.load(tmp_path)
        assert second.acc.current_step == first.acc.current_step
        for at in range(stop, len(SIZES)):
            second.micro_batch(at)
            second.step()
        second.acc.flush()
        assert second.acc.windows == whole.acc.windows
        for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_saved_between_backward_and_step(tmp_path: Path) -> None:
    whole, first, second = Run("default"), Run("default"), Run("default")
    for at in range(6):
        whole.micro_batch(at)
        whole.step()
    for at in range(5):
        first.micro_batch(at)
        first.step() if at < 4 else None
    first.save(tmp_path)
    second.load(tmp_path)
    second.step()
    second.micro_batch(5)
    second.step()
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_is_a_copy() -> None:
    run = Run("default")
    run.micro_batch(0)
    state = run.acc.state_dict()
    before = {name: value.clone() for name, value in state["tensors"].items()}
    run.micro_batch(1)
    assert all(torch.equal(value, before[name]) for name, value in state["tensors"].items())
    json.dumps(state["window"])


def test_states_that_do_not_belong() -> None:
    run = Run("default")
    run.micro_batch(0)
    good = run.acc.state_dict()
    other = gf.GradientAccumulator(steps=3, parameters=[torch.zeros(2, requires_grad=True)])
    with pytest.raises(gf.StateError, match="another model: it has 3 parameters, this one 1"):
        other.load_state_dict(good)
    reshaped = gf.GradientAccumulator(
        steps=3, parameters=[torch.zeros(2, requires_grad=True) for _ in range(3)]
    )
    with pytest.raises(
        gf.StateError, match=r"parameter 0 has shape \(12, 6\) there and \(2,\) here"
    ):
        reshaped.load_state_dict(good)
    wrong = {**good, "tensors": {**good["tensors"], "grad.0": torch.zeros(3)}}
    for bad, text in (
        ({}, "not an accumulator's"),
        ({"window": 3, "tensors": {}}, "not an accumulator's"),
        ({**good, "window": {**good["window"], "version": 99}}, "version 99"),
        (wrong, r"'grad.0' has shape \(3,\)"),
        ({**good, "tensors": {"grad.77": torch.zeros(1)}}, "not an accumulator's"),
        ({**good, "window": {**good["window"], "strategy": {"x": 1}}}, "strategy"),
    ):
        before = [p.grad.clone() for p in run.model.parameters()]
        with pytest.raises(gf.StateError, match=text):
            run.acc.load_state_dict(bad)
        assert all(
            torch.equal(p.grad, g) for p, g in zip(run.model.parameters(), before, strict=True)
        )
        assert run.acc.current_step == 1


def test_a_broken_window_is_not_saved() -> None:
    run = Run("default")
    run.micro_batch(0)
    run.acc.window.break_off()
    with pytest.raises(gf.MisuseError, match="failed half-way"):
        run.acc.state_dict()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("window", "shapes", 1, 0), torch.zeros(3)),
        (("window", "had_pass"), torch.zeros(3)),
        (("window", "sparse"), torch.zeros(3)),
        (("window", "sparse", "grad.0", 0), 1),
        (("tensors", "grad.0/indices"), torch.full((1, 2), 99)),
        (("tensors", "grad.0/values"), torch.zeros(2, 3)),
    ],
)
def test_tensors_where_numbers_belong_and_no_sparse_tensor_are_refused(
    where: tuple[Any, ...], value: object
) -> None:
    run = Run("sparse")
    run.acc.backward(run.model(torch.tensor([1, 2])).mean())
    state = run.acc.state_dict()
    place: Any = state
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    with pytest.raises(gf.StateError, match="damaged"):
        Run("sparse").acc.load_state_dict(state)
