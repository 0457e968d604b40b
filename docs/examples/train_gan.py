"""A complete elastic training with two optimizers: a generative adversarial network that learns to draw from a ring.

Each step trains one of the two networks, in turns. Alone: ``python train_gan.py``. As an Airflow task:
``ElasticTrainOperator(script="train_gan.py", ...)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime

LATENT = 8
MODES, SPREAD = 8, 0.1


def modes() -> Tensor:
    """Centres of the normal distributions, (MODES, 2): on a circle of radius 1."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def ring(samples: int = 4096) -> TensorDataset:
    """Points of the plane, (samples, 2), the same on every machine."""
    generator = torch.Generator().manual_seed(7)
    centres = modes()[torch.randint(MODES, (samples,), generator=generator)]
    return TensorDataset(centres + SPREAD * torch.randn(samples, 2, generator=generator))


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """A network of two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


@torch.no_grad()
def share_near_a_mode(generator: nn.Module, device: torch.device, samples: int = 2000) -> float:
    """Share of what the generator draws that is within three standard deviations of a mode."""
    latent = torch.randn(samples, LATENT, generator=torch.Generator().manual_seed(1))
    drawn = generator(latent.to(device)).cpu()
    return float((torch.cdist(drawn, modes()).amin(dim=1) < 3 * SPREAD).float().mean())


def main() -> None:
    """Train."""
    session = runtime.init(epochs=40)
    loader = session.dataloader(ring(), global_batch_size=64, drop_last=True)
    generator, discriminator = perceptron(LATENT, 2), perceptron(2, 1)
    networks = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    optimizers = [
        torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    ]
    # One model, and each optimizer by a name of its own: all of it is in every checkpoint, and goes to who joins.
    session.register(model=networks, optimizer=optimizers[0], generator_optimizer=optimizers[1])

    for _epoch in session.epochs():
        for batch in loader:
            with session.step() as step:
                for (real,) in step.split(batch):
                    fake = generator(torch.randn(len(real), LATENT, device=real.device))
                    # Whose turn it is follows from the step, and is asked within it: a worker may just have joined.
                    if session.steps_done % 2 == 0:
                        loss = nn.functional.softplus(-discriminator(real)).mean()
                        loss = loss + nn.functional.softplus(discriminator(fake.detach())).mean()
                    else:
                        loss = nn.functional.softplus(-discriminator(fake)).mean()
                    step.backward(loss)
                turn = session.steps_done % 2
                optimizers[turn].step()
                networks.zero_grad()  # of both: the generator's loss has gradients for the discriminator, too
            session.log(**{("discriminator_loss", "generator_loss")[turn]: step.loss})

    session.finish(metrics={"near_a_mode": share_near_a_mode(generator, session.device)})


if __name__ == "__main__":
    main()
