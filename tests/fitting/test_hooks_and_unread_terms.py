"""What a user's loss or hooks do that a cut batch cannot follow: said, or refused in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gradfit as gf
from gradfit.fitting.trained_optimizer import check_members


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(12, 4), "y": torch.randint(0, 3, (12,)), "mask": torch.ones(12)}


def masked(model: Any, rows: Any) -> torch.Tensor:
    errors = model(rows["x"]).square().mean(1)
    return (errors * rows["mask"]).sum() / rows["mask"].sum()


def test_one_term_of_several_that_cannot_be_read_is_named() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, rows: Any) -> torch.Tensor:
        return F.cross_entropy(model(rows["x"]), rows["y"]) + F.relu(masked(model, rows))

    with pytest.warns(gf.ExactnessWarning, match=r"ReluBackward0.*cannot be read.*gf\.Loss"):
        gf.fit(model, optimizer, loss_fn, batch(), memory="64 MiB", micro_batch=3)


def test_terms_that_can_be_read_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, rows: Any) -> torch.Tensor:
        return F.cross_entropy(model(rows["x"]), rows["y"]) + masked(model, rows)

    gf.fit(model, optimizer, loss_fn, batch(), memory="64 MiB", micro_batch=3)
    assert not [one for one in recwarn if one.category is gf.ExactnessWarning]


def test_an_optimizer_that_steps_in_backward_is_refused_before_anything_is_run() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    with pytest.raises(gf.MisuseError, match=r"'weight' has a hook.*step\(batch\)"):
        gf.fit(model, optimizer, masked, batch(), memory="64 MiB")
    assert all(map(torch.equal, model.parameters(), before))


def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    model = torch.nn.Embedding(10, 3, sparse=True)
    with pytest.raises(gf.MisuseError, match=r"SparseAdam.*GradientAccumulator"):
        gf.fit(
            model,
            torch.optim.SparseAdam(model.parameters()),
            lambda model, rows: model(rows["y"]).square().mean(),
            batch(),
            memory="64 MiB",
        )


def test_gradfits_own_hooks_are_no_reason_to_refuse() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    check_members(model, optimizer)
    accumulator.close()


class Taught(torch.nn.Module):
    """A teacher that is averaged in each forward, as parameters or as buffers."""

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        self.student = torch.nn.Linear(4, 3)
        teacher = torch.zeros(3, 4)
        if as_buffer:
            self.register_buffer("teacher", teacher)
        else:
            self.teacher = torch.nn.Parameter(teacher, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.lerp_(self.student.weight, 0.1)
            aim = x @ self.teacher.T
        return F.mse_loss(self.student(x), aim)


def taught(model: Any, rows: Any) -> Any:
    return model(rows["x"])


def test_a_forward_that_writes_to_frozen_parameters_is_refused_before_it_does() -> None:
    model = Taught(as_buffer=False)
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with pytest.raises(gf.MisuseError, match=r"writes to 'teacher'.*after step\(batch\)"):
        gf.fit(model, optimizer, taught, batch(), memory="64 MiB")
    assert not model.teacher.any()


class Shrinks(torch.nn.Module):
    """Writes to its own trained weights before it uses them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = torch.nn.Linear(4, 3), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        if self.how == "in place":
            weight.data.mul_(0.9)
        elif self.how == "other memory":
            weight.data = weight.data * 0.9
        if self.how == "max_norm":
            return F.embedding(x.long(), weight, max_norm=0.1)
        return x @ weight.T


@pytest.mark.parametrize("how", ["in place", "other memory", "max_norm"])
def test_a_forward_that_writes_to_what_is_trained_is_refused_before_it_does(how: str) -> None:
    model = Shrinks(how)
    before, memory = model.layer.weight.detach().clone(), model.layer.weight.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        gf.MisuseError, match=r"writes to 'layer.weight', a parameter, .*after step\(batch\)"
    ):
        gf.fit(model, optimizer, lambda m, x: m(x).mean(), torch.ones(6, 4), memory=None)
    assert torch.equal(model.layer.weight, before)
    assert model.layer.weight.data_ptr() == memory


def test_a_forward_that_writes_to_a_tensor_that_is_no_buffer_is_refused_before_it_does() -> None:
    class Counting(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.seen = [{"rows": torch.zeros(())}]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen[0]["rows"] += len(x)
            return super().forward(x)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gf.MisuseError, match=r"writes to 'seen', a tensor .* as a buffer"):
        gf.fit(model, optimizer, masked, batch(), memory="64 MiB")
    assert not model.seen[0]["rows"]


def test_the_same_in_a_buffer_is_left_whole_and_put_back() -> None:
    model = Taught(as_buffer=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, taught, batch(), memory="64 MiB")
    assert not model.teacher.any()
    assert step.plan.steps == 1
    step(batch())
    assert model.teacher.any()


def test_frozen_parameters_that_are_only_read_are_fine() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    step = gf.fit(model, optimizer, masked, batch(), memory="64 MiB", micro_batch=3)
    assert step(batch()).micro_batches == 4
