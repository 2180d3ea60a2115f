"""Every way to draw, from the default generator and from one of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import gradfit as gf
from gradfit.tape import generators
from gradfit.tape.recorder import Recorder

_DRAWS: dict[str, Any] = {
    "rand_like": lambda p, g: torch.rand_like(p, generator=g),
    "randn_like": lambda p, g: torch.randn_like(p, generator=g),
    "randint_like": lambda p, g: torch.randint_like(p, 10, generator=g),
    "rand": lambda p, g: torch.rand(5, 4, generator=g),
    "randn": lambda p, g: torch.randn(5, 4, generator=g),
    "randint": lambda p, g: torch.randint(9, (5, 4), generator=g),
    "randperm": lambda p, g: torch.randperm(4, generator=g),
    "bernoulli": lambda p, g: torch.bernoulli(p, generator=g),
    "bernoulli_": lambda p, g: torch.empty(5, 4).bernoulli_(p, generator=g),
    "multinomial": lambda p, g: torch.multinomial(p, 4, generator=g),
    "normal": lambda p, g: torch.normal(p, p, generator=g),
    "normal of a shape": lambda p, g: torch.normal(0.0, 1.0, (5, 4), generator=g, device=p.device),
    "uniform_": lambda p, g: torch.empty(5, 4).uniform_(generator=g),
    "normal_": lambda p, g: torch.empty(5, 4).normal_(generator=g),
    "exponential_": lambda p, g: torch.empty(5, 4).exponential_(generator=g),
    "random_": lambda p, g: torch.empty(5, 4).random_(0, 9, generator=g),
    "cauchy_": lambda p, g: torch.empty(5, 4).cauchy_(generator=g),
    # these take it by position
    "poisson": lambda p, g: torch.poisson(p * 3, generator=g),
    "binomial": lambda p, g: torch.binomial((p * 5).round(), p, generator=g),
    "gamma": lambda p, g: torch._standard_gamma(p, g),
    "dirichlet": lambda p, g: torch._sample_dirichlet(p, g),
    "rrelu": lambda p, g: torch.ops.aten.rrelu_with_noise(
        p - 0.5, torch.empty_like(p), 0.1, 0.4, True, g
    ),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", sorted(_DRAWS))
def test_drawing_again(name: str, own: bool) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(2) if own else None
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        with gf.CheckpointScope("s", enabled=enabled) as scope:
            drawn = _DRAWS[name](x.detach().sigmoid(), generator)
            loss = (x.sin() * drawn).exp().sin().sum()
        states = [torch.get_rng_state(), *([generator.get_state()] if generator else [])]
        gradient = torch.autograd.grad(loss, x)[0]
        assert torch.equal(torch.get_rng_state(), states[0])
        assert generator is None or torch.equal(generator.get_state(), states[1])
        results.append([loss.detach(), gradient, *states])
    assert scope.stats.freed_bytes > 0
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


class Accelerator:
    """Draws on the CPU that are recorded as an accelerator's: by its device, which is a new object
    at each asking.
    """

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        assert device.type == "cuda"
        torch.set_rng_state(state)

    def current_device(self) -> int:
        return 1

    def capture(self, args: Any, kwargs: Any) -> Any:
        source = generators._source((), {"device": torch.device("cuda")})
        return source, generators.get_state(source)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    here = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: here)
    monkeypatch.setattr(generators, "capture", here.capture)
    return here


@pytest.mark.parametrize(
    "draw",
    [F.dropout, lambda h: F.dropout(F.dropout(h).sin()), lambda h: h * torch.rand_like(h),
     lambda h: h * torch.randn_like(h) * torch.rand_like(h)],
    ids=["dropout", "two dropouts", "rand_like", "randn_like and rand_like"],
)  # fmt: skip
@pytest.mark.usefixtures("accelerator")
def test_an_accelerators_generator_is_left_as_it_was(draw: Any) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 20).requires_grad_()
        with gf.CheckpointScope("s", enabled=enabled):
            loss = draw(draw(x.exp()).sin()).exp().sum()
        state = torch.get_rng_state()
        gradient = torch.autograd.grad(loss, x)[0]
        assert torch.equal(torch.get_rng_state(), state)
        results.append((loss.detach(), gradient, torch.rand(3)))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


def test_the_current_device_is_named_when_it_is_recorded(accelerator: Accelerator) -> None:
    source, _ = accelerator.capture((), {})
    assert source == torch.device("cuda", 1)
    assert generators.with_index(torch.device("cuda", 3)) == torch.device("cuda", 3)


def test_a_tensor_made_from_nothing_is_made_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="cuda"` is recorded with the index it had then; a fake tensor can be on a device that
    is not here.
    """
    recorded: list[Any] = []
    monkeypatch.setattr(
        Recorder, "_record", lambda self, func, info, args, kwargs, *rest: recorded.append(kwargs)
    )
    with FakeTensorMode(), gf.CheckpointScope("s"):
        torch.arange(3, device="cuda", dtype=torch.float64)
    assert recorded[0]["device"] == torch.device("cuda", 0)
    assert recorded[0]["dtype"] == torch.float64
