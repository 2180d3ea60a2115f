"""A Hugging Face model as a job for the command line: a small GPT-2, random weights, on text that
ships with gradfit.

    gradfit profile examples/huggingface_job.py:make_job
    gradfit plan    examples/huggingface_job.py:make_job --memory '48 MiB'
    gradfit train examples/huggingface_job.py:make_job --memory '48 MiB' --steps 50 --out runs/gpt2
    gradfit audit   examples/huggingface_job.py:make_job --memory '48 MiB'

Any of them writes a page with --report page.html. Run as a script, it makes three steps by hand.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gradfit as gf
from gradfit.runs.builtin_text import Windows, prose


def make_job() -> gf.Job:
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 96, "n_layer": 4, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    data = Windows(prose(), length=64, stride=32)
    return gf.Job(model, loss_sum_and_count, data, optimizer, batch_size=32, scheduler=scheduler)


def loss_sum_and_count(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A sum over tokens and how many there are: the items of a language model's loss are tokens,
    not rows.
    """
    logits = model(input_ids=tokens).logits[:, :-1]
    targets = tokens[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return loss, targets.numel()


if __name__ == "__main__":
    torch.manual_seed(0)
    job = make_job()
    batches = torch.utils.data.DataLoader(job.data, batch_size=job.batch_size, shuffle=True)
    step = gf.fit(
        job.model, job.optimizer, job.loss_fn, next(iter(batches)), memory="48 MiB", batch_size=32
    )
    print(step.plan)
    for _, batch in zip(range(3), batches, strict=False):
        result = step(batch)
        job.scheduler.step()
        print(f"loss {result.loss:.3f}, peak {result.peak_bytes / 2**20:.1f} MiB")
