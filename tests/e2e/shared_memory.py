"""Callers who share memory with a daemon, for the end-to-end tests."""
import mmap
import os
import pathlib
import shutil
import tempfile
import unittest

import grpc
import numpy as np

import harness
from harness import FLOAT32, Daemon, RichError, layer_pb, tensor_pb

shared_pb = harness.import_stub('layerd.v1.shared_memory_pb2')
shared_grpc = harness.import_stub('layerd.v1.shared_memory_pb2_grpc')

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
RMS_NORM = layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_RMS_NORM)
MIB = 1 << 20


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def at(region, offset):
    return tensor_pb.SharedMemory(region=region, offset=offset)


def shared(region, offset, shape, dtype=FLOAT32):
    return tensor_pb.Tensor(dtype=dtype, shape=shape, shared_memory=at(region, offset))


def registry_of(daemon):
    return shared_grpc.SharedMemoryRegistryStub(daemon.channel())


class Caller:
    """A file in the daemon's folder that is mapped here and registered there."""

    def __init__(self, daemon, folder, name, size):
        self.name, self.size, self.path = name, size, pathlib.Path(folder) / name
        with open(self.path, 'w+b') as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.memory = mmap.mmap(file.fileno(), size)
        self.registry = registry_of(daemon)
        self.stub = daemon.stub()
        self.register()

    def fill(self):
        """Gives the file its size and memory for all of it again."""
        with open(self.path, 'r+b') as file:
            os.posix_fallocate(file.fileno(), 0, self.size)

    def register(self):
        return self.registry.RegisterRegion(
            shared_pb.RegisterRegionRequest(name=self.name, file=self.path.name), timeout=60)

    def unregister(self):
        self.registry.UnregisterRegion(shared_pb.UnregisterRegionRequest(name=self.name), timeout=60)

    def put(self, offset, data):
        self.memory[offset:offset + len(data)] = data
        return offset

    def share(self, offset, message):
        """The tensor with its data put into the memory."""
        self.put(offset, message.data)
        return shared(self.name, offset, message.shape, message.dtype)

    def get(self, message):
        """The elements of an answer's tensor, which must lie here."""
        if message.data or message.shared_memory.region != self.name:
            raise AssertionError(f'not in shared memory: {message.shared_memory} and {len(message.data)} bytes')
        begin = message.shared_memory.offset
        size = int(np.prod(message.shape)) * (4 if message.dtype == FLOAT32 else 2)
        return bytes(self.memory[begin:begin + size])


class Shared(unittest.TestCase):
    flags = ()

    def setUp(self):
        # Memory where there is such a folder, else files on a disk.
        self.folder = pathlib.Path(tempfile.mkdtemp(dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None))
        self.addCleanup(shutil.rmtree, self.folder)
        self.daemon = self.enterContext(Daemon(f'--shared_memory_dir={self.folder}', *self.flags))
        self.stub = self.daemon.stub()
        self.registry = registry_of(self.daemon)

    if not hasattr(unittest.TestCase, 'enterContext'):
        def enterContext(self, context):
            self.addCleanup(context.__exit__, None, None, None)
            return context.__enter__()

    def error_of(self, call):
        with self.assertRaises(grpc.RpcError) as raised:
            call()
        return RichError(raised.exception)

    def assert_refused(self, call, code, field, reason):
        error = self.error_of(call)
        fields = [path for path, _, _ in error.fields]
        self.assertEqual((error.code, error.reason), (code, reason), error.text)
        if code == INVALID:
            self.assertEqual(fields, [field], error.text)
        self.assertTrue(error.text.startswith(f'{field}: ') if field else True, error.text)
        return error

    def normalize(self, request):
        return self.stub.Normalize(request, timeout=60)
