"""A result on disk: `model.safetensors` and `plan.json`, without pickle."""

from lbyl.storage.files import load, save

__all__ = ["load", "save"]
