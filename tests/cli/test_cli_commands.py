"""Each command on a user's file: what it prints, what --json gives, what it writes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradfit.cli import main
from gradfit.fitting.audit import AuditReport
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile

Call = Callable[..., subprocess.CompletedProcess[str]]
MEMORY = "40 KiB"  # in which a step must be split or rebuilt


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "job.py:make", "--json"]) == 0
    found = Profile.from_json(capsys.readouterr().out)
    assert found.batch_size == 16
    assert any("job.py" in operation.source for operation in found.operations)
    assert main(["profile", "job.py:make", "--batch-size", "8"]) == 0
    assert "at batch 8" in capsys.readouterr().out


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.py:make", "--memory", MEMORY, "--json"]) == 0
    made = Plan.from_json(capsys.readouterr().out)
    assert made.peak_bytes <= made.budget_bytes == 40 * 1024
    assert main(["plan", "job.py:make", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["frontier"]
    peaks = [Plan.from_json(json.dumps(plan)).peak_bytes for plan in plans]
    assert len(peaks) > 1
    assert peaks == sorted(peaks, reverse=True)


WORDS = """
import torch, gradfit
from torch import nn

def make():
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 4000, bias=False))
    tokens = torch.randint(0, 4000, (4, 256), generator=torch.Generator().manual_seed(1))
    def loss(model, tokens):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return gradfit.Job(model, loss, tokens, torch.optim.SGD(model.parameters(), lr=0.1), 2)
"""


def test_plans_below_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows' logits beside parameters and gradients."""
    (folder / "words.py").write_text(WORDS)
    memory = str(4 * 4000 * 16 * 4 + 2 * 256 * 4000 * 4)
    assert main(["plan", "words.py:make", "--memory", memory]) == 0
    assert "tiles of 1" in capsys.readouterr().out
    assert main(["plan", "words.py:make", "--memory", memory, "--no-tile"]) != 0
    assert "With tile=True the smallest is" in capsys.readouterr().err


def test_audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "job.py:make", "--memory", MEMORY, "--json"]) == 0
    found = AuditReport.from_json(capsys.readouterr().out)
    assert found.identical
    assert found.compared["gradient"] == 4


def test_train_writes_state_model_scalars_and_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--memory",
        MEMORY,
        "--epochs",
        "2",
        "--out",
        "run",
        "--log-every",
        "3",
        "--seed",
        "4",
    ]
    assert (
        main(["train", "job.py:make", *options, "--tensorboard", "--report", "page.html", "--json"])
        == 0
    )
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["step"] == 12  # 96 rows, 16 to an update, twice
    assert len(found["losses"]) == 12
    assert found["losses"][-1] < found["losses"][0]
    assert found["peak_bytes"] <= found["budget_bytes"] == 40 * 1024
    assert "exactness: the parts of a batch add up, by items" in said.err
    assert found["exactness"]["adds_up"] is True
    assert found["exactness"]["error"] < 1e-5
    assert "step 3/12" in said.err
    assert "step 4/12" not in said.err
    model = load_file(folder / "run" / "model.safetensors")
    assert set(model) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert list((folder / "run" / "tensorboard").iterdir())
    assert "<svg" in (folder / "page.html").read_text()
    assert not list((folder / "run").glob("*.pt")) + list((folder / "run").glob("*.pkl"))


def test_the_same_seed_gives_the_same_parameters(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for number, seed in enumerate(("1", "1", "2")):
        options = [
            "--memory",
            MEMORY,
            "--steps",
            "5",
            "--out",
            f"run{number}",
            "--seed",
            seed,
            "--json",
        ]
        assert main(["train", "job.py:make", *options]) == 0
        found.append(json.loads(capsys.readouterr().out)["parameters_sha256"])
    assert found[0] == found[1] != found[2]


def test_resume_goes_on_and_extends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    through = ["train", "job.py:make", "--memory", MEMORY, "--json"]
    assert main([*through, "--steps", "9", "--out", "through"]) == 0
    expected = json.loads(capsys.readouterr().out)["parameters_sha256"]
    assert main([*through, "--steps", "4", "--out", "parts"]) == 0
    assert (
        main(["train", "job.py:make", "--out", "parts", "--resume", "--steps", "9", "--json"]) == 0
    )
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["parameters_sha256"] == expected
    assert "Resuming at step 4" in said.err
    newest = sorted((folder / "parts").glob("state-*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert (
        main(["train", "job.py:make", "--out", "parts", "--resume", "--steps", "9", "--json"]) == 0
    )
    said = capsys.readouterr()
    assert "Passed over state-00000009-0000" in said.err
    assert "the one before" in said.err
    assert json.loads(said.out)["parameters_sha256"] == expected


def test_without_out_the_run_has_a_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("job-make", "job-make-2"):
        assert main(["train", "job.py:make", "--steps", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["out"] == f"runs/{name}"
    assert main(["train", "job.py:make", "--steps", "2", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == "runs/job-make-2"


def test_a_module_is_a_target_and_json_is_all_of_stdout(gradfit: Call) -> None:
    done = gradfit("plan", "job:make", "--memory", MEMORY, "--json")
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout).budget_bytes == 40 * 1024


@pytest.mark.parametrize("name", ["gpt", "bert", "vit", "resnet"])
def test_built_in_jobs_plan(name: str) -> None:
    """The jobs at a fraction of their size: the same code, in seconds."""
    import gradfit as gf
    from gradfit.runs import builtin_jobs as builtin
    from gradfit.runs.batch_stream import Batches

    small = {
        "gpt": {"layers": 1, "width": 24, "length": 16},
        "bert": {"layers": 1, "width": 24, "length": 16},
        "vit": {"layers": 1, "width": 16},
        "resnet": {"blocks": 1, "width": 4},
    }
    job = getattr(builtin, name)(**small[name], batch_size=4)
    batches = Batches(job.data, batch_size=4)
    losses = []
    for _ in range(3):
        batch = batches.next()
        result = job.loss_fn(job.model, batch)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(loss > 0 for loss in losses)
    assert gf.audit(job.model, job.loss_fn, batches.next()).identical


def test_the_guide_s_job_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/cli.md").read_text()
    (folder / "guide.py").write_text(guide.split("```python")[1].split("```")[0])
    assert (
        main(
            [
                "train",
                "guide.py:make_job",
                "--memory",
                "4 MiB",
                "--steps",
                "3",
                "--out",
                "run",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["batch_size"] == 512


@pytest.mark.slow
@pytest.mark.parametrize("command", ["profile", "plan", "train", "audit"])
def test_the_hugging_face_example_works_with_every_command(gradfit: Call, command: str) -> None:
    target = f"{Path(__file__).parents[2] / 'examples/huggingface_job.py'}:make_job"
    more = {"profile": [], "train": ["--steps", "3", "--out", "run"]}.get(command, [])
    budget = [] if command == "profile" else ["--memory", "48 MiB"]
    done = gradfit(command, target, *budget, *more, "--report", "page.html", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_the_micro_batch_can_be_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, cut in (("5", (5, 4)), ("whole", (16, 1))):
        assert (
            main(["plan", "job.py:make", "--memory", "1 MiB", "--micro-batch", given, "--json"])
            == 0
        )
        plan = Plan.from_json(capsys.readouterr().out)
        assert (plan.micro_batch, plan.steps) == cut
        assert main(["audit", "job.py:make", "--micro-batch", given, "--json"]) == 0
        report = AuditReport.from_json(capsys.readouterr().out)
        assert (report.micro_batch, report.micro_batches) == cut
        assert report.exact
        options = ["--memory", "1 MiB", "--micro-batch", given, "--steps", "2", "--out", given]
        assert main(["train", "job.py:make", *options]) == 0
        assert f"micro-batch {cut[0]} × {cut[1]}" in capsys.readouterr().err
        assert main(["train", "job.py:make", "--resume", "--out", given, "--steps", "3"]) == 0
        assert f"micro-batch {cut[0]} × {cut[1]}" in capsys.readouterr().err
    assert (
        main(
            [
                "train",
                "job.py:make",
                "--resume",
                "--out",
                "whole",
                "--micro-batch",
                "5",
                "--steps",
                "4",
            ]
        )
        != 0
    )
    assert "begun with micro_batch whole, not 5" in capsys.readouterr().err
    for wrong in ("0", "-1", "half"):
        assert main(["plan", "job.py:make", "--memory", "1 MiB", "--micro-batch", wrong]) == 2
        assert "Pass an int of at least 1, or 'whole'" in capsys.readouterr().err


def test_plan_says_what_is_predicted_and_whether_parts_add_up(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "job.py:make", "--memory", MEMORY]) == 0
    said = capsys.readouterr().out
    assert "predicted: peak " in said
    assert (
        "exactness: the parts of a batch add up, by items (measured on a few rows: relative error "
        in said
    )
    assert main(["plan", "job.py:make", "--report", "page.html"]) == 0
    said = capsys.readouterr().out
    assert "micro-batch × count" in said
    assert "predicted from a measured profile" in said
    sizes = re.findall(r"(\d+) × (\d+)", said)  # which of them are worth it is the clock's to say
    assert sizes
    assert all(int(rows) * int(count) >= 16 for rows, count in sizes)
    page = (folder / "page.html").read_text().split("</style>")[1].split("<script>")[0]
    assert "Memory against time" in page
    assert "Chosen" not in page
