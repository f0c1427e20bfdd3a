"""The graph of an ONNX file as onnx2torch reads it best, and as channels can be traced through it.

Exporters differ in how they write one and the same network; nothing here changes what it computes.
"""

from __future__ import annotations

from typing import Any

from lbyl.app.sources.base import imported

OPSET = 17  # the newest that onnx2torch knows all of
FLOATS = (1, 10, 11, 16)  # float, float16, double and bfloat16, as a file numbers them
MOVING = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose")


def readable(model: Any) -> Any:
    """The same network, with weights where the reader looks and no width where none is needed."""
    model = _older(model)
    for node in model.graph.node:
        if node.op_type == "Reshape":  # says what a length of 0 means: nothing here is empty
            _without(node, "allowzero")
    _gather_weights(model.graph)
    _fold(model)
    _split_evenly(model.graph)
    _tell_ranks(model.graph)
    return model


def _older(model: Any) -> Any:
    """The same in a version that the reader knows."""
    if _opset(model) > OPSET:
        return imported("onnx.version_converter", "onnx").convert_version(model, OPSET)
    return model


def _opset(model: Any) -> int:
    return max((o.version for o in model.opset_import if not o.domain), default=0)


def _gather_weights(graph: Any) -> None:
    """Some exporters write each weight as a node of its own; whole numbers stay where they are."""
    kept = []
    for node in graph.node:
        tensor = _attribute(node, "value") if node.op_type == "Constant" else None
        if tensor is not None and tensor.t.dims and tensor.t.data_type in FLOATS:
            graph.initializer.add().CopyFrom(tensor.t)
            graph.initializer[-1].name = node.output[0]
        else:
            kept.append(node)
    _replace(graph, kept)


def _fold(model: Any) -> None:
    """What only moves weights about is done here once: written out, it would fix their widths."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    known = _known(graph)
    outputs = {entry.name for entry in graph.output}
    kept = []
    for node in graph.node:
        moves = node.op_type in MOVING and node.input[0] in weights
        given = {name: known[name] for name in node.input if name in known}
        if moves and len(given) == len(node.input) and node.output[0] not in outputs:
            graph.initializer.add().CopyFrom(_computed(node, given, _opset(model)))
            known[node.output[0]] = graph.initializer[-1]
            weights.add(node.output[0])
        else:
            kept.append(node)
    _replace(graph, kept)


def _computed(node: Any, given: dict[str, Any], opset: int) -> Any:
    """What one node gives of tensors that are known, by ONNX's own reference."""
    onnx = imported("onnx", "onnx")
    inputs = [onnx.helper.make_tensor_value_info(n, t.data_type, t.dims) for n, t in given.items()]
    output = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.UNDEFINED, None)
    graph = onnx.helper.make_graph([node], "node", inputs, [output])
    version = onnx.helper.make_opsetid("", opset)
    alone = onnx.helper.make_model(graph, opset_imports=[version])
    reference = imported("onnx.reference", "onnx").ReferenceEvaluator(alone)
    arrays = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in given.items()}
    return onnx.numpy_helper.from_array(reference.run(None, arrays)[0], node.output[0])


def _split_evenly(graph: Any) -> None:
    """Parts of one size are told by their number, which stays true where channels go."""
    known = _known(graph)
    for node in graph.node:
        if node.op_type == "Split" and len(_sizes(node, known)) == 1:
            _without(node, "split")
            del node.input[1:]


def _sizes(split: Any, known: dict[str, Any]) -> set[int]:
    """How large the parts are, as far as the file says: of old as an attribute, now as an input."""
    written = _attribute(split, "split")
    if written is not None:
        return set(written.ints)
    given = known.get(split.input[1]) if len(split.input) == 2 else None
    to_array = imported("onnx", "onnx").numpy_helper.to_array
    return set() if given is None else set(to_array(given).tolist())


def _tell_ranks(graph: Any) -> None:
    """What leaves a convolution has as many dimensions as its weight, which the reader asks for."""
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    told = {value.name for value in graph.value_info}
    told |= {entry.name for entry in graph.output}
    for node in graph.node:
        rank = ranks.get(node.input[1]) if node.op_type in ("Conv", "ConvTranspose") else None
        if rank is not None and node.output[0] not in told:
            value = graph.value_info.add(name=node.output[0])
            value.type.tensor_type.elem_type = FLOATS[0]
            for _ in range(rank):
                value.type.tensor_type.shape.dim.add()


def _known(graph: Any) -> dict[str, Any]:
    """Tensors that stand in the file, by name."""
    values = [(n.output[0], _attribute(n, "value")) for n in graph.node if n.op_type == "Constant"]
    known = {name: value.t for name, value in values if value is not None}
    return known | {tensor.name: tensor for tensor in graph.initializer}


def _attribute(node: Any, name: str) -> Any | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _without(node: Any, name: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def _replace(graph: Any, nodes: list[Any]) -> None:
    del graph.node[:]
    graph.node.extend(nodes)
