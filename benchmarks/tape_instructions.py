"""How many instructions the steps of `benchmarks/tape.py` take in each of some trees of gradfit,
counted by valgrind: `python benchmarks/tape_instructions.py TREE…`, each the root of a checkout.

On a machine that others use, too, CPU time differs by more than the few per cent that are asked
about; instructions do not. They are those of small models, where Python is most of a step. The
kernels are torch's plainest: valgrind does not know all vector instructions.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = ("plain", "recorded, all kept", "gf.checkpoint")
MODELS = ("GPT-2, 3 blocks", "ResNet, 3 blocks")
COUNT, WARM_UP = 5, 6


def control(*options: str) -> None:
    subprocess.run(["callgrind_control", *options, str(os.getpid())], capture_output=True)


def run_steps(model: str) -> None:
    """In the child: count while the steps run, and write down the number after each kind."""
    import torch
    from tape import Block, Bottleneck, steps_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if model == MODELS[0]:
        blocks: list[Any] = [Block(64, 4) for _ in range(3)]
        x = torch.randn(1, 16, 64)
    else:
        blocks = [Bottleneck(32) for _ in range(3)]
        x = torch.randn(1, 32, 8, 8)
    steps = steps_of(blocks, x)
    for name in STEPS:
        for _ in range(WARM_UP):
            steps[name]()
    for name in STEPS:
        gc.collect()
        control("-i", "on")
        for _ in range(COUNT):
            steps[name]()
        control(f"--dump={name}")
        control("-i", "off")


def count(tree: Path, model: str) -> list[float]:
    """Millions of instructions of one step of each kind."""
    paths = [str(tree / "src"), str(tree / "benchmarks")]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "ATEN_CPU_CAPABILITY": "default",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                "valgrind", "--tool=callgrind", "--instr-atstart=no",
                f"--callgrind-out-file={folder}/out",
                sys.executable, "-P", __file__, "--run", model,
            ],
            env={**os.environ, **settings},
            capture_output=True,
            check=True,
        )  # fmt: skip
        dumps = [Path(folder, f"out.{number}").read_text() for number in range(1, len(STEPS) + 1)]
    totals = [re.search(r"^totals: (\d+)$", dump, re.MULTILINE) for dump in dumps]
    return [0.0 if total is None else int(total[1]) / COUNT / 1e6 for total in totals]


def main() -> None:
    import torch

    print(
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()},"
        " millions of instructions of one step\n"
    )
    for model in MODELS:
        print(f"{model:24}" + "".join(f"{name:>22}" for name in STEPS))
        for tree in map(Path, sys.argv[1:]):
            numbers = "".join(f"{number:22.3f}" for number in count(tree.resolve(), model))
            print(f"  {tree.name:22}{numbers}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_steps(sys.argv[2])
    else:
        main()
