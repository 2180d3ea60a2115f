"""What a page's snippets take for granted: the names that a reader has, and the page does not write
down.
"""

from __future__ import annotations

# A small language model, so that `model(**batch).loss` is there.
LANGUAGE_MODEL = """
import torch, transformers
config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=1, vocab_size=32, n_positions=16)
model = transformers.GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 32, (16, 8))
sample_batch = {"input_ids": ids, "labels": ids}
loader = [sample_batch, sample_batch]
"""

TRAINERS = """
import tempfile, torch, lightning, transformers
from lightning import Trainer as LightningTrainer
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (8, 8))]
arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=1, report_to=[],
    use_cpu=True, save_strategy="no", disable_tqdm=True,
)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def Trainer(**options):
    return LightningTrainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )

module, loader = Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
"""

ONE_RANK = """
import tempfile, torch
import gradfit as gf
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
path = tempfile.mkdtemp()
torch.distributed.init_process_group(
    "gloo", rank=0, world_size=1, store=torch.distributed.FileStore(tempfile.mktemp(), 1)
)
model, loader = torch.nn.Linear(4, 1), torch.randn(24, 4).split([5, 3, 4, 6, 2, 4])

class scheduler:
    step = staticmethod(lambda: None)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

data, loss_fn = torch.randn(8, 4), lambda model, x: model.blocks[0](x).mean()
"""

SETUPS = {
    "README.md": LANGUAGE_MODEL,
    "docs/index.md": LANGUAGE_MODEL,
    "docs/guides/integrations.md": TRAINERS,
    "docs/guides/distributed.md": ONE_RANK,
}
# Run after the last snippet: what shows that its functions work.
CHECKS = {
    "docs/guides/distributed.md": (
        "assert main().batch_size == 512\ntorch.distributed.destroy_process_group()"
    ),
    "docs/guides/cli.md": (
        """
job = make_job()
assert loss_fn(job.model, {key: rows[:4] for key, rows in job.data.items()}) > 0
"""
    ),
    "docs/guides/plan_for_another_machine.md": (
        'assert "predicted on 8 × A100 at batch 1" in str(profile)'
    ),
}
# Process groups, trainers and accelerators leave state behind that other tests would meet.
# Importing them takes seconds, so the trainers' pages share a process.
IN_PROCESSES_OF_THEIR_OWN = (
    ("docs/guides/any_loop.md",),  # all tensors that live count there, those of other tests too
    ("docs/guides/distributed.md",),
    (
        "docs/guides/integrations.md",
        "docs/migrate/accelerate.md",
        "docs/migrate/lightning.md",
        "docs/migrate/transformers.md",
    ),
)
