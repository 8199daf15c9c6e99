"""What a Python client of layerd needs beside grpcio: stubs, tensors as numpy arrays, errors as text.

The stubs are generated from the published contract (proto/) when load() is called, into a temporary folder that is gone
again when load() returns, by protoc and its plugin for Python (Debian: protobuf-compiler, protobuf-compiler-grpc). A
program that is installed would generate them once, at build time: by these two, or by `python -m grpc_tools.protoc` of
a recent grpcio-tools (Debian 12's python3-grpc-tools is too old: it does not know `optional` in proto3).
"""
import importlib
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import google  # protobuf's package of that name
import numpy as np

PROTO_DIR = Path(__file__).resolve().parents[2] / "proto"


def load(proto_dir=PROTO_DIR):
    """The generated modules: .tensor, .layer_service, .layer_service_grpc, .error_details, .status."""
    plugin = shutil.which("grpc_python_plugin")
    if plugin is None or shutil.which("protoc") is None:
        raise RuntimeError("protoc and grpc_python_plugin are needed (protobuf-compiler, protobuf-compiler-grpc)")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["protoc", f"-I{proto_dir}", f"--plugin=protoc-gen-grpc_python={plugin}",
                        f"--python_out={folder}", f"--grpc_python_out={folder}",
                        "layerd/v1/tensor.proto", "layerd/v1/layer_service.proto",
                        "google/rpc/error_details.proto", "google/rpc/status.proto"], check=True)
        sys.path.insert(0, folder)
        google.__path__.append(f"{folder}/google")  # google.rpc is ours
        try:
            return types.SimpleNamespace(
                tensor=importlib.import_module("layerd.v1.tensor_pb2"),
                layer_service=importlib.import_module("layerd.v1.layer_service_pb2"),
                layer_service_grpc=importlib.import_module("layerd.v1.layer_service_pb2_grpc"),
                error_details=importlib.import_module("google.rpc.error_details_pb2"),
                status=importlib.import_module("google.rpc.status_pb2"))
        finally:
            sys.path.remove(folder)


def to_tensor(stubs, array):
    """A float32 or float16 array as a layerd.v1.Tensor."""
    dtypes = {"float32": stubs.tensor.DTYPE_FLOAT32, "float16": stubs.tensor.DTYPE_FLOAT16}
    little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return stubs.tensor.Tensor(dtype=dtypes[array.dtype.name], shape=array.shape, data=little_endian.tobytes())


def to_array(stubs, tensor):
    """The reverse."""
    dtypes = {stubs.tensor.DTYPE_FLOAT32: "<f4", stubs.tensor.DTYPE_FLOAT16: "<f2"}
    return np.frombuffer(tensor.data, dtypes[tensor.dtype]).reshape(tensor.shape)


def explain(stubs, error):
    """A grpc.RpcError in one line a detail: the code and text, then which field is wrong, when to try again."""
    lines = [f"{error.code().name}: {error.details()}"]
    trailer = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    for packed in stubs.status.Status.FromString(trailer).details:
        bad_request, info = stubs.error_details.BadRequest(), stubs.error_details.ErrorInfo()
        retry = stubs.error_details.RetryInfo()
        if packed.Unpack(bad_request):
            lines += [f"  field {v.field}: {v.description}" for v in bad_request.field_violations]
        elif packed.Unpack(info):
            lines.append(f"  reason {info.reason}")
        elif packed.Unpack(retry):
            lines.append(f"  try again in {retry.retry_delay.ToTimedelta().total_seconds()} s")
    return "\n".join(lines)
