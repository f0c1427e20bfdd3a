"""`lbyl finetune`: training, for those who have data and time after all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.files import DEPLOYMENT, command, origin
from lbyl.app.cli.screen import Screen, bold
from lbyl.app.cli.setup import Accuracies, build, check_writable, load_images
from lbyl.app.data import ImageSet
from lbyl.app.sources import Network
from lbyl.runtime.files import write_json, write_tensors
from lbyl.runtime.format import counted
from lbyl.runtime.tensors import tensors
from lbyl.storage.files import ATTRIBUTES, MODEL, PLAN, notes_beside
from lbyl.train import History, TrainConfig
from lbyl.train import train as run_training

_training = partial(o.option, "Training")

Train = Annotated[
    str,
    o.images_option(
        "--train",
        metavar="PATH",
        help="Labelled training images (its part `train`, if it has one).",
    ),
]
Target = Annotated[
    Path, o.output_option(metavar="DIR", help="Directory for weights, history and checkpoints.")
]
Epochs = Annotated[int, _training(metavar="N", min=1, help="Times through the images.")]
Rate = Annotated[float, _training(metavar="NUMBER", help="Learning rate.")]
Precision = Annotated[str, _training(metavar="NAME", help="no, fp16 or bf16.")]
Resume = Annotated[bool, _training("--resume", help="Go on from the checkpoint in --out.")]
CHECKPOINTS = "checkpoint"


@guarded
def finetune(
    model: o.Model,
    train: Train,
    weights: o.Weights = None,
    test: o.Test = None,
    out: Target = Path("finetuned"),
    epochs: Epochs = 20,
    learning_rate: Rate = 0.01,
    batch_size: o.BatchSize = 128,
    mixed_precision: Precision = "no",
    limit: o.Limit = None,
    resume: Resume = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
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
    check_writable(out)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, task=task, classes=classes, threads=threads, trained=False, **scale
    )
    config = TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        mixed_precision=mixed_precision,
        seed=seed,
        augment=not network.flatten,
    )
    images = Labelled(load_images(screen, network, train, "train", limit))
    accuracy = Accuracies.on(screen, network, test, limit)
    accuracy.measure("before", "accuracy before")
    history = run_training(
        network.model,
        images,
        None if accuracy.images is None else Labelled(accuracy.images),
        config,
        out=out / CHECKPOINTS,
        resume=resume,
        progress=screen.talks,
        mean=network.mean,
        std=network.std,
        cpu=device == "cpu",
    )
    accuracy.measure("after", "accuracy after")
    save(network, out, history.to_dict(), accuracy.found.get("after"))
    show(screen, out, history, accuracy.found)


def show(screen: Screen, out: Path, history: History, accuracy: dict[str, float]) -> None:
    """What training brought, and its loss; or all of it as JSON."""
    before, after = accuracy.get("before"), accuracy.get("after")
    screen.data({"out": str(out), "before": before, "after": after, **history.to_dict()})
    gain = "" if before is None else f": {before:.2f} % → [bold]{after:.2f} %[/]"
    screen.say(f"trained for {counted(len(history), 'epoch')}{gain}")
    losses = [row["train_loss"] for row in history]
    if losses:
        screen.say(
            f"training loss {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last"
        )
    screen.say(f"wrote {bold(out)}")


class Labelled(torch.utils.data.Dataset[tuple[Any, int]]):
    """An image set as `lbyl.train` reads data: uint8 images (C, H, W), each with its label."""

    def __init__(self, images: ImageSet) -> None:
        if images.labels is None:
            raise UsageError(f"{images.name} has no labels to learn from")
        self.images, self.labels = images, images.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = self.images._source[int(self.images._indices[index])]  # (H, W, C)
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return image, int(self.labels[index])


def save(
    network: Network, out: Path, history: dict[str, Any], accuracy: float | None = None
) -> None:
    """The trained weights; a compressed network stays one that `lbyl.load` reads."""
    out.mkdir(parents=True, exist_ok=True)
    document = origin(network)
    values = tensors(network.model)
    notes = notes_beside(values, (document or {}).get(ATTRIBUTES, {}))
    write_tensors(out / MODEL, values, notes)
    if document is not None:
        write_json(out / PLAN, trained(document, history, accuracy))
    write_json(out / "history.json", history)


def trained(
    document: dict[str, Any], history: dict[str, Any], accuracy: float | None
) -> dict[str, Any]:
    """plan.json of a network that was trained since: what was measured of it holds no longer."""
    made = {k: v for k, v in document.items() if k not in ("accuracy", "latency", DEPLOYMENT)}
    epochs = counted(len(history.get("epochs", [])), "epoch")
    result = {**document.get("result", {}), "forecast": None}
    commands = [*document.get("earlier", []), document.get("command")]
    made |= {"result": result, "earlier": commands, "command": command()}
    made["afterwards"] = f"Trained for {epochs} afterwards."
    if accuracy is not None:
        made["accuracy"] = {"slim": accuracy}
    return made
