"""What an operation can allocate at most: never less than it does, and so few operations have to be
asked about one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradfit as gf
from gradfit._torch import storage_key
from gradfit.recompute import evict
from gradfit.recompute.evict import Evictor
from gradfit.recompute.most_bytes import most_bytes
from gradfit.tape.listener import OperationListener
from gradfit.tape.operators import info_of

aten = torch.ops.aten


class Compared(OperationListener):
    """Compares the bound of each operation inside with what it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.bounded: set[str] = set()
        self.too_small: list[str] = []

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        info = info_of(func)
        most = most_bytes(func, args, kwargs) if info.recordable and not info.view else None
        given = {storage_key(tensor) for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        if most is not None:
            self.bounded.add(func.overloadpacket.__name__)
            new = {storage_key(t): t.untyped_storage().nbytes() for t in _tensors(out)}
            taken = sum(nbytes for key, nbytes in new.items() if key not in given)
            if taken > most:
                self.too_small.append(f"{func}: {taken} > {most}")
        return out


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, dtype=dtype).requires_grad_()


PROGRAMS: dict[str, Callable[[int, int, int], Any]] = {
    "mul": lambda a, b, c: leaf(a, 1, c) * leaf(1, b, c) + leaf(c),
    "add": lambda a, b, c: torch.arange(a) + 1.5,  # of whole numbers, it makes others
    "where": lambda a, b, c: torch.where(leaf(a, 1) > 0.5, leaf(1, b), 1.0),
    "clone": lambda a, b, c: leaf(a, 1).expand(a, b).clone(),
    "mm": lambda a, b, c: leaf(a, b) @ leaf(b, c),
    "addmm": lambda a, b, c: F.linear(leaf(a, b), leaf(c, b), leaf(c)),
    "bmm": lambda a, b, c: torch.bmm(leaf(a, b, c), leaf(a, c, b)),
    "native_layer_norm": lambda a, b, c: F.layer_norm(leaf(a, b, c), (c,), leaf(c), leaf(c)),
    "_log_softmax": lambda a, b, c: F.cross_entropy(leaf(a, c), torch.zeros(a, dtype=torch.long)),
    "nll_loss_forward": lambda a, b, c: F.nll_loss(leaf(a, c), torch.zeros(a, dtype=torch.long),
                                                   reduction="none"),
    "nll_loss2d_forward": lambda a, b, c: F.nll_loss(
        leaf(a, c, b, 2), torch.zeros(a, b, 2, dtype=torch.long), reduction="none"
    ),
    "arange": lambda a, b, c: torch.arange(a / 2, a + b, c / 3, dtype=torch.float64),
    "_foreach_norm": lambda a, b, c: torch.stack(torch._foreach_norm([leaf(a, b), leaf(c)], 2.0)),
    "unsafe_split": lambda a, b, c: leaf(a, b).unsafe_split(c)[0],
    "mse_loss": lambda a, b, c: F.mse_loss(leaf(a, b), torch.rand(a, b)),
    "sum": lambda a, b, c: leaf(a, b, c).sum(1),
    "mean": lambda a, b, c: leaf(a, b, c).mean(2, dtype=torch.float64),
    "max": lambda a, b, c: leaf(a, b + 1).max(1).values,
    "var": lambda a, b, c: leaf(a, b + 2).var(1),
    "linalg_vector_norm": lambda a, b, c: leaf(a, b).norm(),
    "embedding": lambda a, b, c: F.embedding(torch.zeros(b, c, dtype=torch.long), leaf(a + 1, 3)),
    "index": lambda a, b, c: leaf(a, 2, b)[torch.zeros(c, 1, dtype=torch.long), :, [0, 0]],
    "index_select": lambda a, b, c: leaf(a, 2).index_select(1, torch.ones(b, dtype=torch.long)),
    "gather": lambda a, b, c: leaf(a, b + 1).gather(1, torch.zeros(a, c, dtype=torch.long)),
    "index_add": lambda a, b, c: leaf(a + 1, b).index_add(0, torch.zeros(c, dtype=torch.long),
                                                          leaf(c, b)),
    "scatter_reduce": lambda a, b, c: leaf(a, b).scatter_reduce(
        0, torch.zeros(c, b, dtype=torch.long), leaf(c, b), "amax"
    ),
    "_euclidean_dist": lambda a, b, c: torch.cdist(
        leaf(a, c), leaf(2, b, c), compute_mode="use_mm_for_euclid_dist"
    ),
    "_cdist_forward": lambda a, b, c: torch.cdist(leaf(2, 1, a, c), leaf(3, b, c), p=1.0),
    "empty": lambda a, b, c: torch.empty(a, b, dtype=torch.float16).new_zeros(c),
    "constant_pad_nd": lambda a, b, c: F.pad(leaf(a, b), (c, 1, 0, 2)),
    "cat": lambda a, b, c: torch.cat([leaf(a, c), leaf(b, c)]),
    "stack": lambda a, b, c: torch.stack([leaf(a, c), leaf(a, c), leaf(a, c)]),
    "convolution": lambda a, b, c: F.conv2d(leaf(a, 2, b + 3, 9), leaf(c, 2, 3, 2), leaf(c),
                                            padding=(2, 1)),
    "_to_copy": lambda a, b, c: leaf(a, b).to(torch.float64),
    "select_backward": lambda a, b, c: leaf(a + 1, b)[0],
    "new_zeros": lambda a, b, c: leaf(a).new_zeros(b, c),
    "zeros": lambda a, b, c: torch.zeros(a, b, dtype=torch.complex128),
    "_scaled_dot_product_flash_attention_for_cpu": lambda a, b, c: (
        F.scaled_dot_product_attention(leaf(1, 2, a, 8), leaf(1, 2, b, 8), leaf(1, 2, b, 8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=10)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_an_operation_never_takes_more(name: str, a: int, b: int, c: int) -> None:
    with Compared() as compared:
        out = PROGRAMS[name](a, b, c)
        if out.requires_grad:
            out.sum().backward()
    assert name in compared.bounded
    assert not compared.too_small


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_something_is_made_of_nothing(shape: tuple[int, ...]) -> None:
    with Compared() as compared:
        x = leaf(*shape)
        (x.sum(-1) + x.sum() + x.mul(2).sum()).sum().backward()
    assert not compared.too_small


def test_a_transposed_convolution_and_groups() -> None:
    with Compared() as compared:
        out = F.conv_transpose2d(
            leaf(2, 4, 5, 6), leaf(4, 3, 3, 2), stride=3, output_padding=2, groups=2, dilation=2
        )
        out.sum().backward()
    assert {"convolution", "convolution_backward"} <= compared.bounded
    assert not compared.too_small


CPU_ONES = torch.ones(3, 3, device="cpu")


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.nonzero.default, (torch.ones(3),), {}),  # the data decide
        (aten.mul.out, (torch.ones(3), 2), {"out": torch.empty(0)}),  # which is resized
        (aten.mm.default, (torch.eye(3, device="cpu").to_sparse(), CPU_ONES), {}),
        (aten.repeat.default, (torch.ones(3), [100]), {}),
    ],
)
def test_where_no_rule_tells(func: Any, args: Any, kwargs: Any) -> None:
    assert most_bytes(func, args, kwargs) is None


@pytest.mark.parametrize(
    "numbers", [(5,), (True,), (0.5,), (-3,), (2, 9), (9, 2), (9, 2, -3), (0, 1, 0.3)]
)
def test_numbers_that_are_counted_up(numbers: tuple[float, ...]) -> None:
    with Compared() as compared, contextlib.suppress(RuntimeError):  # of bounds that torch refuses
        torch.arange(*numbers)
    assert compared.too_small == []
    assert most_bytes(aten.arange.start_step, (0, 1, 0), {}) == 0  # which is left to torch
    assert most_bytes(aten.arange.default, (math.inf,), {}) == 0


def test_what_is_written_in_place_takes_nothing() -> None:
    assert most_bytes(aten.mul_.Tensor, (torch.ones(3), 2.0), {}) == 0
    assert most_bytes(aten._local_scalar_dense.default, (torch.ones(1),), {}) == 0


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    exactly = evict._output_bytes

    def output_bytes(func: Any, args: Any, kwargs: Any) -> int | None:
        asked.append(str(func))
        return exactly(func, args, kwargs)

    monkeypatch.setattr(evict, "_output_bytes", output_bytes)
    return asked


def test_where_there_is_room_nothing_is_run_on_fake_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = counting(monkeypatch)
    layers = [layer for n in range(8) for layer in (nn.Linear(16 + n, 17 + n), nn.GELU())]
    model = nn.Sequential(*layers, nn.LayerNorm(24))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Evictor(1 << 30) as evictor:
        evictor.watch(model)
        F.mse_loss(model(torch.rand(4, 16)), torch.rand(4, 24)).backward()
        optimizer.step()
    assert asked == []


def test_near_the_limit_norms_losses_and_counting_take_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm of all gradients was taken for as much as they are, and cost 5 ms of fake tensors
    in the first step of each new size; positions cost 1 ms.
    """
    asked = counting(monkeypatch)
    gradients, logits = [torch.rand(100, 100), torch.rand(100)], torch.rand(50, 50)
    targets = torch.zeros(50, dtype=torch.long)
    with Evictor(1 << 20) as evictor:
        evictor.watch(gradients, logits, targets)
        evictor.set_limit(evictor.current_bytes + 2000)
        norms = torch._foreach_norm(gradients, 2.0)
        aten.nll_loss_forward(logits, targets, None, 1, -100)
        torch.arange(50)
    assert asked == []
    assert len(norms) == 2


def test_what_lies_in_memory_that_is_there_is_asked_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recurrent net's gates, 576 times in a `fit` of 24 tokens: half of its time. An operation
    whose results take nothing was as good as never asked about.
    """
    asked = counting(monkeypatch)
    x = torch.rand(4, 6)
    with Evictor(1 << 20):
        for _ in range(3):
            x.unsafe_split(2, 1)
        monkeypatch.setattr(evict, "most_bytes", lambda func, args, kwargs: None)
        for _ in range(3):
            x.unsafe_split(2, 1)
    assert asked == ["aten.unsafe_split.Tensor"]


def test_fake_tensors_are_not_asked_what_the_data_decide() -> None:
    x, asked = torch.tensor([2, 0, 1]), []

    def output_bytes(*call: Any) -> None:
        asked.append(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evict, "output_bytes", output_bytes)
        with Evictor(1 << 20):
            x.nonzero()
            torch.bincount(x)
            torch.repeat_interleave(x)
            assert asked == []
            torch.repeat_interleave(x, output_size=3)
    assert len(asked) == 1


def test_near_the_limit_the_exact_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counting(monkeypatch)
    x = torch.ones(1000)
    with Evictor(2 * x.nbytes) as evictor:
        y = x.sin()
        assert evictor.current_bytes == 2 * x.nbytes
        with pytest.raises(gf.BudgetInfeasible):
            x.sin()
    assert asked == ["aten.sin.default"]
    assert y.numel() == 1000


def test_the_first_step_of_a_larger_batch_asks_about_few_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may not begin to pass the budget, and most of its operations could not anyway."""
    asked = counting(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = gf.fit(model, optimizer, loss, torch.rand(4, 10, 8), memory="8 MiB")
    step(torch.rand(4, 10, 8))
    step(torch.rand(4, 14, 8))
    assert any(plan.by_size for plan in step.known)
    assert asked == []


def test_a_workspace_that_no_shape_tells() -> None:
    with Compared() as compared:
        for rows, hidden, width in itertools.product((1, 3, 17), (1, 16, 20, 64), (1, 33)):
            for steps in (1, 7, 60):
                torch.nn.LSTM(width, hidden)(torch.rand(steps, rows, width))
    assert compared.too_small == []


def test_an_operation_that_takes_more_than_its_shapes_tell_is_refused_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had passed the limit, and nobody said so; now the next try makes room for it before."""
    monkeypatch.setattr(evict, "_output_bytes", lambda func, args, kwargs: 0)
    monkeypatch.setattr(evict, "most_bytes", lambda func, args, kwargs: None)
    monkeypatch.setattr(evict, "_seen_larger", {})
    x = torch.rand(64, 64, requires_grad=True)
    limit = 8 * x.nbytes
    refused = []
    for _ in range(30):  # one operation is learnt of at a time
        x.grad = None
        manager = gf.CheckpointManager(limit / 2**20, auto_checkpoint=True, memory_threshold=1.0)
        with gf.meter(x) as live:
            try:
                with manager:
                    y = x
                    for _ in range(10):
                        y = y.sin()
                    y.sum().backward()
            except gf.BudgetInfeasible as error:
                refused.append(error)
                continue
        assert live.peak_bytes <= limit
        break
    else:
        pytest.fail(f"never held: {refused[-1]}")
    assert refused
    assert refused[0].min_bytes > limit
