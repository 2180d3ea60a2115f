"""Tiles as a planner's choice: below one row, measured, exact, and none where memory is not
short.
"""

from __future__ import annotations

import functools
import gc
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import gradfit as gf
from gradfit.profiling.profile import Profile
from gradfit.report.page import render
from gradfit.report.report_record import Report
from gradfit.tiling.tiles import Tiles

WORDS, WIDTH, LENGTH = 4000, 16, 256


class Decoder(nn.Module):
    """A residual layer of attention and MLP between an embedding and a projection to many words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.mix(x)
        x = x + F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return self.head(x + self.mlp(x))


def make() -> tuple[Decoder, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Decoder()
    tokens = torch.randint(0, WORDS, (2, LENGTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), tokens


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    labels = tokens.roll(-1, 1).masked_fill(tokens % 5 == 0, -100)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


LOGITS = LENGTH * WORDS * 4  # of one row
STATIC = 2 * (2 * WORDS * WIDTH + WIDTH * WIDTH * 9) * 4  # parameters and gradients
SHORT = STATIC + 2 * LOGITS  # plain needs five times one row's logits beside them


def plain_update() -> dict[str, Tensor]:
    model, optimizer, tokens = make()
    loss_fn(model, tokens).backward()
    optimizer.step()
    return model.state_dict()


def test_a_budget_below_one_row_is_held() -> None:
    model, optimizer, tokens = make()
    with gf.meter(model, tokens) as live:
        step = gf.fit(model, optimizer, loss_fn, tokens, memory=SHORT)
        result = step(tokens)
    assert step.plan.tiles is not None
    assert step.plan.tiles.heads == ("head",)
    assert result.peak_bytes <= SHORT
    assert live.peak_bytes <= SHORT
    assert step.plan.peak_bytes == pytest.approx(result.peak_bytes, rel=0.05)
    for name, value in plain_update().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert "forward" not in model.head.__dict__  # outside of its steps the model is as it was
    assert "tiles of head: gradients are equal to the untiled ones up to the rounding" in str(
        step.plan
    )


class Deep(Decoder):
    """With a norm before the projection, whose result is worth rebuilding, and several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
            )
            for _ in range(6)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("share", [0.35, 0.5, 0.7])
def test_one_row_is_held_while_fitting_and_predicted_well(share: float) -> None:
    torch.manual_seed(0)
    model, tokens = Deep(), torch.randint(0, WORDS, (1, 2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static = 2 * sum(p.nbytes for p in model.parameters())
    budget = int(static + share * 2048 * WORDS * 4 / 4)
    with gf.meter(model, tokens) as live:
        step = gf.fit(model, optimizer, loss_fn, tokens, memory=budget)
    assert live.peak_bytes <= budget
    assert step.plan.tiles is not None
    result = step(tokens)
    assert result.peak_bytes == pytest.approx(step.plan.peak_bytes, rel=5e-3)
    assert result.peak_bytes <= budget


def test_a_node_that_works_in_tiles_is_one_node() -> None:
    """What it has unpacked is there until its end, and a peak in between must count it."""
    for one in measured().tiled:
        names = [node.name for node in one.nodes]
        assert "_InPlaceBackward" not in names
        modules = one.tiles.modules if one.tiles is not None else ()
        assert names.count("_SumOfTilesBackward") == 1
        assert names.count("_TiledModuleBackward") == len(modules)


def test_how_parts_add_up_is_not_measured_for_one_row() -> None:
    model, optimizer, tokens = make()
    rows: list[int] = []

    def counting(model: nn.Module, tokens: Tensor) -> Tensor:
        rows.append(len(tokens))
        return loss_fn(model, tokens)

    step = gf.fit(model, optimizer, counting, tokens[:1], memory=SHORT)
    assert set(rows) == {1}
    step(tokens)  # two rows, which may be cut: now it is measured
    assert max(rows) > 1
    assert step.known[0].profile.additivity is not None or len(step.known) > 1


def miscounted(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    return loss_fn(model, tokens), int((tokens % 5 != 0).sum())


def test_a_wrong_count_is_refused_for_one_row_too() -> None:
    model, optimizer, tokens = make()
    with pytest.raises(gf.MisuseError, match="a mean, not a sum"):
        gf.fit(model, optimizer, miscounted, tokens[:1], memory=SHORT)


def test_without_tiles_the_error_says_what_they_would_give() -> None:
    model, optimizer, tokens = make()
    with pytest.raises(
        gf.BudgetInfeasible, match=r"With tile=True, about .* would be enough"
    ) as without:
        gf.fit(model, optimizer, loss_fn, tokens, memory=SHORT, tile=False)
    with pytest.raises(gf.BudgetInfeasible) as with_tiles:
        gf.fit(model, optimizer, loss_fn, tokens, memory=STATIC // 2)
    assert with_tiles.value.min_bytes < 0.5 * without.value.min_bytes
    step = gf.fit(model, optimizer, loss_fn, tokens, memory=with_tiles.value.min_bytes)
    assert step(tokens).peak_bytes <= with_tiles.value.min_bytes


def test_no_tiles_where_memory_is_not_short() -> None:
    model, optimizer, tokens = make()
    step = gf.fit(model, optimizer, loss_fn, tokens, memory="1 GiB")
    assert step.plan.tiles is None
    assert step.plan.steps == 1


@functools.cache
def measured() -> Profile:
    model, optimizer, tokens = make()
    return gf.profile(model, loss_fn, tokens, optimizer)


def test_plans_choose_between_tiled_profiles_and_the_plain_one() -> None:
    profile = measured()
    tiles = [one.tiles for one in profile.tiled if one.tiles is not None]
    assert [one.heads for one in tiles] == [("head",)] * 3
    assert [one.modules for one in tiles] == [(), ("mlp",), ("mlp",)]
    assert [one.gradients_early for one in tiles] == [True, True, False]
    again = Profile.from_json(profile.to_json())
    assert again == profile
    plan = gf.plan(profile, memory=SHORT, batch_size=2)
    assert plan.tiles is not None
    assert gf.Plan.from_json(plan.to_json()) == plan
    assert gf.plan(profile, memory="1 GiB", batch_size=2).tiles is None
    with pytest.raises(gf.BudgetInfeasible, match="With tile=True the smallest is"):
        gf.plan(profile, memory=SHORT, batch_size=2, tile=False)
    smallest = gf.frontier(profile, batch_size=2, points=3)[-1]
    assert smallest.tiles is not None
    assert all(
        one.tiles is None for one in gf.frontier(profile, batch_size=2, points=3, tile=False)
    )
    assert (
        smallest.peak_bytes
        < gf.frontier(profile, batch_size=2, points=3, tile=False)[-1].peak_bytes
    )


def test_predictions_have_lazy_logits_too() -> None:
    model, optimizer, tokens = make()
    predicted = gf.profile(model, loss_fn, tokens, optimizer, fake=True)
    (tiled,) = predicted.tiled  # whether a module treats each token by itself shapes do not tell
    assert tiled.tiles == measured().tiled[0].tiles
    assert tiled.predicted
    plan = gf.plan(predicted, memory=SHORT, batch_size=2, micro_batch=1)
    assert plan.tiles == tiled.tiles
    assert plan.peak_bytes <= SHORT
    ours = gf.plan(measured().tiled[0], memory="1 GiB", batch_size=2)
    theirs = gf.plan(tiled, memory="1 GiB", batch_size=2)
    assert theirs.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.02)
    assert not gf.profile(model, loss_fn, tokens, fake=True, tile=False).tiled


def test_a_plan_with_tiles_is_applied_and_audited() -> None:
    model, _, tokens = make()
    plan = gf.plan(measured(), memory=SHORT, batch_size=2, micro_batch=1)
    loss_fn(model, tokens[:1]).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with gf.meter(model, tokens) as live:
        with gf.apply(model, plan):
            loss = loss_fn(model, tokens[:1])
        loss.backward()
    assert live.peak_bytes <= SHORT
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    report = gf.audit(model, loss_fn, tokens, plan)
    assert report.identical
    assert report.full_batch is not None
    assert report.full_batch.exact
    assert report.full_batch.error is not None
    assert report.full_batch.error < 1e-5
    assert any("tiles of head" in note and "up to the rounding" in note for note in report.notes)


def test_a_plan_with_tiles_is_saved_and_taken_up() -> None:
    model, optimizer, tokens = make()
    step = gf.fit(model, optimizer, loss_fn, tokens, memory=SHORT)
    other, another, _ = make()
    again = gf.fit(other, another, loss_fn, tokens, memory=SHORT, known=step.known)
    state = step.state_dict()
    again.load_state_dict(state)
    assert again.plan.tiles == step.plan.tiles
    step(tokens)
    again(tokens)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_the_example_runs() -> None:
    runpy.run_path(
        str(Path(__file__).parents[2] / "examples" / "long_sequences.py"), run_name="__main__"
    )


def test_tiles_say_what_they_are() -> None:
    tiles = Tiles(8, ("head",), 4, tuple(f"layers.{n}.mlp" for n in range(5)))
    assert (
        str(tiles)
        == "8 tiles of head and 4 tiles of layers.0.mlp, layers.1.mlp, layers.2.mlp and 2 more"
    )


def test_the_page_shows_tiles() -> None:
    model, _, tokens = make()
    profile = gf.profile(model, loss_fn, tokens)
    plan = gf.plan(profile, memory=SHORT)
    assert plan.tiles is not None
    assert str(plan.tiles) in render(Report("words", profile, plan))
    assert str(plan.tiles) not in render(Report("words", profile))


def test_a_model_the_user_has_tiled_keeps_his_tiles() -> None:
    model, optimizer, tokens = make()
    with gf.tile(model, size=64) as handle:
        step = gf.fit(model, optimizer, loss_fn, tokens, memory="1 GiB")
        result: Any = step(tokens)
        assert result.stepped
        assert step.plan.tiles is None
        assert handle.heads["head"].reduced


def llama() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.randint(0, 4000, (2, 256))


def own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
TIMES = (1.0, 1.06, 1.15, 1.3, 1.7, 2.4, 3.0)  # of the smallest budget


def taken_by_fit(optimizer: str, memory: int) -> tuple[int, int, Tiles | None]:
    """The most of all of `fit` and a step, the least that was named or 0, and the tiles."""
    model, tokens = llama()
    updates = OPTIMIZERS[optimizer](model.parameters(), lr=0.01)
    gc.collect()
    with gf.meter(model, updates, tokens) as live:
        try:
            step = gf.fit(model, updates, own_loss, tokens, memory=memory)
        except gf.BudgetInfeasible as refusal:
            return live.peak_bytes, refusal.min_bytes, None
        step(tokens)
    return live.peak_bytes, 0, step.plan.tiles


@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=pytest.mark.slow)])
def test_no_way_to_cut_is_measured_in_more_than_the_budget(optimizer: str) -> None:
    """The fastest ways to cut are tried first, and take the most."""
    taken, least, _ = taken_by_fit(optimizer, 1000)
    assert taken <= least
    found = set()
    for times in TIMES:
        budget = int(least * times)
        taken, refused, tiles = taken_by_fit(optimizer, budget)
        assert not refused, times
        assert taken <= budget, times
        found.add(tiles)
    assert len(found) > 1  # ways were refused, and the next one taken
