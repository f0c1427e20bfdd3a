"""Tiny networks, one for each shape that must be supported, with parameters far from defaults."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = (3, 8, 8)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all parameters and buffers anew: no γ is 1, no mean is 0, no variance is 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)

    with torch.no_grad():
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            norm = isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm))
            for name, parameter in own.items():
                if norm and name == "weight":
                    sign = torch.where(draw(parameter) > -1, 1.0, -1.0)
                    parameter.copy_(sign * (0.4 + draw(parameter).abs()))
                elif name == "weight" and parameter.dim() > 1:
                    parameter.copy_(draw(parameter) * (2 / parameter[0].numel()) ** 0.5)
                else:
                    parameter.copy_(0.3 * draw(parameter))
            for name, buffer in module.named_buffers(recurse=False):
                if name == "running_mean":
                    buffer.copy_(0.5 * draw(buffer))
                elif name == "running_var":
                    buffer.copy_(0.3 + draw(buffer).abs())
    return model.eval()


class Functional(nn.Module):
    """Activations and pooling as functions, not modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(10)
        self.second = nn.Conv2d(10, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.relu(self.second(x))
        return self.head(x.mean((2, 3)))


class Basic(nn.Module):
    """A basic residual block between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(6, 10, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 6, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.relu(x + y).mean((2, 3)))


class Bottleneck(nn.Module):
    """A bottleneck block with a projection shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 10, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(10)
        self.conv3 = nn.Conv2d(10, 12, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(12)
        self.down = nn.Sequential(nn.Conv2d(3, 12, 1, stride=2, bias=False), nn.BatchNorm2d(12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y)) + self.down(x)
        return self.head(F.relu(y).mean((2, 3)))


class Beside(nn.Module):
    """Two layers side by side make the channels of one residual stream: 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 8)
        self.sum, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], dim=1) + self.sum(x)
        return self.last(both.relu())


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Conv2d(10, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def biased() -> nn.Module:
    """Convolutions with bias and no BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(10, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5, bias=False),
    )


def flattened() -> nn.Module:
    """A convolution, a flatten, a linear layer: every channel owns 16 columns."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 9, 3, padding=1),
        nn.BatchNorm2d(9),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Conv2d(9, 5, 3, stride=2),
        nn.Flatten(),
    )


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 9),
        nn.BatchNorm1d(9),
        nn.ReLU(),
        nn.Linear(9, 5),
    )


def group_normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.GroupNorm(6, 12),
        nn.SiLU(),
        nn.Conv2d(12, 5, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "biased": biased,
    "basic": Basic,
    "bottleneck": Bottleneck,
    "flattened": flattened,
    "pooled": pooled,
    "dense": dense,
    "functional": Functional,
    "group-normed": group_normed,
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A network by name in evaluation mode, the same one for the same seed."""
    return randomise(NETWORKS[name](), seed)


def example(name: str, count: int = 2) -> Tensor:
    """Inputs that a network by name takes."""
    generator = torch.Generator().manual_seed(count)
    shape = (12,) if name == "dense" else IMAGE
    return torch.randn(count, *shape, generator=generator)


def fingerprint(model: nn.Module) -> dict[str, object]:
    """All that a caller could find changed in a model: bytes, flags, modes and attributes."""
    found: dict[str, object] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        bits = tensor.detach().cpu().contiguous().numpy().tobytes()
        found[f"tensor {name}"] = (id(tensor), bits, tuple(tensor.shape), tensor.requires_grad)
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple))}
        hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")]
        found[f"module {name}"] = (id(module), type(module), plain, hooks)
    return found


def consumer_samples(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer reads, (samples, inputs · taps), and what it gives, (samples, outputs)."""
    module = model.get_submodule(layer)
    seen: list[tuple[Tensor, Tensor]] = []

    def look(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen.append((args[0], output))

    handle = module.register_forward_hook(look)
    with torch.no_grad():
        model(x)
    handle.remove()
    (given, made) = seen[0]
    if isinstance(module, nn.Linear):
        return given, made
    rows = F.unfold(given, module.kernel_size, module.dilation, module.padding, module.stride)
    return rows.transpose(1, 2).flatten(0, 1), made.flatten(2).transpose(1, 2).flatten(0, 1)
