"""A GAN: two models, two optimizers, two steps, each in its own budget. The generator's loss runs
through both models.

A step owns its window: what the generator's backward leaves in the discriminator's `.grad` is not
the discriminator's next update, here as little as in the plain loop with its `zero_grad()`.
"""

import copy

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import gradfit as gf

torch.manual_seed(0)


def network(inputs, outputs):
    layers = [torch.nn.Linear(inputs, 64)]
    for _ in range(3):
        layers += [torch.nn.LeakyReLU(0.2), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, outputs)).double()


def discriminator_loss(discriminator, batch):
    real, fake = discriminator(batch["real"]), discriminator(batch["fake"])
    return cross_entropy(real, torch.ones_like(real)) + cross_entropy(fake, torch.zeros_like(fake))


def generator_loss_with(discriminator):
    def generator_loss(generator, noise):
        judged = discriminator(generator(noise))
        return cross_entropy(judged, torch.ones_like(judged))

    return generator_loss


generator, discriminator = network(8, 2), network(2, 1)
plain_generator, plain_discriminator = copy.deepcopy(generator), copy.deepcopy(discriminator)
angles = torch.rand(4, 256, 1, dtype=torch.float64) * 6.28
real = torch.cat([angles.cos(), angles.sin()], dim=2)  # points on a circle
noise = torch.randn(4, 2, 256, 8, dtype=torch.float64)


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


with torch.no_grad():
    sample = {"real": real[0], "fake": generator(noise[0, 0])}
step_discriminator = gf.fit(
    discriminator, optimizer_of(discriminator), discriminator_loss, sample, memory="700 KiB"
)
step_generator = gf.fit(
    generator,
    optimizer_of(generator),
    generator_loss_with(discriminator),
    noise[0, 1],
    memory="900 KiB",
)
print("discriminator:", step_discriminator.plan)
print("generator:", step_generator.plan)
for batch, (first, second) in zip(real, noise, strict=True):
    with torch.no_grad():
        fake = generator(first)
    judged = step_discriminator({"real": batch, "fake": fake})
    fooled = step_generator(second)
print(f"discriminator's loss {judged.loss:.4f}, generator's {fooled.loss:.4f}")

# The loop that everybody writes.
optimizers = optimizer_of(plain_discriminator), optimizer_of(plain_generator)
generator_loss = generator_loss_with(plain_discriminator)
for batch, (first, second) in zip(real, noise, strict=True):
    with torch.no_grad():
        fake = plain_generator(first)
    optimizers[0].zero_grad()
    discriminator_loss(plain_discriminator, {"real": batch, "fake": fake}).backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    generator_loss(plain_generator, second).backward()
    optimizers[1].step()
for ours, plain in ((generator, plain_generator), (discriminator, plain_discriminator)):
    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )
    print(f"largest difference of a parameter to the plain loop: {difference:.1e}")
    assert difference < 1e-9
assert step_discriminator.plan.steps > 1
