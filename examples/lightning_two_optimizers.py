"""Lightning, manual optimization, two optimizers: `self.optimizers()` goes into `gf.fit` as it is.

Each step counts as one for Lightning: `global_step`, checkpoints and schedules go on as they do
without gradfit.
"""

import copy
import warnings

import lightning as L
import torch
from torch.nn.functional import mse_loss

import gradfit as gf

warnings.filterwarnings("ignore", module="lightning")


def network(inputs, outputs):
    layers = [torch.nn.Linear(inputs, 64)]
    for _ in range(3):
        layers += [torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, outputs)).double()


def encoder_loss(encoder, x):
    return mse_loss(encoder(x), x[:, :4])


def decoder_loss(decoder, batch):
    return mse_loss(decoder(batch["code"]), batch["x"])


class Module(L.LightningModule):
    """An encoder and a decoder, each with an optimizer of its own."""

    def __init__(self, memory):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.encoder, self.decoder = network(8, 4), network(4, 8)
        self.memory, self.steps = memory, None

    def configure_optimizers(self):
        return [
            torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.encoder, self.decoder)
        ]

    def training_step(self, x, batch_idx):
        if self.memory is None:
            self.plain_step(x)
            return
        with torch.no_grad():
            code = self.encoder(x)
        if self.steps is None:
            first, second = self.optimizers()
            self.steps = (
                gf.fit(self.encoder, first, encoder_loss, x, memory=self.memory),
                gf.fit(
                    self.decoder, second, decoder_loss, {"code": code, "x": x}, memory=self.memory
                ),
            )
        self.log("encoder", self.steps[0](x).loss)
        self.log("decoder", self.steps[1]({"code": code, "x": x}).loss)

    def plain_step(self, x):
        with torch.no_grad():
            code = self.encoder(x)
        for name, optimizer in zip(("encoder", "decoder"), self.optimizers(), strict=True):
            loss = (
                encoder_loss(self.encoder, x)
                if name == "encoder"
                else decoder_loss(self.decoder, {"code": code, "x": x})
            )
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(name, loss)


rows = torch.randn(1024, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(memory):
    module = Module(memory)
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=256))
    return module, trainer.global_step, copy.copy(trainer.callback_metrics)


ours, ours_global_step, ours_logged = trained("700 KiB")
plain, plain_global_step, plain_logged = trained(None)
print(ours.steps[0].plan)
print(f"global_step {ours_global_step}, without gradfit {plain_global_step}")
print({name: round(float(value), 4) for name, value in ours_logged.items()})
difference = max(
    (a - b).abs().max().item() for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
)
print(f"largest difference of a parameter to plain Lightning: {difference:.1e}")
assert ours.steps[0].plan.steps > 1
assert ours_global_step == plain_global_step == 16
assert difference < 1e-9
assert all(abs(float(ours_logged[name] - plain_logged[name])) < 1e-6 for name in plain_logged)
