"""Train the demonstration network on scikit-learn's digits and write its weights.

    python scripts/train_demo.py [--out src/lbyl/app/sources/zoo/digits.safetensors]

Seeded and on one thread, so that the same versions of the libraries give the same file; a minute
or two on one core. Images are shifted by up to one pixel and lightly noised. The loss is plain
cross-entropy with a light weight decay: nothing pushes filters towards zero, which would make
taking them away look easier than it is on networks that people really have.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lbyl.app.data import evaluate, load
from lbyl.app.sources import zoo
from lbyl.runtime.files import whole_file

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "src" / "lbyl" / "app" / "sources" / "zoo" / "digits.safetensors"
EPOCHS, BATCH, RATE, DECAY = 60, 50, 0.05, 1e-4


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to one pixel in both directions and add a little noise."""
    count, _, height, width = images.shape
    edge = images.amin()  # the normalised black of the background
    padded = F.pad(images, (1, 1, 1, 1), value=float(edge))
    shifts = torch.randint(0, 3, (count, 2), generator=generator).tolist()
    moved = [image[:, dy : dy + height, dx : dx + width] for image, (dy, dx) in zip(padded, shifts)]
    return torch.stack(moved) + 0.1 * torch.randn(images.shape, generator=generator)


def train(seed: int = 0) -> nn.Module:
    """The network after all epochs; nothing is chosen by looking at the held-out digits."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, info = zoo.create("digits").train(), zoo.info("digits")
    images, labels = next(load("digits", split="train").batches(10_000, info.mean, info.std))
    assert labels is not None
    steps = EPOCHS * (len(images) // BATCH)
    optimiser = torch.optim.SGD(
        model.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=DECAY
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            loss = F.cross_entropy(model(augment(images[chosen], generator)), labels[chosen])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
    return model.eval()


def write(model: nn.Module, path: Path) -> None:
    """Write the weights whole or not at all."""
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    with whole_file(path) as temporary:
        save_file(state, temporary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = train()
    print(f"held-out accuracy {evaluate('digits', model, load('digits')):.2f} %")
    write(model, out)
    print(f"wrote {out} ({out.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
