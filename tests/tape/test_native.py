"""The native core: built here where there is a compiler, the same tapes as Python's, and a clear
word where there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradfit import _torch_native
from gradfit.errors import InvalidParameter, NativeCoreMissing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def built() -> Path:
    """Compiled once, and found again by later runs."""
    why = _torch_native.why_unsupported()
    if why is not None:
        pytest.skip(why)
    if _torch_native.compiler() is None:
        pytest.skip("no C++ compiler to build the native core with")
    return _torch_native.build()


def run_native(*command: str, setting: str = "1", **settings: str) -> str:
    """What a program printed, which ran with the native core in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", *command],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "GRADFIT_NATIVE": setting,
            **settings,
        },
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.mark.parametrize(
    "first",
    [0, pytest.param(1000, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.slow)],
)
def test_both_cores_write_the_same_tape(built: Path, first: int) -> None:
    """Object by object, for random programs; and the same gradients."""
    count = 150 if first == 0 else 1000
    found = json.loads(
        run_native("-W", "ignore", str(HERE / "native_tapes.py"), str(first), str(count))
    )
    assert found["operations"] > 10 * count


def test_both_cores_follow_a_plan_alike(built: Path) -> None:
    """The native one without asking for each operation."""
    run_native("-W", "ignore", str(HERE / "native_follows.py"))


@pytest.mark.parametrize(
    "tests",
    [
        "tests/tape/test_writes.py",
        "tests/tape/test_interrupted.py",
        "tests/tape/test_listening.py",
        "tests/recompute/test_checkpointing.py",
        "tests/recompute/test_lifetimes.py",
        "tests/recompute/test_tail.py",
        "tests/fitting/test_update_rollback.py",
    ],
)
def test_a_sample_of_the_tests_with_the_native_core(built: Path, tests: str) -> None:
    """`make test-native` runs all of the rooms that record."""
    run_native("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", tests)


_RECORDS = """
import torch, gradfit as gf
x = torch.randn(3, 3, requires_grad=True)
y = gf.checkpoint(lambda x: (x.tanh() * 2).sum(), x)
y.backward()
print(gf.native_core())
"""


def test_a_process_says_which_core_it_uses(built: Path) -> None:
    assert run_native("-c", _RECORDS) == f"native core: {built}\n"
    assert run_native("-c", _RECORDS, setting="auto") == f"native core: {built}\n"
    assert run_native("-c", _RECORDS, setting="0") == "Python core: GRADFIT_NATIVE=0\n"


FIRST_SCOPE = """
import torch, gradfit as gf
from torch.utils._python_dispatch import TorchDispatchMode

class Hears(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        print(op)
        return op(*args, **kwargs or {})

x = torch.ones(2, requires_grad=True)
with Hears(), gf.CheckpointScope("first"):
    x.exp()
"""


def test_connecting_the_core_is_nobodys_operation(built: Path) -> None:
    """It is done when the first recorder begins, which others may be watching."""
    assert run_native("-c", FIRST_SCOPE).split() == ["aten.exp.default"]


COPIES = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from gradfit._torch import flat_copy
from gradfit._torch_native import core

torch.set_num_threads(2)
parameter = torch.nn.Parameter(torch.randn(3, 4))
with torch.inference_mode():
    inferred = torch.ones(2)
for tensors in (
    [parameter, torch.zeros(()), torch.zeros(0, 2), torch.randn(5)],
    [torch.arange(4), torch.arange(2)],
    [torch.randn(3, 5).bfloat16()],
    [torch.randn(at % 37 * 1000 + 1) for at in range(300)],  # by two threads
):
    flat = core().flat_copy(tensors)
    assert torch.equal(flat, torch.cat([one.detach().reshape(-1) for one in tensors]))
    assert not flat.requires_grad and flat.grad_fn is None
    assert {flat.data_ptr()}.isdisjoint(one.data_ptr() for one in tensors)
with FakeTensorMode():
    fake = torch.ones(2)
    assert core().flat_copy([parameter]) is None
for tensors in (
    [], (parameter,), [1], [fake], [inferred], [torch.randn(3, 4).t()], [torch.ones(2).to_sparse()],
    [torch.randn(2, dtype=torch.complex64).conj()], [torch.ones(2, device="meta")],
    [torch.ones(2), torch.ones(2).double()],
):
    assert core().flat_copy(tensors) is None, tensors
core().enable(False)
assert core().flat_copy([parameter]) is None
assert torch.equal(flat_copy([parameter]), parameter.detach().reshape(-1))
"""


def test_the_core_copies_what_python_would_and_leaves_it_the_rest(built: Path) -> None:
    run_native("-c", COPIES)


NORMS = """
import math, torch
from gradfit._torch_native import core
from gradfit.accumulate.scaling import gradient_norm

for gradients in (
    [torch.randn(3, 4), torch.randn(4, 3).t(), torch.zeros(0), torch.randn(())],
    [torch.randn(5).double(), torch.randn(2)],
    [torch.tensor([math.inf, 1.0])],
    [torch.tensor([math.nan])],
    [torch.full((2,), 1e30)],  # whose squares overflow
):
    numbers = core().norms(gradients)
    assert all(type(number) is float for number in numbers)
    core().enable(False)
    assert core().norms(gradients) is None
    expected = gradient_norm(gradients)
    core().enable(True)
    assert repr(gradient_norm(gradients)) == repr(expected), (numbers, expected)
for gradients in (
    [], (torch.ones(1),), [1], [torch.nn.Parameter(torch.ones(1))], [torch.ones(2).to_sparse()],
    [torch.ones(2).bfloat16()], [torch.ones(2), torch.ones(2, dtype=torch.complex64)],
    [torch.ones(2, device="meta")],
):
    assert core().norms(gradients) is None, gradients
"""


def test_the_core_gives_the_norms_of_python_to_the_bit(built: Path) -> None:
    run_native("-c", NORMS)


def test_nothing_is_compiled_that_nobody_asked_for(tmp_path: Path) -> None:
    said = run_native("-c", _RECORDS, setting="auto", GRADFIT_NATIVE_CACHE=str(tmp_path))
    if _torch_native.why_unsupported() is None:
        assert "not built for this torch and Python; `gradfit build-native`" in said
    assert said.startswith("Python core: ")
    assert list(tmp_path.iterdir()) == []


def test_a_core_that_was_asked_for_by_name_and_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADFIT_NATIVE", "1")
    monkeypatch.setenv("GRADFIT_NATIVE_CACHE", str(tmp_path))
    with pytest.raises(NativeCoreMissing, match="GRADFIT_NATIVE=1 asks for the native core"):
        _torch_native._decide()


def test_a_build_that_cannot_be_loaded_is_said_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _torch_native.why_unsupported() is not None:
        pytest.skip("no native core here")
    monkeypatch.setenv("GRADFIT_NATIVE", "auto")
    monkeypatch.setenv("GRADFIT_NATIVE_CACHE", str(tmp_path))
    broken = _torch_native.library_path()
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    core, said = _torch_native._decide()
    assert core is None
    assert not said.used
    assert "cannot be loaded" in said.why
    monkeypatch.setenv("GRADFIT_NATIVE", "1")
    with pytest.raises(NativeCoreMissing, match="cannot be loaded"):
        _torch_native._decide()


def test_another_version_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _torch_native.library_path()
    monkeypatch.setattr(_torch_native.torch.version, "git_version", "another")
    assert _torch_native.library_path() != before


def test_a_setting_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADFIT_NATIVE", "yes")
    with pytest.raises(InvalidParameter, match="'yes', and may be 0, 1 or auto"):
        _torch_native._decide()


def _without(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if _torch_native.why_unsupported() is not None:
        pytest.skip("no native core here")
    monkeypatch.setenv("CXX", what)
    monkeypatch.setattr(_torch_native.shutil, "which", lambda name: what if name == what else None)


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without("", monkeypatch)
    monkeypatch.setenv("GRADFIT_NATIVE_CACHE", str(tmp_path))
    with pytest.raises(NativeCoreMissing, match=r"needs a C\+\+ compiler, and there is none"):
        _torch_native.build()


def test_what_a_compiler_said_is_in_the_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compiler"
    program.write_text("#!/bin/sh\necho 'core.cpp:1: error: no such header' >&2\nexit 1\n")
    program.chmod(0o755)
    cache = tmp_path / "cache"
    _without(str(program), monkeypatch)
    monkeypatch.setenv("GRADFIT_NATIVE_CACHE", str(cache))
    with pytest.raises(NativeCoreMissing, match=r"could not compile.*\n.*no such header"):
        _torch_native.build()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_the_command_builds_and_says_where(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradfit.cli import main

    assert main(["build-native"]) == 0
    assert str(built) in capsys.readouterr().out.replace("\n", "")


STATE = """
import torch
from torch import nn
from gradfit._torch import have_gradients, have_no_gradient
from gradfit._torch_native import core
from gradfit.batches.held_state import HoldersByType, _TORCHS_OWN
from gradfit.batches.model_tree import ModelTree, _held_by

native = core()
model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1)))
tensors = [*model.parameters(), torch.ones(2, requires_grad=True)]
assert native.have_no_gradient(tensors) is True is native.have_no_gradient([])
tensors[-1].grad = torch.zeros(2)
assert native.have_no_gradient(tensors) is False and not have_no_gradient(tensors)
class Own(torch.Tensor):
    grad = "mine"
for others in (tuple(tensors), [1], [torch.ones(1).as_subclass(Own)]):
    assert native.have_no_gradient(others) is None
assert not have_no_gradient([torch.ones(1).as_subclass(Own)])

tree = ModelTree(model)
attributes = [*map(vars, tree.modules)]
held = _held_by(tree.modules)
assert native.hold_the_same(attributes, held) is True
for other in (held[:-1], [*held, None], [None, *held[1:]], held[::-1]):
    assert native.hold_the_same(attributes, other) is False
for unusual in ([{}], [{"_modules": {}, "_parameters": 1}], [1]):
    assert native.hold_the_same(unusual, []) is None
for change in (
    lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(3, 2))),
    lambda: model.append(nn.Linear(1, 1)),
    lambda: setattr(model[0], "bias", None),
    lambda: delattr(model[2], "0"),
):
    walks = tree.walks
    tree.renew()
    assert tree.walks == walks
    change()
    tree.renew()
    assert tree.walks == walks + 1

model.list, model[1].text, model[0].pair = [1], "a", (1, [2])
attributes = [*map(vars, tree.modules)]
for without in (set(), {str}, {int, float, tuple}):
    found = native.values_beside(attributes, _TORCHS_OWN, without)
    expected = [
        value for names in attributes if len(names) > len(_TORCHS_OWN)
        for name, value in names.items() if name not in _TORCHS_OWN and type(value) not in without
    ]
    assert len(found) == len(expected) and all(map(lambda a, b: a is b, found, expected))
assert [1] in HoldersByType().in_attributes(attributes)
assert native.values_beside(attributes, {"a"}, set()) is None
class Meta(type):
    def __hash__(cls):
        raise OSError("no hash")
class Unhashable(metaclass=Meta):
    pass
model.unhashable = Unhashable()
try:
    native.values_beside([*map(vars, tree.modules)], _TORCHS_OWN, {int})
except OSError as error:
    assert str(error) == "no hash"
else:
    raise AssertionError("an error of Python's was lost")
"""


def test_the_core_looks_at_modules_and_gradients_as_python_does(built: Path) -> None:
    run_native("-c", STATE)
