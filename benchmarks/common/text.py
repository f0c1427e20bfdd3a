"""A small trained language model and the text that measures it.

model = language_model()                  # Transformers' Llama, 6 layers of width 256
perplexity(model, measured_windows())     # 6.15
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.environment import shared_dir

NAME = "llama7m_docs"
LENGTH = 256  # tokens of a window
FEW, MANY = 60, 1000  # windows that perplexity is measured on, in short and at length
CALIBRATION = 2000  # windows from here on are never measured on


def language_model(device: str | torch.device = "cpu") -> nn.Module:
    """The trained language model in float32 and evaluation mode."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    models = shared_dir() / "models"
    model = LlamaForCausalLM(
        LlamaConfig(**json.loads((models / f"{NAME}.config.json").read_text()))
    )
    state = {name: x.float() for name, x in load_file(models / f"{NAME}.safetensors").items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval().to(device)


def tokenizer_file() -> Path:
    return shared_dir() / "models" / f"{NAME}.tokenizer.json"


def _tokens() -> Any:
    return np.load(shared_dir() / "data" / "docs_val_tokens.npy", mmap_mode="r")


def _windows(first: int, count: int) -> Tensor:
    part = _tokens()[first * LENGTH : (first + count) * LENGTH].astype(np.int64)
    return torch.from_numpy(part).reshape(-1, LENGTH)


def measured_windows(count: int = FEW) -> Tensor:
    """(count, 256): the first windows of the held-out text, which measure and do nothing else."""
    return _windows(0, count)


def calibration_windows(count: int = 96) -> Tensor:
    """(count, 256): real text for the column beside ours, far from what is measured on."""
    return _windows(CALIBRATION, count)


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor, batch: int = 20) -> float:
    """exp of the mean cross-entropy of every token but the first of each window."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for part in windows.to(device).split(batch):
        logits = model(part).logits.float()
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
        total, count = total + float(losses), count + part[:, 1:].numel()
    return math.exp(total / count)
