"""`lbyl finetune`: training, for those who have data and time after all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import UsageError, guarded
from lbyl.cli.screen import Screen, bold, some
from lbyl.cli.setup import build, load_images, measure

if TYPE_CHECKING:
    from lbyl.models import Network

TrainData = Annotated[
    str, typer.Option("--data", help="Labelled training images (its part `train`, if it has one).")
]
TestData = Annotated[str | None, typer.Option(help="Labelled images to measure on.")]
Target = Annotated[Path, typer.Option(help="Directory for weights, history and checkpoints.")]
Epochs = Annotated[int, typer.Option(min=1, help="Times through the images.")]
Rate = Annotated[float, typer.Option(help="Learning rate.")]
Precision = Annotated[str, typer.Option(help="no, fp16 or bf16.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")]
CHECKPOINTS = "checkpoint"


@guarded
def finetune(
    model: o.Model,
    data: TrainData,
    weights: o.Weights = None,
    test_data: TestData = None,
    out: Target = Path("finetuned"),
    epochs: Epochs = 20,
    learning_rate: Rate = 0.01,
    batch_size: o.BatchSize = 128,
    mixed_precision: Precision = "no",
    limit: o.Limit = None,
    resume: Resume = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "auto",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Train a network, original or compressed, on labelled images."""
    screen = Screen(json, quiet)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, classes=classes, threads=threads, trained=False, **scale
    )
    from lbyl.train import TrainConfig, train

    config = TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        mixed_precision=mixed_precision,
        seed=seed,
        augment=not network.flatten,
    )
    pictures = load_images(screen, network, data, "train", limit)
    held = load_images(screen, network, test_data, limit=limit) if test_data else None
    before = measure(screen, network, held, stage="accuracy before") if held else None
    history = train(
        network.model,
        Labelled(pictures, network.flatten),
        None if held is None else Labelled(held, network.flatten),
        config,
        out=out / CHECKPOINTS,
        resume=resume,
        progress=screen.talks,
        mean=network.mean,
        std=network.std,
        cpu=device == "cpu",
    )
    after = measure(screen, network, held, stage="accuracy after") if held else None
    save(network, out, history.to_dict())
    screen.data({"out": str(out), "before": before, "after": after, **history.to_dict()})
    gain = f": {before:.2f} % → [bold]{after:.2f} %[/]" if held else ""
    screen.say(f"trained for {some(len(history), 'epoch')}{gain}", f"wrote {bold(out)}")


class Labelled:
    """An image set as `lbyl.train` reads data: uint8 images (C, H, W), each with its label."""

    def __init__(self, images: Any, flatten: bool) -> None:
        if images.labels is None:
            raise UsageError(f"{images.name} has no labels to learn from")
        self.images, self.labels, self.flatten = images, images.labels, flatten

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        pixels = self.images._image(int(self.images._indices[index]))  # (H, W, C)
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return image, int(self.labels[index])


def save(network: Network, out: Path, history: dict[str, Any]) -> None:
    """The trained weights; a compressed network stays one that `lbyl.load` reads."""
    from lbyl.io import MODEL, PLAN, read_json, write_json, write_tensors
    from lbyl.surgery import tensors

    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / MODEL, tensors(network.model), {"format": "pt"})
    origin = next((p for p in (network.name, network.weights) if p and Path(p).is_dir()), None)
    if origin and (Path(origin) / PLAN).is_file():
        write_json(out / PLAN, read_json(Path(origin) / PLAN))
    write_json(out / "history.json", history)
