"""Training: it learns, it resumes exactly, it shares the work, and it says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lbyl.errors import LbylError
from lbyl.train import TrainConfig, augment_batch, learning_rate_at, train
from lbyl.train.data import Pair as TensorPair
from lbyl.train.data import check_labels, epoch_order, read_batches, training_batches
from lbyl.train.session import Session

pytest.importorskip("accelerate")
Pair = tuple[Tensor, Tensor]
QUICK = TrainConfig(
    epochs=4, batch_size=64, learning_rate=0.1, augment=False, weight_decay=1e-4, seed=3
)


class Stopped(Exception):
    """What a power cut looks like from inside."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def digits() -> tuple[Pair, Pair]:
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    labels = torch.from_numpy(bunch.target).long()
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(128, 10),
    )


def run(model: nn.Module, data: Pair, held_out: Pair | None, config: TrainConfig, **kw: object):
    return train(model, data, held_out, config, progress=False, cpu=True, **kw)  # type: ignore[arg-type]


def test_digits_are_learned(digits: tuple[Pair, Pair]) -> None:
    model = network()
    history = run(model, *digits, QUICK)
    losses = [row["train_loss"] for row in history]
    assert len(history) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert history[-1]["eval_accuracy"] > 0.88
    assert not model.training
    assert json.loads(json.dumps(history.to_dict()))["epochs"][2]["epoch"] == 3


def test_uint8_dataset_with_augmentation_and_a_limit(digits: tuple[Pair, Pair]) -> None:
    (images, labels), held_out = digits
    data = TensorDataset((images * 255).to(torch.uint8), labels)
    config = replace(QUICK, augment=True, limit=700, label_smoothing=0.1, gradient_clip=1.0)
    history = train(
        network(), data, held_out, config, progress=True, mean=[0.3], std=[0.35], cpu=True
    )
    assert history[-1]["train_loss"] < history[0]["train_loss"]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(
    digits: tuple[Pair, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    config = replace(QUICK, augment=True, warmup_epochs=1)
    whole = network()
    expected = run(whole, *digits, config, out=tmp_path / "whole")

    original = Session.train_epoch

    def interrupted(self: object, epoch: int, tick: object) -> float:
        if epoch == stop:
            raise Stopped
        return original(self, epoch, tick)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "train_epoch", interrupted)
    with pytest.raises(Stopped):
        run(network(), *digits, config, out=tmp_path / "cut")
    monkeypatch.undo()
    torch.rand(17)  # the state of the global generator must not matter
    resumed = network(seed=99)  # nor what the weights were before
    history = run(resumed, *digits, config, out=tmp_path / "cut", resume=True)

    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    for ours, theirs in zip(history, expected):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    momenta = [load_file(tmp_path / d / "checkpoint-000004/optimizer.safetensors") for d in DIRS]
    assert momenta[0].keys() == {n for n, _ in whole.named_parameters()}
    assert all(torch.equal(momenta[0][name], momenta[1][name]) for name in momenta[0])


DIRS = ("whole", "cut")


def test_a_checkpoint_is_tensors_and_json_only(digits: tuple[Pair, Pair], tmp_path: Path) -> None:
    model = network()
    run(model, *digits, replace(QUICK, epochs=2), out=tmp_path)
    (folder,) = tmp_path.iterdir()  # the first epoch's has been replaced, nothing half-written left
    assert {p.name for p in folder.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
    state = json.loads((folder / "state.json").read_text())
    assert (state["epoch"], state["step"], state["seed"]) == (2, 44, 3)
    finished = network(seed=5)
    run(finished, *digits, replace(QUICK, epochs=2), out=tmp_path, resume=True)
    assert torch.equal(finished[0].weight, model[0].weight)


def test_training_leaves_no_trace_on_the_model_or_the_generator(digits: tuple[Pair, Pair]) -> None:
    model = network()
    keys = set(model.__dict__)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(model, digits[0], None, replace(QUICK, epochs=1, mixed_precision="bf16"))
    assert torch.equal(torch.rand(3), expected)
    assert set(model.__dict__) == keys
    assert model(digits[1][0][:2]).dtype == torch.float32
    run(model, digits[0], None, replace(QUICK, epochs=1))  # another precision afterwards


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TrainConfig(epochs=10, learning_rate=1, schedule="constant"), {0: 1, 99: 1}),
        (
            TrainConfig(epochs=10, learning_rate=1, schedule="step"),
            {0: 1, 29: 1, 30: 0.2, 59: 0.2, 60: 0.04, 80: 0.008, 99: 0.008},
        ),
        (TrainConfig(epochs=10, learning_rate=1), {0: 1, 50: 0.5, 100: 0}),
        (
            TrainConfig(epochs=10, learning_rate=1, warmup_epochs=2),
            {0: 0.05, 9: 0.5, 19: 1, 20: 1, 60: 0.5, 100: 0},
        ),
    ],
)
def test_schedules(config: TrainConfig, expected: dict[int, float]) -> None:
    for step, rate in expected.items():
        assert learning_rate_at(config, step, 10) == pytest.approx(rate, abs=1e-12), step


def test_shares_of_a_batch_are_equal_and_cover_it() -> None:
    order = epoch_order(103, TrainConfig(), 5)
    assert torch.equal(order, epoch_order(103, TrainConfig(), 5))
    assert not torch.equal(order, epoch_order(103, TrainConfig(), 6))
    shares = [training_batches(order, 20, rank, 3) for rank in range(3)]
    assert [len(b) for b in shares[0]] == [len(b) for b in shares[2]] == [7, 7, 7, 7, 7]
    for whole, *parts in zip(order.split(20), *shares):
        assert {i for part in parts for i in part} == set(whole.tolist())
    assert len(training_batches(torch.arange(41), 20, 0, 1)) == 2  # a lone image is left out
    limited = TrainConfig(limit=10)
    chosen = [set(epoch_order(103, limited, epoch).tolist()) for epoch in (0, 1)]
    assert len(chosen[0]) == 10
    assert chosen[0] == chosen[1]


def test_tensors_on_the_device_give_the_batches_a_loader_gives(digits: tuple[Pair, Pair]) -> None:
    images, labels = digits[0]
    batches = training_batches(epoch_order(len(labels), QUICK, 2), 64, 0, 1)
    cpu = torch.device("cpu")
    here = list(read_batches(TensorPair(images, labels), batches, cpu, 0, 10))
    loaded = list(read_batches(TensorDataset(images, labels), batches, cpu, 0, 10))
    assert len(here) == len(loaded) == len(batches)
    for ours, theirs in zip(here, loaded):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_both_ways_of_reading_learn_the_same(digits: tuple[Pair, Pair]) -> None:
    config = replace(QUICK, epochs=2, augment=True)
    pair, loaded = network(), network()
    pair[5] = loaded[5] = nn.Identity()  # a loader draws a number of its own, which dropout sees
    ours = run(pair, *digits, config)
    theirs = run(loaded, TensorDataset(*digits[0]), TensorDataset(*digits[1]), config)  # type: ignore[arg-type]
    assert [{**row, "seconds": 0} for row in ours] == [{**row, "seconds": 0} for row in theirs]
    assert torch.equal(pair[0].weight, loaded[0].weight)


def test_evaluation_may_be_rare_and_in_larger_batches(digits: tuple[Pair, Pair]) -> None:
    often, rarely = network(), network()
    expected = run(often, *digits, QUICK)
    history = run(rarely, *digits, replace(QUICK, eval_every=3, eval_batch_size=400))
    assert [row["eval_accuracy"] is None for row in history] == [True, True, False, False]
    assert history[-1]["eval_accuracy"] == expected[-1]["eval_accuracy"]
    assert torch.equal(often[0].weight, rarely[0].weight)


def test_probabilities_are_learned_from(digits: tuple[Pair, Pair]) -> None:
    (images, labels), held_out = digits
    soft = 0.9 * nn.functional.one_hot(labels, 10) + 0.01
    history = run(network(), (images, soft), held_out, QUICK)
    assert history[-1]["eval_accuracy"] > 0.88
    # Smoothed labels are one case of probabilities, so the two must agree.
    smoothed = run(network(), (images, labels), held_out, replace(QUICK, label_smoothing=0.1))
    assert history[-1]["train_loss"] == pytest.approx(smoothed[-1]["train_loss"], rel=1e-4)
    with pytest.raises(LbylError, match="one whole number an image"):
        run(network(), (images, soft), (images, soft), QUICK)
    with pytest.raises(LbylError, match="probabilities of 10 classes"):
        check_labels(TensorPair(images, soft), 12, "training data")
    with pytest.raises(LbylError, match="add up to 1"):
        check_labels(TensorPair(images, 2 * soft), 10, "training data")


def test_augmentation_shifts_and_mirrors() -> None:
    image = torch.arange(1, 257, dtype=torch.float32).view(1, 1, 16, 16)
    batch = augment_batch(image.repeat(200, 1, 1, 1), torch.Generator().manual_seed(0))
    assert batch.shape == (200, 1, 16, 16)
    padded = nn.functional.pad(image, (2, 2, 2, 2))
    allowed = {
        tuple(window.flatten().tolist())
        for y in range(5)
        for x in range(5)
        for crop in [padded[0, 0, y : y + 16, x : x + 16]]
        for window in (crop, crop.flip(1))
    }
    seen = {tuple(item.flatten().tolist()) for item in batch}
    assert seen <= allowed
    assert len(seen) > 40


def test_mistakes_are_named(digits: tuple[Pair, Pair], tmp_path: Path) -> None:
    images, labels = digits[0]
    quick = replace(QUICK, epochs=1)
    with pytest.raises(LbylError, match=r"0 to 11.*10 classes"):
        run(network(), (images, labels.clone().fill_(0).index_fill_(0, LAST, 11)), None, quick)
    with pytest.raises(LbylError, match="labels run from 0 to 11"):
        run(network(), TensorDataset(images[:4], torch.tensor([0, 1, 2, 11])), None, quick)  # type: ignore[arg-type]
    with pytest.raises(LbylError, match="training data is empty"):
        run(network(), (images[:0], labels[:0]), None, quick)
    with pytest.raises(LbylError, match="evaluation data is empty"):
        run(network(), (images, labels), (images[:0], labels[:0]), quick)
    with pytest.raises(LbylError, match="1400 images but 3 labels"):
        run(network(), (images, labels[:3]), None, quick)
    with pytest.raises(LbylError, match="one whole number an image"):
        run(network(), (images, labels.float()), None, quick)
    with pytest.raises(LbylError, match="nothing to resume"):
        run(network(), (images, labels), None, quick, out=tmp_path, resume=True)
    with pytest.raises(LbylError, match="mean and std"):
        run(network(), (images, labels), None, quick, mean=[0.5])
    with pytest.raises(LbylError, match="lower the learning rate"):
        run(network(), (images, labels), None, replace(quick, learning_rate=1e30))
    with pytest.raises(LbylError, match="augment=False"):
        flat = nn.Linear(64, 10)
        run(flat, (images.flatten(1), labels), None, replace(quick, augment=True))


LAST = torch.tensor([-1])


def test_resuming_checks_the_settings_and_the_files(
    digits: tuple[Pair, Pair], tmp_path: Path
) -> None:
    quick = replace(QUICK, epochs=1)
    run(network(), digits[0], None, quick, out=tmp_path)
    with pytest.raises(LbylError, match="is there already"):
        run(network(), digits[0], None, quick, out=tmp_path)
    with pytest.raises(LbylError, match=r"learning_rate was 0\.1, is 0\.2"):
        other = replace(quick, learning_rate=0.2)
        run(network(), digits[0], None, other, out=tmp_path, resume=True)
    with pytest.raises(LbylError, match="images was 1400, is 397"):
        run(network(), digits[1], None, quick, out=tmp_path, resume=True)
    with pytest.raises(LbylError, match="cannot be resumed with this model"):
        flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        run(flat, digits[0], None, quick, out=tmp_path, resume=True)
    state = tmp_path / "checkpoint-000001" / "state.json"
    whole = state.read_text()
    for history in ([], {}, [{}, {}], [3]):
        state.write_text(json.dumps({**json.loads(whole), "history": history}))
        with pytest.raises(LbylError, match="cannot be resumed"):
            run(network(), digits[0], None, quick, out=tmp_path, resume=True)
    state.write_text(whole)
    (tmp_path / "checkpoint-000001" / "optimizer.safetensors").write_bytes(b"not tensors")
    with pytest.raises(LbylError, match="cannot be resumed"):
        run(network(), digits[0], None, quick, out=tmp_path, resume=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "sometimes"},
        {"mixed_precision": "fp4"},
        {"epochs": 0},
        {"learning_rate": 0.0},
        {"limit": 0},
        {"momentum": 0.0},
        {"warmup_epochs": 21},
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(LbylError, match=next(iter(wrong))):
        TrainConfig(**wrong)  # type: ignore[arg-type]


SCRIPT = """
import sys, torch
from torch import nn
from sklearn.datasets import load_digits
from safetensors.torch import save_file
from lbyl.train import TrainConfig, train

torch.set_num_threads(1)
bunch = load_digits()
images = torch.from_numpy(bunch.images).float()[:, None] / 16
labels = torch.from_numpy(bunch.target).long()
import os
rank = os.environ["RANK"]
torch.manual_seed(int(rank))  # different beginnings: the processes must agree all the same
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                      nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
out = sys.argv[1]
config = TrainConfig(epochs=3, batch_size=63, learning_rate=0.1, augment=False)
history = train(model, (images[:1400], labels[:1400]), (images[1400:], labels[1400:]), config,
                out=out + "/run", progress=False, cpu=True)
assert torch.distributed.get_world_size() == 2
save_file(model.state_dict(), f"{out}/rank{rank}.safetensors",
          {"accuracy": str(history[-1]["eval_accuracy"]), "loss": str(history[-1]["train_loss"])})
torch.distributed.barrier()  # nobody goes while the other still has something to say
torch.distributed.destroy_process_group()
"""


def test_two_processes_share_the_work_and_agree(tmp_path: Path) -> None:
    from safetensors import safe_open

    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1)]
    for name, value in ranks[0].items():
        assert torch.equal(value, ranks[1][name]), name
    said = []
    for rank in (0, 1):
        with safe_open(tmp_path / f"rank{rank}.safetensors", "pt") as file:
            said.append(file.metadata())
    assert said[0] == said[1]
    assert float(said[0]["accuracy"]) > 0.85
    written = load_file(tmp_path / "run" / "checkpoint-000003" / "model.safetensors")
    assert torch.equal(written["0.weight"], ranks[0]["0.weight"])
