"""Methods and criteria by name: small frozen dataclasses that can be written as JSON."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from lbyl.errors import LbylError


class Named:
    """A configuration with a name in a registry."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self)
        return {"name": self.name, **dataclasses.asdict(self)}


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Names → classes; resolves a name, an instance or what `to_dict` gave.

    `elsewhere` names modules that register a class when they are imported, by its name.
    """

    def __init__(self, noun: str, elsewhere: Mapping[str, str] | None = None) -> None:
        self.noun = noun
        self.elsewhere = dict(elsewhere or {})
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        def add(cls: type[T]) -> type[T]:
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted({*self._classes, *self.elsewhere})

    def resolve(self, config: str | T | dict[str, Any]) -> T:
        """An instance from a name, a dict with "name" and options, or an instance itself."""
        if isinstance(config, Named):
            return config  # type: ignore[return-value]
        options = dict(config) if isinstance(config, dict) else {}
        name = options.pop("name", "") if isinstance(config, dict) else config
        if name in self.elsewhere and name not in self._classes:
            home = importlib.import_module(self.elsewhere[name])
            named = (c for c in vars(home).values() if getattr(c, "name", None) == name)
            self._classes[name] = next(named)
        if name not in self._classes:
            known = ", ".join(self.names())
            raise LbylError(f"unknown {self.noun} {name!r}; the known ones are {known}")
        try:
            return self._classes[name](**options)
        except TypeError as error:
            raise LbylError(f"{self.noun} {name!r} does not take these options: {error}") from error
