"""Where a user's code meets `fit`: other backward passes, optimizers, lists, padding that comes
later, state.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf

ROWS = 16


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 3)).double()


def batch(rows: int = ROWS, *, padding: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, 3, (rows,))
    return {
        "x": torch.randn(rows, 4).double(),
        "y": y.masked_fill(torch.rand(rows) < padding, -100),
    }


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def two_denominators(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["y"]) + 0.1 * out.square().mean()


def fitted(
    model: nn.Module, loss_fn: Any = entropy, sample: Any = None, **options: Any
) -> gf.TrainStep:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"memory": "1 MiB", "micro_batch": 3, **options}
    return gf.fit(model, optimizer, loss_fn, batch() if sample is None else sample, **options)


def after_plain_step(model: nn.Module, loss_fn: Any, data: Any, *, steps: int = 1) -> list[Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, data).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_parameters(model: nn.Module, expected: list[Tensor], *, atol: float = 1e-13) -> None:
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), other, rtol=0, atol=atol)


class TestWindow:
    """Backward passes outside of a step are nobody's micro-batches."""

    def test_an_own_backward_before_a_step(self) -> None:
        model, data = network(), batch()
        step = fitted(model)
        expected = after_plain_step(model, entropy, data)
        entropy(model, data).backward()
        assert step(data).stepped
        assert_parameters(model, expected)

    def test_an_own_backward_and_zero_grad(self) -> None:
        model, data = network(), batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = fitted(model, optimizer=optimizer)
        expected = after_plain_step(model, entropy, data)
        (3 * entropy(model, data)).backward()
        optimizer.zero_grad()
        step(data)
        assert_parameters(model, expected)

    def test_audits_and_profiles_between_steps(self) -> None:
        model, data = network(), batch()
        expected = after_plain_step(model, entropy, data, steps=2)
        step = fitted(model)
        step(data)
        assert gf.audit(model, entropy, data)
        gf.profile(model, entropy, data)
        step(data)
        assert_parameters(model, expected)

    def test_two_steps_on_one_model_take_turns(self) -> None:
        model, data = network(), batch()
        plain = copy.deepcopy(model)
        first, second = fitted(model), fitted(model, two_denominators, micro_batch=5)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step, loss_fn in ((first, entropy), (second, two_denominators), (first, entropy)):
            optimizer.zero_grad()
            loss_fn(plain, data).backward()
            optimizer.step()
            assert step(data).stepped
        assert_parameters(model, [parameter.detach() for parameter in plain.parameters()])

    def test_a_step_of_the_optimizer_by_hand_between_steps(self) -> None:
        model, data = network(), batch()
        plain = copy.deepcopy(model)
        optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))
        step = fitted(model, optimizer=optimizer)
        for _ in range(2):
            other.zero_grad()
            entropy(plain, data).backward()
            other.step()
        optimizer.zero_grad()
        entropy(model, data).backward()
        optimizer.step()
        step(data)
        assert_parameters(model, [parameter.detach() for parameter in plain.parameters()])

    def test_a_gan(self) -> None:
        torch.manual_seed(3)
        maker, judge = nn.Linear(4, 4).double(), network()
        plain_maker, plain_judge = copy.deepcopy(maker), copy.deepcopy(judge)
        data = {"x": torch.randn(ROWS, 4).double(), "noise": torch.randn(ROWS, 4).double()}

        def judged(m: nn.Module, b: Any, maker: nn.Module) -> Tensor:
            return F.softplus(-m(b["x"])).mean() + F.softplus(m(maker(b["noise"]).detach())).mean()

        def made(m: nn.Module, b: Any, judge: nn.Module) -> Tensor:
            return F.softplus(-judge(m(b["noise"]))).mean()

        steps = (
            fitted(judge, lambda m, b: judged(m, b, maker), data),
            fitted(maker, lambda m, b: made(m, b, judge), data),
        )
        plain = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain_judge, plain_maker)]
        for _ in range(2):
            for step in steps:
                step(data)
            plain[0].zero_grad()
            judged(plain_judge, data, plain_maker).backward()
            plain[0].step()
            plain[1].zero_grad()
            made(plain_maker, data, plain_judge).backward()
            plain[1].step()
        assert_parameters(judge, [p.detach() for p in plain_judge.parameters()])
        assert_parameters(maker, [p.detach() for p in plain_maker.parameters()])


class Wrapper:
    """As accelerate's and Lightning's are: it steps only when its own loop says so."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        raise AssertionError("the wrapper's own step is for its own loop")

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Averaging:
    """As a Lookahead: its own step does more than that of the optimizer that it holds."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Held(torch.optim.Optimizer):
    """As `SAM` and schedulers' wrappers: it steps another one, under any name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


class Asserting(torch.optim.SGD):
    """It says only when it is stepped that it wants a closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "this one needs a closure"


class Duck:
    """An optimizer that does not say what it holds."""

    def step(self) -> None:
        """Update."""

    def zero_grad(self) -> None:
        """Clear."""


class TestOptimizers:
    def test_wrappers_are_unwrapped(self) -> None:
        model, data = network(), batch()
        expected = after_plain_step(model, entropy, data)
        wrapped = Wrapper(Wrapper(torch.optim.SGD(model.parameters(), lr=0.5)))
        assert fitted(model, optimizer=wrapped)(data).stepped
        assert_parameters(model, expected)

    def test_one_with_a_step_of_its_own_is_not_taken_apart(self) -> None:
        """Its slow weights were left out, and nobody said so."""
        model = network()
        optimizer = Averaging(torch.optim.SGD(model.parameters(), lr=0.5))
        before = [p.detach().clone() for p in (*model.parameters(), *optimizer.slow)]
        optimizer.slow = [p + 1 for p in optimizer.slow]
        with pytest.raises(gf.MisuseError, match=r"Averaging.*GradientAccumulator\(optimizer\)"):
            fitted(model, optimizer=optimizer)
        now = [*model.parameters(), *(p - 1 for p in optimizer.slow)]
        assert all(map(torch.equal, now, before))
        assert not optimizer.steps

    def test_what_an_optimizer_inside_of_another_holds_is_counted(self) -> None:
        model, other = network(), network()
        plain = fitted(other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.1))
        held = fitted(model, optimizer=Held(model.parameters()))
        assert held.profile.optimizer_bytes == plain.profile.optimizer_bytes > 0
        assert held(batch()).peak_bytes <= held.budget_bytes

    def test_one_that_fails_without_a_closure_is_refused(self) -> None:
        model = network()
        with pytest.raises(gf.MisuseError, match=r"AssertionError.*needs a closure"):
            fitted(model, optimizer=Asserting(model.parameters(), lr=0.5))

    def test_one_of_another_model_is_refused(self) -> None:
        with pytest.raises(
            gf.MisuseError,
            match=r"none of the model's 4 trained parameters; the first is '0.weight'",
        ):
            fitted(network(), optimizer=torch.optim.SGD(network().parameters(), lr=0.5))

    def test_one_that_leaves_parameters_out_is_said_and_their_gradients_do_not_pile_up(
        self,
    ) -> None:
        model, data = network(), batch()
        head = torch.optim.SGD(model[2].parameters(), lr=0.5)  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match="2 of the model's 4 trained parameters; '0.weight'"):
            step = fitted(model, optimizer=head)
        step(data)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_one_that_does_not_say_what_it_holds(self) -> None:
        with pytest.raises(
            gf.MisuseError, match=r"a Duck has no param_groups.*GradientAccumulator"
        ):
            fitted(network(), optimizer=Duck())


class TestBatches:
    def test_arrays_and_other_objects_beside_tensors(self) -> None:
        """Of what has no fields, as an array, `fit` wanted to know which tensors it holds."""
        model, data = network(), batch()
        expected = after_plain_step(model, entropy, data)
        others = {
            "texts": np.array([f"row {number}" for number in range(ROWS)], dtype=object),
            "when": datetime.date(2024, 1, 1),
            "share": np.float32(0.5),
            "where": Path("data"),
        }

        def of_arrays(model: nn.Module, batch: Any) -> Tensor:
            assert len(batch["texts"]) == len(batch["y"])
            return entropy(
                model, {**batch, "y": torch.as_tensor(batch["y"], device=batch["x"].device)}
            )

        arrays = {**data, "y": data["y"].cpu().numpy(), **others}
        step = fitted(model, of_arrays, arrays)
        assert step(arrays).micro_batches > 1
        assert_parameters(model, expected)


class TestTurns:
    """One update after the other, whoever asks for them."""

    def test_threads_wait_for_each_other(self) -> None:
        """They ran into each other's windows, which no later step could use."""
        model, data = network(), batch()
        expected = after_plain_step(model, entropy, data, steps=4)
        step = fitted(model)
        threads = [threading.Thread(target=step, args=(data,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_parameters(model, expected)

    def test_a_step_inside_of_itself_is_refused(self) -> None:
        model, data = network(), batch()
        steps: list[gf.TrainStep] = []

        def calling(model: nn.Module, batch: Any) -> Tensor:
            if steps:
                steps[0](data)
            return entropy(model, batch)

        step = fitted(model, calling)
        expected = after_plain_step(model, entropy, data)
        steps.append(step)
        with pytest.raises(gf.MisuseError, match=r"inside of step\(batch\).*Call it after"):
            step(data)
        steps.clear()
        assert step(data).stepped
        assert_parameters(model, expected)


class TestInference:
    """Batches made under inference mode, as rollouts are."""

    def test_one_that_the_loss_copies_is_trained_on(self) -> None:
        def copied(model: nn.Module, batch: Any) -> Tensor:
            return entropy(model, {name: one.clone() for name, one in batch.items()})

        model, data = network(), batch()
        with torch.inference_mode():
            rollout = {name: one.clone() for name, one in data.items()}
        expected = after_plain_step(model, entropy, data)
        assert fitted(model, copied, rollout)(rollout).stepped
        assert_parameters(model, expected)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_a_step_inside_of_it_is_refused(self, mode: Any) -> None:
        step = fitted(network())
        with mode(), pytest.raises(gf.MisuseError, match=r"outside of torch\.no_grad\(\)"):
            step(batch())


class TestLater:
    """What the sample did not show."""

    def test_padding_that_comes_later_is_exact(self) -> None:
        model, padded = network(), batch(padding=0.5)
        step = fitted(model)
        expected = after_plain_step(model, entropy, padded)
        assert step(padded).weight == int((padded["y"] >= 0).sum())
        assert_parameters(model, expected)

    def test_padding_that_comes_later_in_a_loss_of_two_denominators_is_exact(self) -> None:
        model, padded = network(), batch(padding=0.5)
        step = fitted(model, two_denominators)
        expected = after_plain_step(model, two_denominators, padded)
        assert step(padded).attempts == 2  # the first shows that the terms do not grow alike
        assert_parameters(model, expected)
        assert step(batch()).attempts == 1

    def test_a_micro_batch_of_padding_alone(self) -> None:
        model, data = network(), batch()
        step = fitted(model)
        data["y"][:6] = -100
        expected = after_plain_step(model, entropy, data)
        result = step(data)
        assert result.loss == pytest.approx(entropy(network(), data).item())
        assert_parameters(model, expected)


def test_logs_are_means_over_the_items() -> None:
    def logged(model: nn.Module, batch: Any) -> Any:
        out, real = model(batch["x"]), batch["y"] >= 0
        right = (out.argmax(1) == batch["y"])[real].double()
        return F.cross_entropy(out, batch["y"]), {"accuracy": right.mean(), "one": 1}

    model, data = network(), batch(padding=0.4)
    _, expected = logged(model, data)
    result = fitted(model, logged, data)(data)
    assert result.logs == pytest.approx({"accuracy": float(expected["accuracy"]), "one": 1.0})


def test_lists_are_cut_with_the_tensors() -> None:
    texts = [str(row) for row in range(ROWS)]
    pairs: list[tuple[str, float]] = []

    def paired(model: nn.Module, batch: Any) -> Tensor:
        pairs.extend(zip(batch["text"], batch["row"].tolist(), strict=True))
        return entropy(model, batch)

    data = {**batch(), "text": texts, "row": torch.arange(ROWS)}
    fitted(network(), paired, data)(data)
    assert all(int(text) == row for text, row in pairs)


@pytest.mark.parametrize("size", [0, -1, 2.5, "all", True])
def test_a_micro_batch_that_is_none(size: Any) -> None:
    with pytest.raises(gf.MisuseError, match="micro_batch"):
        fitted(network(), micro_batch=size)


def test_the_micro_batch_that_was_asked_for() -> None:
    assert fitted(network(), micro_batch=5).plan.micro_batch == 5
    assert fitted(network(), micro_batch=99).plan.split_text == "16 × 1"
    model = network(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = batch(256)
    small = gf.fit(model, optimizer, entropy, data, memory="600 KiB")
    assert small.plan.steps > 1
    with pytest.raises(gf.BudgetInfeasible, match="micro_batch='whole'"):
        gf.fit(model, optimizer, entropy, data, memory="100 KiB", micro_batch="whole")


@pytest.mark.parametrize("memory", ["80%", "auto", None])
def test_budgets_of_what_there_is(memory: Any) -> None:
    model, data = network(), batch()
    step = gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.5), entropy, data, memory=memory)
    assert step.plan.split_text == "16 × 1"
    assert step(data).peak_bytes <= step.budget_bytes


def test_a_larger_batch_is_measured_again() -> None:
    model = network(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = gf.fit(model, optimizer, entropy, batch(64), memory="4 MiB")
    small, large = batch(8), batch(64)
    for _ in range(3):
        few = step(small).peak_bytes
    with gf.meter(model, optimizer, large) as live:
        many = step(large).peak_bytes
    assert many > few
    assert many >= 0.99 * live.peak_bytes


def test_a_plan_says_the_budget_that_was_asked_for() -> None:
    step = fitted(network(), memory="90 MiB")
    assert step.plan.budget_bytes == step.budget_bytes == 90 << 20
    assert "budget 90 MiB" in str(step.plan)
    assert "no budget" in str(fitted(network(), memory=None).plan)


class TestState:
    def test_it_is_plain_and_a_resumed_step_goes_on_with_its_plans(self, tmp_path: Path) -> None:
        model, data = network(), batch()
        step = fitted(model, micro_batch=5)
        step(data)
        state = step.state_dict()
        assert json.loads(json.dumps(state)) == state
        torch.save(state, tmp_path / "step.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = fitted(copy.deepcopy(model), micro_batch=None)
        again.load_state_dict(torch.load(tmp_path / "step.pt"))
        assert again.plan == step.plan
        assert again(data).micro_batches == step(data).micro_batches == 4
        assert all(map(torch.equal, again.model.parameters(), model.parameters()))

    def test_plans_of_a_version_that_did_not_measure_are_measured(self) -> None:
        model, padded = network(), batch(padding=0.5)
        step = fitted(model)
        old = [
            dataclasses.replace(plan, profile=dataclasses.replace(plan.profile, additivity=None))
            for plan in step.known
        ]
        expected = after_plain_step(model, entropy, padded)
        assert fitted(model, known=old)(padded).weight == int((padded["y"] >= 0).sum())
        assert_parameters(model, expected)

    @pytest.mark.parametrize(
        "state", [{}, [], None, {"version": 1, "plans": [{}], "accumulator": {}}]
    )
    def test_another_state_is_refused(self, state: Any) -> None:
        step = fitted(network())
        with pytest.raises((gf.StateError, gf.MisuseError), match="state"):
            step.load_state_dict(state)
        assert step(batch()).stepped


def test_plan_needs_a_profile() -> None:
    with pytest.raises(gf.MisuseError, match=r"is a Sequential. Pass what gf\.profile"):
        gf.plan(network(), memory="1 MiB")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own, about what it looks at
def test_a_compiled_loss_is_run_as_it_was_written_where_it_is_cut() -> None:
    torch._dynamo.reset()
    model, padded = network(), batch(padding=0.5)
    compiled = torch.compile(entropy, backend="aot_eager")
    step = fitted(model, compiled)
    expected = after_plain_step(model, entropy, padded, steps=4)
    assert all(step(padded).stepped for _ in range(4))
    assert_parameters(model, expected)


def test_the_readme_as_it_stands_on_padded_batches() -> None:
    """`model(**batch).loss` of a causal language model, cut into unequal micro-batches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(0, 40, (ROWS, 12))
    lengths = torch.randint(2, 13, (ROWS, 1))
    mask = (torch.arange(12) < lengths).long()
    data = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    expected = after_plain_step(model, loss_fn, data)
    assert fitted(model, loss_fn, data)(data).micro_batches == 6
    # its loss is computed in float32, whatever the model's type
    assert_parameters(model, expected, atol=1e-8)


def test_a_loss_that_can_be_read_only_uncompiled_is_repeated_so() -> None:
    """As one whose compiled form says nothing of what it divided by."""
    import torch._dynamo.eval_frame as dynamo

    hides = [False]

    def hidden(model: nn.Module, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        is_eager = dynamo._stance.stance == "force_eager"
        return loss.abs() if hides[0] and not is_eager else loss

    model, padded = network(), batch(padding=0.5)
    step = fitted(model, hidden)
    expected = after_plain_step(model, entropy, padded, steps=4)
    hides[0] = True
    # The first steps are measured, for which compiled functions run as they were written anyway.
    attempts = [step(padded).attempts for _ in range(4)]
    assert sorted(attempts)[-2:] == [1, 2]
    assert attempts[-1] == 1
    assert_parameters(model, expected)


@pytest.mark.parametrize("counted", [False, True])
def test_micro_batches_in_which_every_label_is_ignored(counted: bool) -> None:
    """Their mean is NaN, times a count of 0 as well; they add nothing."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss, count = entropy(model, batch), (batch["y"] != -100).sum()
        return gf.Loss(sum=loss * count, count=count) if counted else loss

    model, padded = network(), batch(padding=0.7)
    expected = after_plain_step(model, entropy, padded)
    step = fitted(model, loss_fn, micro_batch=2)
    assert any(bool((rows == -100).all()) for rows in padded["y"].split(2))
    assert step(padded).weight == int((padded["y"] != -100).sum())
    assert_parameters(model, expected)


def test_a_meter_of_a_device_that_is_not_here() -> None:
    with pytest.raises(gf.MisuseError, match="is no device"):
        gf.meter(device="gpu")
    if not torch.accelerator.is_available():
        with pytest.raises(gf.MisuseError, match="which has the CPU alone"):
            gf.meter(device="cuda")


def test_models_without_content_are_refused() -> None:
    batch, optimizer = torch.ones(4, 6), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    lazy = nn.Sequential(nn.LazyLinear(5))
    with pytest.raises(gf.MisuseError, match=r"'0\.weight' has no shape yet.*Call the model"):
        gf.fit(lazy, optimizer, lambda m, x: m(x).mean(), batch, memory=None)
    with torch.device("meta"):
        absent = nn.Linear(6, 5)
    with pytest.raises(gf.MisuseError, match=r"2 of the model's parameters.*to_empty"):
        gf.fit(absent, optimizer, lambda m, x: m(x).mean(), batch, memory=None)
    with pytest.raises(gf.MisuseError, match="fake=True"):
        gf.profile(absent, lambda m, x: m(x).mean(), batch)


def test_a_split_that_gives_no_parts_is_refused_in_words() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gf.MisuseError, match="gave a NoneType, not the parts"):
        gf.fit(
            model,
            optimizer,
            lambda m, b: m(b["x"]).mean(),
            batch(),
            "1 MiB",
            split=lambda b, n: None,
        )
