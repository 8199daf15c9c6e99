#!/usr/bin/python3
"""Writes the models that bench/peers runs in ONNX Runtime: the SwiGLU layer of each shape, without its weights.

    bench/peers/make_models.py DIR

A model reads its weights from files beside it, which bench/peers writes from its own layer. DIM_float32.gate, .up and
.down are [in, out]. DIM_int8.gate and so on are for MatMulNBits: 8 bits with a zero point of 128, [out, blocks of 32
inputs, 32], and DIM_int8.gate_scale and so on float32 [out, blocks]. Needs onnx (Debian: python3-onnx).
"""

import os
import sys

import onnx
from onnx import TensorProto, helper

BLOCK = 32
SHAPES = [(4096, 11008), (2048, 5632), (512, 1365)]


def external(name, data_type, shape, path, item_bytes):
    """A weight whose bytes are all of the file `path`."""
    tensor = onnx.TensorProto(name=name, data_type=data_type, dims=shape, data_location=TensorProto.EXTERNAL)
    length = item_bytes
    for size in shape:
        length *= size
    for key, value in (("location", path), ("offset", "0"), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def swiglu(product):
    """The layer's nodes; product(x, role, y) is the node of one product."""
    return [product("x", "gate", "g"), product("x", "up", "u"), helper.make_node("Sigmoid", ["g"], ["s"]),
            helper.make_node("Mul", ["g", "s"], ["a"]), helper.make_node("Mul", ["a", "u"], ["h"]),
            product("h", "down", "y")]


def save(folder, name, nodes, weights, dim):
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["M", dim]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "swiglu", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 8
    with open(os.path.join(folder, name + ".onnx"), "wb") as file:
        file.write(model.SerializeToString())


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for dim, hidden_dim in SHAPES:
        sizes = {"gate": (dim, hidden_dim), "up": (dim, hidden_dim), "down": (hidden_dim, dim)}
        name = f"{dim}_float32"
        weights = [external(role, TensorProto.FLOAT, size, f"{name}.{role}", 4) for role, size in sizes.items()]
        save(folder, name, swiglu(lambda x, role, y: helper.make_node("MatMul", [x, role], [y])), weights, dim)

        name, weights = f"{dim}_int8", []
        for role, (size, out) in sizes.items():
            blocks = -(-size // BLOCK)
            weights.append(external(role, TensorProto.UINT8, (out, blocks, BLOCK), f"{name}.{role}", 1))
            weights.append(external(role + "_scale", TensorProto.FLOAT, (out, blocks), f"{name}.{role}_scale", 4))

        def product(x, role, y):
            # Level 4: x is quantised to 8 bits too, which is what makes it fast.
            return helper.make_node("MatMulNBits", [x, role, role + "_scale"], [y], domain="com.microsoft",
                                    K=sizes[role][0], N=sizes[role][1], bits=8, block_size=BLOCK, accuracy_level=4)

        save(folder, name, swiglu(product), weights, dim)


if __name__ == "__main__":
    main()
