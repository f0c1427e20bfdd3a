"""Several variants of a network in one run: how each answers the same inputs.

Variants have the modules of a network and other values of some of its parameters. A batch holds
the inputs once for the network itself and once for every variant that differs from it by then: a
call that reads a changed parameter is made anew for the part of the variant, which from there on
has rows of its own. So many variants cost one run, and each only the layers behind its change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.runtime.intercept import Function, Interceptor, changes_in_place
from lbyl.runtime.run import Inputs, call_model, evaluation_mode, tensors_in
from lbyl.runtime.tensors import tensors

Values = Mapping[str, Tensor]
"""Parameter or buffer → its value in a variant, of the same shape."""

# `x += y` goes on with what the call gives. Whoever holds the old x too is found out: then even the
# rows of the network itself come out wrong.
AUGMENTED = ("add_", "sub_", "mul_", "div_")
PARTS = "_lbyl_parts"  # attribute of a tensor that comes from the inputs: how many parts they had


class CannotBeSplit(RuntimeError):
    """A call reads a changed parameter but no part of the batch, or mixes parts."""


class SideBySide(Interceptor):
    """Active inside a `with`, while the network runs on what `begin` makes of the inputs.

    `at_once`: all variants have rows from the beginning, for networks that ask early how many rows
    there are.
    """

    def __init__(
        self, model: nn.Module, variants: Sequence[Values], rows: int, at_once: bool = False
    ) -> None:
        super().__init__()
        self.count, self.rows, self.at_once = len(variants), rows, at_once
        # Variant → its part; 0 is the network's own.
        self.place = {i: 1 + i for i in range(self.count)} if at_once else {}
        state = tensors(model)
        self.owned = set(map(id, state.values()))
        self.changed: dict[int, dict[int, Tensor]] = {}  # id of a parameter → variant → its value
        for i, values in enumerate(variants):
            for name, value in values.items():
                self.changed.setdefault(id(state[name]), {})[i] = value

    def begin(self, inputs: Inputs) -> Inputs:
        """The inputs, once for each part."""
        parts = 1 + len(self.place)
        return tree_map_only(Tensor, lambda x: self._marked(torch.cat([x] * parts), parts), inputs)

    def end(self, out: Any) -> Any:
        """An output with the network's own rows and those of each variant, in their order."""
        if self.at_once:
            return out
        ended: set[int] = set()

        def whole(x: Tensor) -> Tensor:
            places = [0, *(self.place.get(i, 0) for i in range(self.count))]
            there = [i if i < self._parts(x) else 0 for i in places]
            made = torch.cat([self._part(x, i) for i in there])
            ended.add(id(made))
            return made

        made = tree_map_only(Tensor, whole, out)
        if any(id(x) not in ended for x in tensors_in(made)):
            raise CannotBeSplit("an output of a kind that is not looked into")
        return made

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [x for x in _leaves(args, kwargs) if isinstance(x, Tensor)]
        sizes = {self._parts(x) for x in given} - {0}
        touched = {i for x in given for i in self.changed.get(id(x), ())}
        if touched:
            return self._of_touched(sorted(touched), max(sizes, default=0), func, args, kwargs)
        if not sizes:
            return func(*args, **kwargs)
        if len(sizes) > 1:
            args, kwargs = self._grown(max(sizes), func, args, kwargs)
        return self._marked(func(*args, **kwargs), max(sizes))

    def _of_touched(
        self,
        touched: Sequence[int],
        parts: int,
        func: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """What a call gives that reads other values for some variants."""
        name = getattr(func, "__name__", "")
        if not parts or changes_in_place(name, kwargs):
            raise CannotBeSplit(name)
        known = {i: self.place[i] for i in touched if i in self.place}
        new = [i for i in touched if i not in known]
        parts = max(parts, 1 + len(self.place) if new else 1 + max(known.values()))
        args, kwargs = self._grown(parts, func, args, kwargs)
        of = partial(self._of_variant, func=func, args=args, kwargs=kwargs)
        if len(known) == parts - 1:  # nobody but the network itself reads what it has
            made = [of(None, 0), *(of(i, place) for i, place in known.items())]
        else:
            whole = self._marked(func(*args, **kwargs), parts)
            for i, place in known.items():
                self._part(whole, place).copy_(of(i, place))
            made = [whole]
        made += [of(i, 0) for i in new]
        for i in new:
            self.place[i] = 1 + len(self.place)
        if not all(isinstance(one, Tensor) and one.dim() for one in made):
            raise CannotBeSplit(name)
        return self._marked(torch.cat(made) if len(made) > 1 else made[0], parts + len(new))

    def _of_variant(
        self,
        variant: int | None,
        place: int,
        func: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a call gives for one part with the values of a variant."""

        def own(x: Tensor) -> Tensor:
            if id(x) in self.changed:
                return x if variant is None else self.changed[id(x)].get(variant, x)
            return self._part(x, place) if self._parts(x) else x

        return func(*_mapped(own, args), **_mapped(own, kwargs))

    def _grown(
        self, parts: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with so many parts: variants that began later still have the network's rows."""
        name = getattr(func, "__name__", "")
        if changes_in_place(name, kwargs) and name not in AUGMENTED:
            first = args[0] if args else None
            if isinstance(first, Tensor) and self._parts(first) != parts:
                raise CannotBeSplit("a value that is changed in place")

        def grown(x: Tensor) -> Tensor:
            own = self._parts(x)
            if own in (0, parts):
                return x
            return self._marked(torch.cat([x, *[self._part(x, 0)] * (parts - own)]), parts)

        return _mapped(grown, args), _mapped(grown, kwargs)

    def _marked(self, result: Any, parts: int) -> Any:
        """A result that comes from inputs of so many parts; what the model holds stays as it is."""
        leaves = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in self.owned:
                setattr(x, PARTS, parts)
        return result

    def _parts(self, x: Tensor) -> int:
        """How many parts the inputs had when this was made of them; 0 for all other tensors."""
        known = getattr(x, PARTS, None)
        if known is not None:
            return int(known)
        if not self.at_once or id(x) in self.owned or not x.dim() or not len(x):
            return 0
        return 0 if len(x) % (self.rows * (1 + self.count)) else 1 + self.count

    def _part(self, x: Tensor, place: int) -> Tensor:
        parts = self._parts(x)
        if not parts or not x.dim() or len(x) % (self.rows * parts):
            raise CannotBeSplit("rows that are no examples")
        each = len(x) // parts
        return x[place * each : (place + 1) * each]


def _is_flat(args: Any) -> bool:
    """Whether all tensors stand alone: containers hold none but sizes."""
    held = [x for x in args if isinstance(x, (tuple, list, dict))]
    return all(type(x) in (tuple, list) and all(type(i) is int for i in x) for x in held)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    # Torch's own way through arguments takes several times as long.
    return args if not kwargs and _is_flat(args) else tree_flatten((args, kwargs))[0]


def _mapped(change: Callable[[Tensor], Tensor], args: Any) -> Any:
    """Arguments with every tensor in them changed."""
    if not isinstance(args, dict) and _is_flat(args):
        return tuple(change(x) if isinstance(x, Tensor) else x for x in args)
    return tree_map_only(Tensor, change, args)


def rows_of(inputs: Inputs) -> int | None:
    """How many examples inputs hold; None where not every tensor in them has as many."""
    leaves = tree_flatten(inputs)[0]
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in leaves}
    return sizes.pop() if len(sizes) == 1 else None


@torch.no_grad()
def run_side_by_side(
    model: nn.Module, variants: Sequence[Values], inputs: Inputs, rows: int, at_once: bool = False
) -> Any:
    """What `model` makes of the inputs, `rows` of them, and then each variant, one by one."""
    together = SideBySide(model, variants, rows, at_once)
    repeated = together.begin(inputs)
    with evaluation_mode(model), together:
        out = call_model(model, repeated)
    return together.end(out)
