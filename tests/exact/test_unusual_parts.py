"""Parts that networks of other packages have: they are saved and loaded, or named as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lbyl


class Registers(nn.Module):
    """Tokens put before the input's, as many as a configuration says: none."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 0, 8))
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.tokens.expand(len(x), -1, -1), x], 1)
        return self.down(self.up(x).relu())


def test_a_network_with_an_empty_parameter_is_loaded_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Registers().eval(), torch.randn(2, 5, 8)
    result = lbyl.compress(model, x, 0.5, method="none")
    assert result.graph.shapes["tokens"] == (1, 0, 8)
    lbyl.save(result, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Registers().eval())
    assert torch.equal(loaded(x), result.model(x))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_layer_whose_weight_is_computed_is_called_so_and_nothing_else(norm: object) -> None:
    torch.manual_seed(0)
    assert callable(norm)
    model = nn.Sequential(norm(nn.Conv1d(3, 8, 3)), nn.ReLU(), nn.Conv1d(8, 4, 3)).eval()
    reasons = lbyl.trace(model, torch.randn(2, 3, 12)).unprunable
    assert reasons["0"] == "its weight is computed in the forward pass"
    assert not any("quantised" in r or "experts" in r for r in reasons.values())


class Gated(nn.Module):
    """A submodule that is called weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight, self.down = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.weight(x).sigmoid())


def test_a_submodule_called_weight_is_pruned_as_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(4, 6)
    result = lbyl.compress(model, x, 0.5, method="none")
    assert not any("quantised" in reason for reason in result.graph.unprunable.values())
    kept = result.plan.kept["up"]
    hidden = model.up(x) * model.weight(x).sigmoid()
    wanted = hidden[:, kept] @ model.down.weight[:, kept].T + model.down.bias
    torch.testing.assert_close(result.model(x), wanted)
    lbyl.save(result, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Gated().eval())
    assert torch.equal(loaded(x), result.model(x))


class Slotted:
    """Something that has no dictionary."""

    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = 3


class Recurrent(nn.Module):
    """A recurrent layer, which keeps weak references to its weights."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(8, 3)
        self.mixed = kind(16, 8, batch_first=True)
        self.notes = [Slotted()]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mixed(self.up(x).relu())[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_and_objects_without_a_dictionary_are_taken(
    kind: type[nn.RNNBase],
) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(kind).eval(), torch.randn(2, 5, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "up" in lbyl.trace(model, x).unprunable
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Lengthened(nn.Module):
    """A table of positions that grows with the longest input so far and is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.register_buffer("table", torch.arange(4.0)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            self.table = torch.arange(float(x.shape[1]))[:, None]
        return self.down(self.up(x + self.table[: x.shape[1]]).relu())


def test_a_table_that_grew_before_is_no_reason_not_to_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Lengthened().eval(), torch.randn(2, 6, 8)
    model(x)
    result = lbyl.compress(model, x, 0.5, method="none")
    lbyl.save(result, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Lengthened().eval())
    assert torch.equal(loaded(x), result.model(x))
    assert torch.equal(loaded(x[:, :3]), result.model(x[:, :3]))
