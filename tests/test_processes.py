"""Two processes on one network give what one gives: real ones, which talk through gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lbyl

pytestmark = pytest.mark.slow
Outcomes = dict[str, dict[str, torch.Tensor]]

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import lbyl
from lbyl.inputs import batches  # private: many small batches, so that there is something to share
from lbyl.app.sources import zoo

torch.set_num_threads(1)
batches.BATCH_PIXELS = 16 * 64
rank, size = 0, 1
if len(sys.argv) > 2:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
model = zoo.create("digits", "shipped")
ran = []
model.register_forward_hook(lambda *_: ran.append(1))
prepared = lbyl.prepare(model, torch.zeros(1, 1, 8, 8), data=96)
statistics = prepared.statistics()
collecting = len(ran)
by_ratio = prepared.compress({"*": 0.5}, criterion="echo")
by_budget = prepared.compress(lbyl.Budget(macs=0.6))
refined = prepared.refine(by_ratio, 6)
out = {"collecting": torch.tensor(collecting), "loss": torch.tensor(refined.refinement.loss_after)}
for name, moments in statistics.moments.items():
    out[f"mean {name}"] = moments.mean
    out[f"covariance {name}"] = moments.covariance
for kind, result in (("ratio", by_ratio), ("budget", by_budget), ("refined", refined)):
    out |= {f"{kind} {name}": t for name, t in result.model.state_dict().items()}
    out |= {f"{kind} kept {name}": k for name, k in result.plan.kept.items()}
save_file({name: t.detach().clone().contiguous() for name, t in out.items()},
          f"{sys.argv[1]}-{rank}-of-{size}.safetensors")
if len(sys.argv) > 2:
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What one process gives, and each of two."""
    folder = tmp_path_factory.mktemp("processes")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    source = str(Path(lbyl.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    alone = [sys.executable, str(program), str(folder / "out")]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = [sys.executable, *launch, str(program), str(folder / "out"), "together"]
    for command in (alone, together):
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    return {
        name: load_file(folder / f"out-{name}.safetensors")
        for name in ("0-of-1", "0-of-2", "1-of-2")
    }


def test_each_process_runs_its_share_of_the_batches(outcomes: Outcomes) -> None:
    alone, *shares = (int(outcomes[n]["collecting"]) for n in ("0-of-1", "0-of-2", "1-of-2"))
    assert shares[0] == shares[1] == alone - 3  # three of six batches each


def test_both_processes_hold_the_same(outcomes: Outcomes) -> None:
    first, second = outcomes["0-of-2"], outcomes["1-of-2"]
    assert first.keys() == second.keys()
    for name in first.keys() - {"collecting"}:
        torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=1e-7)


def test_two_processes_give_what_one_gives(outcomes: Outcomes) -> None:
    alone, together = outcomes["0-of-1"], outcomes["0-of-2"]
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        if name.startswith(("mean", "covariance")):  # sums in another order, in float64
            torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-10)
        elif " kept " in name:
            assert torch.equal(together[name], value), name
        elif name.startswith(("ratio", "budget")):
            torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-6)
    # Refinement normalises by each process's part of a batch: as good, not the same.
    assert float(together["loss"]) == pytest.approx(float(alone["loss"]), rel=0.15)
