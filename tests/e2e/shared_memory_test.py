"""Memory shared with the daemon: the bits of ordinary calls, every wrong reference, and callers that truncate, unregister or
die in the middle of calls, which harm nobody but themselves."""
import itertools
import mmap
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

import grpc
import numpy as np

import harness
import resident
from harness import BFLOAT16, FLOAT16, FLOAT32, Daemon, RichError, array_of, layer_pb, tensor, tensor_pb

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


class SameBits(Shared):
    def test_normalize(self):
        caller = Caller(self.daemon, self.folder, 'r', MIB)
        for dtype in (FLOAT32, FLOAT16, BFLOAT16):
            ordinary = layer_pb.NormalizeRequest(
                input=tensor(normal(1, 30, 100), dtype), residual=tensor(normal(2, 30, 100), dtype),
                gate=tensor(normal(3, 30, 100), dtype), gamma=tensor(normal(4, 100), dtype),
                beta=tensor(normal(5, 100)), intermediates=True, verify=True,
                spec=layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_LAYER_NORM,
                                            gate_position=layer_pb.GATE_POSITION_LAST,
                                            rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA))
            expected = self.normalize(ordinary)
            request = layer_pb.NormalizeRequest()
            request.CopyFrom(ordinary)
            for i, name in enumerate(('input', 'residual', 'gate', 'gamma', 'beta')):
                getattr(request, name).CopyFrom(caller.share(i << 16, getattr(ordinary, name)))
            answer = self.normalize(request)  # the output in the message
            self.assertEqual(answer, expected)
            request.output_memory.CopyFrom(at('r', 5 << 16))
            answer = self.normalize(request)
            self.assertEqual(caller.get(answer.output), expected.output.data)
            self.assertEqual(answer.residual_sum, expected.residual_sum)
            self.assertEqual(answer.intermediates, expected.intermediates)
            self.assertEqual(answer.report, expected.report)
            self.assertTrue(answer.report.within_contract)

    def test_feed_forward_with_its_weights(self):
        caller = Caller(self.daemon, self.folder, 'r', MIB)
        ordinary = harness.swiglu_request(normal(1, 3, 20), normal(2, 36, 20), normal(3, 36, 20), normal(4, 20, 36))
        expected = self.stub.FeedForward(ordinary, timeout=60)
        request = layer_pb.FeedForwardRequest()
        request.CopyFrom(ordinary)
        request.input.CopyFrom(caller.share(0, ordinary.input))
        for i, name in enumerate(('gate', 'up', 'down')):
            getattr(request.weights, name).CopyFrom(caller.share((i + 1) << 16, getattr(ordinary.weights, name)))
        request.output_memory.CopyFrom(at('r', 4 << 16))
        answer = self.stub.FeedForward(request, timeout=60)
        self.assertEqual(caller.get(answer.output), expected.output.data)

    def test_some_here_and_some_there(self):
        caller = Caller(self.daemon, self.folder, 'a', MIB)
        other = Caller(self.daemon, self.folder, 'b', MIB)
        x = tensor(normal(1, 5, 64))
        expected = self.normalize(layer_pb.NormalizeRequest(input=x, spec=RMS_NORM))
        answer = self.normalize(layer_pb.NormalizeRequest(input=x, spec=RMS_NORM, output_memory=at('b', 128)))
        self.assertEqual(other.get(answer.output), expected.output.data)
        answer = self.normalize(layer_pb.NormalizeRequest(input=caller.share(64, x), spec=RMS_NORM,
                                                          output_memory=at('b', 4096)))
        self.assertEqual(other.get(answer.output), expected.output.data)

    def test_no_rows(self):
        caller = Caller(self.daemon, self.folder, 'r', 4096)
        answer = self.normalize(layer_pb.NormalizeRequest(input=shared('r', 4096, [0, 8]), spec=RMS_NORM,
                                                          output_memory=at('r', 4096)))
        self.assertEqual(list(answer.output.shape), [0, 8])
        self.assertEqual(caller.get(answer.output), b'')

    def test_what_is_behind_the_output_stays(self):
        caller = Caller(self.daemon, self.folder, 'r', 8192)
        caller.put(0, b'\xa5' * 8192)
        x = caller.share(0, tensor(normal(1, 1, 33)))
        self.normalize(layer_pb.NormalizeRequest(input=x, spec=RMS_NORM, output_memory=at('r', 4096)))
        self.assertEqual(bytes(caller.memory[132:4096]), b'\xa5' * (4096 - 132))
        self.assertEqual(bytes(caller.memory[4096 + 132:]), b'\xa5' * (4096 - 132))


class LargerThanMessages(Shared):
    flags = ('--max_message_mib=1',)

    def test_the_limit_on_messages_is_none_on_memory(self):
        caller = Caller(self.daemon, self.folder, 'r', 16 * MIB)
        x = normal(1, 2048, 1024)
        request = layer_pb.NormalizeRequest(input=caller.share(0, tensor(x)), spec=RMS_NORM,
                                            output_memory=at('r', 8 * MIB))
        got = np.frombuffer(caller.get(self.normalize(request).output), '<f4').reshape(x.shape)
        some = self.normalize(layer_pb.NormalizeRequest(input=tensor(x[100:110]), spec=RMS_NORM))
        np.testing.assert_array_equal(got[100:110].view(np.uint32), array_of(some.output).view(np.uint32))
        request.ClearField('output_memory')
        error = self.error_of(lambda: self.normalize(request))
        self.assertEqual(error.reason, 'ANSWER_TOO_LARGE')


class WrongReferences(Shared):
    def setUp(self):
        super().setUp()
        self.caller = Caller(self.daemon, self.folder, 'r', 4096)

    def refuse(self, code, field, reason, **changes):
        request = layer_pb.NormalizeRequest(input=shared('r', 0, [2, 64]), spec=RMS_NORM)
        for name, value in changes.items():
            getattr(request, name).CopyFrom(value)
        return self.assert_refused(lambda: self.normalize(request), code, field, reason)

    def test_offsets_and_sizes(self):
        for offset in (-64, -1, 4097, 1 << 40, (1 << 63) - 64, (1 << 63) - 1, -(1 << 63)):
            error = self.refuse(INVALID, 'input.shared_memory.offset', 'OUT_OF_RANGE',
                                input=shared('r', offset, [2, 64]))
            self.assertIn(f'expected 0 to 4096, the region\'s size, got {offset}', error.text)
        for offset in (1, 4, 63, 4095):
            self.refuse(INVALID, 'input.shared_memory.offset', 'MISALIGNED', input=shared('r', offset, [2, 64]))
        for offset, shape in ((0, [1025]), (64, [2, 512]), (4096, [1]), (0, [2147483647, 100]), (4032, [17])):
            error = self.refuse(INVALID, 'input.shared_memory', 'OUT_OF_RANGE', input=shared('r', offset, shape))
            self.assertIn(f'got {4096 - offset}', error.text)
        for shape in ([-1], [1 << 62], [16, (1 << 60) + 2], [1] * 9):
            error = self.error_of(lambda: self.normalize(
                layer_pb.NormalizeRequest(input=shared('r', 0, shape), spec=RMS_NORM)))
            self.assertEqual((error.code, error.fields[0][0]), (INVALID, 'input.shape'))

    def test_outputs(self):
        self.refuse(INVALID, 'output_memory', 'OUT_OF_RANGE', output_memory=at('r', 4096 - 448))
        self.refuse(INVALID, 'output_memory', 'OVERLAP', output_memory=at('r', 0))
        self.refuse(INVALID, 'output_memory', 'OVERLAP', output_memory=at('r', 448))
        self.refuse(INVALID, 'output_memory', 'OVERLAP', output_memory=at('r', 0), input=shared('r', 448, [2, 64]))
        self.refuse(INVALID, 'output_memory', 'OVERLAP', output_memory=at('r', 512), gamma=shared('r', 960, [64]))
        self.refuse(INVALID, 'output_memory.offset', 'OUT_OF_RANGE', output_memory=at('r', -64))
        self.refuse(INVALID, 'output_memory.offset', 'MISALIGNED', output_memory=at('r', 513))
        self.refuse(INVALID, 'output_memory.region', 'MISSING', output_memory=at('', 0))
        self.refuse(NOT_FOUND, 'output_memory.region', 'REGION_NOT_FOUND', output_memory=at('s', 0))

    def test_regions_and_sources(self):
        error = self.refuse(NOT_FOUND, 'input.shared_memory.region', 'REGION_NOT_FOUND', input=shared('s', 0, [2, 64]))
        self.assertEqual(error.resource, ('shared_memory_region', 's'))
        self.refuse(INVALID, 'input.shared_memory.region', 'MISSING', input=shared('', 0, [2, 64]))
        error = self.refuse(NOT_FOUND, 'input.shared_memory.region', 'REGION_NOT_FOUND',
                            input=shared('x' * 20000, 0, [2, 64]))
        self.assertLess(len(error.text), 1200)
        for both in (tensor_pb.Tensor(data=b'1234'), tensor_pb.Tensor(values=[1]), tensor_pb.Tensor(data=b'x' * 20000)):
            both.MergeFrom(shared('r', 0, [2, 64]))
            self.refuse(INVALID, 'input.shared_memory', 'TWO_SOURCES', input=both)
        self.refuse(INVALID, 'gamma.shape', 'SHAPE_MISMATCH', gamma=shared('r', 0, [63]))

    def test_streams(self):
        first = layer_pb.StreamNormalizeRequest(
            call=layer_pb.NormalizeRequest(input=shared('r', 0, [2, 64]), spec=RMS_NORM))
        self.assert_refused(lambda: list(self.stub.StreamNormalize(iter([first]), timeout=60)), INVALID,
                            'call.input.shared_memory', 'UNEXPECTED_FIELD')
        first = layer_pb.StreamNormalizeRequest(call=layer_pb.NormalizeRequest(
            input=tensor(normal(1, 2, 64)), spec=RMS_NORM, output_memory=at('r', 0)))
        self.assert_refused(lambda: list(self.stub.StreamNormalize(iter([first]), timeout=60)), INVALID,
                            'call.output_memory', 'UNEXPECTED_FIELD')


class Registry(Shared):
    def register(self, name, file):
        return self.registry.RegisterRegion(shared_pb.RegisterRegionRequest(name=name, file=file), timeout=60)

    def test_regions_come_and_go(self):
        for name in ('b', 'a'):
            (self.folder / f'{name}.bin').write_bytes(b'x' * 100)
        region = self.register('b', 'b.bin')
        self.assertEqual((region.name, region.file, region.size_bytes), ('b', 'b.bin', 100))
        self.assertEqual(self.register('b', 'b.bin'), region)
        self.register('a', 'a.bin')
        listed = self.registry.ListRegions(shared_pb.ListRegionsRequest(), timeout=60).regions
        self.assertEqual([r.name for r in listed], ['a', 'b'])
        self.assert_refused(lambda: self.register('b', 'a.bin'), EXISTS, 'file', 'REGION_EXISTS')
        (self.folder / 'c.bin').write_bytes(b'x' * 100)
        self.assert_refused(lambda: self.register('b', 'c.bin'), EXISTS, 'name', 'REGION_EXISTS')
        self.registry.UnregisterRegion(shared_pb.UnregisterRegionRequest(name='b'), timeout=60)
        for name in ('b', '', 'no/name'):
            error = self.error_of(lambda: self.registry.UnregisterRegion(
                shared_pb.UnregisterRegionRequest(name=name), timeout=60))
            self.assertEqual(error.code, NOT_FOUND if name else INVALID)
        self.assertEqual(len(self.registry.ListRegions(shared_pb.ListRegionsRequest(), timeout=60).regions), 1)

    def test_what_is_no_file_of_the_folder(self):
        outside = harness.scratch_dir()
        (outside / 'secret').write_bytes(b's' * 100)
        (self.folder / 'file').write_bytes(b'x' * 100)
        (self.folder / 'empty').write_bytes(b'')
        (self.folder / 'sparse').write_bytes(b'')
        os.truncate(self.folder / 'sparse', 1 << 40)
        (self.folder / 'folder').mkdir()
        (self.folder / 'folder' / 'inner').write_bytes(b'x')
        (self.folder / 'link').symlink_to(outside / 'secret')
        (self.folder / 'inner_link').symlink_to('file')
        (self.folder / 'dangling').symlink_to('absent')
        os.mkfifo(self.folder / 'fifo')
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / 'socket'))
        for file in ('.', '..', '../' + outside.name + '/secret', str(outside / 'secret'), '/dev/zero', 'folder/inner',
                     './file', 'file/', 'file\0'):
            self.assert_refused(lambda: self.register('r', file), INVALID, 'file', 'BAD_NAME')
        for file in ('folder', 'link', 'inner_link', 'dangling', 'fifo', 'socket'):
            self.assert_refused(lambda: self.register('r', file), INVALID, 'file', 'NOT_A_REGULAR_FILE')
        self.assert_refused(lambda: self.register('r', ''), INVALID, 'file', 'MISSING')
        self.assert_refused(lambda: self.register('', 'file'), INVALID, 'name', 'MISSING')
        self.assert_refused(lambda: self.register('a/b', 'file'), INVALID, 'name', 'BAD_NAME')
        self.assert_refused(lambda: self.register('r' * 129, 'file'), INVALID, 'name', 'BAD_NAME')
        self.assert_refused(lambda: self.register('r', 'absent'), NOT_FOUND, 'file', 'FILE_NOT_FOUND')
        self.assert_refused(lambda: self.register('r', 'empty'), PRECONDITION, 'file', 'EMPTY_FILE')
        self.assert_refused(lambda: self.register('r', 'sparse'), PRECONDITION, 'file', 'SPARSE_FILE')
        self.assert_refused(lambda: self.register('r', 'x' * 300), PRECONDITION, 'file', 'FILE_NOT_OPENED')
        self.assertFalse(self.registry.ListRegions(shared_pb.ListRegionsRequest(), timeout=60).regions)
        listener.close()

    def test_no_message(self):
        channel = self.daemon.channel()
        for method in ('RegisterRegion', 'UnregisterRegion', 'ListRegions'):
            raw = channel.unary_unary(f'/layerd.v1.SharedMemoryRegistry/{method}')
            error = self.error_of(lambda: raw(b'\xff\xff\xff\xff', timeout=60))
            self.assertEqual((error.code, error.reason), (INVALID, 'MALFORMED_MESSAGE'))


class Off(unittest.TestCase):
    def test_every_way_in_names_the_flag(self):
        with Daemon() as daemon:
            registry, stub = registry_of(daemon), daemon.stub()
            for call in (lambda: registry.RegisterRegion(shared_pb.RegisterRegionRequest(name='r', file='f'), timeout=60),
                         lambda: registry.UnregisterRegion(shared_pb.UnregisterRegionRequest(name='r'), timeout=60),
                         lambda: registry.ListRegions(shared_pb.ListRegionsRequest(), timeout=60),
                         lambda: stub.Normalize(layer_pb.NormalizeRequest(input=shared('r', 0, [1, 4]), spec=RMS_NORM),
                                                timeout=60),
                         lambda: stub.Normalize(layer_pb.NormalizeRequest(
                             input=tensor([[1, 2]]), spec=RMS_NORM, output_memory=at('r', 0)), timeout=60)):
                with self.assertRaises(grpc.RpcError) as raised:
                    call()
                error = RichError(raised.exception)
                self.assertEqual((error.code, error.reason), (PRECONDITION, 'SHARED_MEMORY_OFF'))
                self.assertIn('--shared_memory_dir', error.text)

    def test_a_folder_that_cannot_be_opened_ends_the_start(self):
        for folder in ('/absent', '/etc/passwd'):
            result = harness.run_layerd(f'--shared_memory_dir={folder}')
            self.assertEqual(result.status, 1)
            self.assertIn('--shared_memory_dir', result.stderr)
            self.assertIn(folder, result.stderr)


class Neighbour:
    """A caller who does all well, and checks every bit, while others do not."""

    def __init__(self, daemon, folder):
        self.caller = Caller(daemon, folder, 'neighbour', MIB)
        x = tensor(normal(7, 100, 256))
        self.ordinary = layer_pb.NormalizeRequest(input=x, spec=RMS_NORM)
        self.expected = self.caller.stub.Normalize(self.ordinary, timeout=60).output.data
        self.request = layer_pb.NormalizeRequest(input=self.caller.share(0, x), spec=RMS_NORM,
                                                 output_memory=at('neighbour', MIB // 2))
        self.wrong, self.right, self.stop = [], 0, threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stop.is_set():
            try:
                answer = self.caller.stub.Normalize(self.request, timeout=60)
                good = self.caller.get(answer.output) == self.expected
                good = good and self.caller.stub.Normalize(self.ordinary, timeout=60).output.data == self.expected
            except grpc.RpcError as error:
                good = error
            if good is True:
                self.right += 1
            else:
                self.wrong.append(good)

    def finish(self):
        self.stop.set()
        self.thread.join()
        return self.wrong


class CallersThatMisbehave(Shared):
    def test_truncation_in_the_middle_of_calls(self):
        size, half = 8 * MIB, 4 * MIB
        caller = Caller(self.daemon, self.folder, 'r', size)
        neighbour = Neighbour(self.daemon, self.folder)
        stop, whole = threading.Event(), threading.Lock()  # who has the lock wants the file as it should be

        def truncate():
            for length in itertools.cycle((0, 4096, half, half + 4096, 5000)):
                if stop.is_set():
                    break
                with whole:
                    os.truncate(caller.path, length)
                    os.truncate(caller.path, size)

        thread = threading.Thread(target=truncate)
        thread.start()
        reasons = {}
        try:
            for i in range(300):
                request = layer_pb.NormalizeRequest(input=shared('r', 0, [1024, 1024]), spec=RMS_NORM, verify=i % 50 == 0)
                if i % 2 == 0:
                    request.output_memory.CopyFrom(at('r', half))
                try:
                    self.normalize(request)
                    reason = 'OK'
                except grpc.RpcError as raised:
                    error = RichError(raised)
                    self.assertEqual(error.code, PRECONDITION, error.text)
                    reason = error.reason
                    with whole:
                        caller.fill()
                        caller.register()
                reasons[reason] = reasons.get(reason, 0) + 1
        finally:
            stop.set()
            thread.join()
            wrong = neighbour.finish()
        self.assertTrue(self.daemon.alive())
        self.assertEqual(wrong, [])
        self.assertGreater(neighbour.right, 0)
        caller.fill()
        self.assertLessEqual(set(reasons), {'OK', 'REGION_TRUNCATED', 'REGION_DAMAGED'})
        self.assertGreater(reasons.get('REGION_DAMAGED', 0), 0, reasons)  # a signal that was survived
        caller.register()
        caller.put(0, tensor(normal(1, 1, 64)).data)
        self.normalize(layer_pb.NormalizeRequest(input=shared('r', 0, [1, 64]), spec=RMS_NORM))

    def test_a_region_stays_damaged_until_it_is_registered_again(self):
        caller = Caller(self.daemon, self.folder, 'r', MIB)
        request = layer_pb.NormalizeRequest(input=shared('r', 0, [1024, 256]), spec=RMS_NORM)
        self.normalize(request)
        os.truncate(caller.path, MIB - 1)
        for _ in range(2):
            error = self.assert_refused(lambda: self.normalize(request), PRECONDITION, 'input.shared_memory',
                                        'REGION_TRUNCATED')
            self.assertIn('1048576 bytes', error.text)
            self.assertIn('got 1048575', error.text)
        region = caller.register()
        self.assertEqual(region.size_bytes, MIB - 1)
        self.assert_refused(lambda: self.normalize(request), INVALID, 'input.shared_memory', 'OUT_OF_RANGE')
        caller.fill()
        self.assertEqual(caller.register().size_bytes, MIB)
        self.normalize(request)

    def test_regions_that_go_in_the_middle_of_calls(self):
        caller = Caller(self.daemon, self.folder, 'r', 2 * MIB)
        x = tensor(normal(1, 512, 512))
        expected = self.normalize(layer_pb.NormalizeRequest(input=x, spec=RMS_NORM)).output.data
        request = layer_pb.NormalizeRequest(input=caller.share(0, x), spec=RMS_NORM)
        stop, outcomes, wrong = threading.Event(), {'answered': 0, 'not found': 0}, []

        def call():
            stub = self.daemon.stub()
            while not stop.is_set():
                try:
                    if stub.Normalize(request, timeout=60).output.data != expected:
                        wrong.append('bits')
                    outcomes['answered'] += 1
                except grpc.RpcError as error:
                    if error.code() != NOT_FOUND:
                        wrong.append(error)
                    outcomes['not found'] += 1

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            caller.unregister()
            caller.register()
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])
        self.assertGreater(outcomes['answered'], 0)
        self.assertTrue(self.daemon.alive())

    def test_a_caller_that_is_killed(self):
        code = '''
import sys
sys.path.insert(0, sys.argv[1])
import harness, shared_memory_test as t
class There:
    address = sys.argv[2]
    def channel(self): return harness.open_channel(self.address)
    def stub(self): return harness.layer_grpc.LayerServiceStub(self.channel())
caller = t.Caller(There(), sys.argv[3], 'killed', 8 << 20)
print('ready', flush=True)
while True:
    caller.stub.Normalize(t.layer_pb.NormalizeRequest(input=t.shared('killed', 0, [1024, 1024]), spec=t.RMS_NORM,
                                                      output_memory=t.at('killed', 4 << 20)), timeout=60)
'''
        neighbour = Neighbour(self.daemon, self.folder)
        other = subprocess.Popen([sys.executable, '-c', code, str(pathlib.Path(__file__).parent), self.daemon.address,
                                  str(self.folder)], stdout=subprocess.PIPE)
        self.assertEqual(other.stdout.readline(), b'ready\n')
        self.normalize(layer_pb.NormalizeRequest(input=shared('killed', 0, [1024, 1024]), spec=RMS_NORM))
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
        (self.folder / 'killed').unlink()
        self.normalize(layer_pb.NormalizeRequest(input=shared('killed', 0, [1024, 1024]), spec=RMS_NORM))
        self.assertEqual(neighbour.finish(), [])
        regions = self.registry.ListRegions(shared_pb.ListRegionsRequest(), timeout=60).regions
        self.assertEqual([region.name for region in regions], ['killed', 'neighbour'])
        self.registry.UnregisterRegion(shared_pb.UnregisterRegionRequest(name='killed'), timeout=60)
        self.assertTrue(self.daemon.alive())


class CallersOfOneLayer(Shared):
    """A layer on the server whose callers are computed together, and divided."""

    NAME, DIM = 'models/m/layers/mlp', 512

    def setUp(self):
        store = harness.scratch_dir()
        self.flags = (f'--layer_store={store}', '--batch_rows=16')
        super().setUp()
        self.daemon.ready()
        resident.upload(resident.registry(self.daemon), self.NAME, resident.SWIGLU,
                        resident.swiglu_weights(1, self.DIM, 1536, BFLOAT16))
        self.x = normal(2, 200, self.DIM)
        answer = self.stub.FeedForward(layer_pb.FeedForwardRequest(input=tensor(self.x), layer=self.NAME), timeout=60)
        self.row_bytes = 4 * self.DIM
        self.expected = answer.output.data

    def rows(self, first, count):
        return self.expected[first * self.row_bytes:(first + count) * self.row_bytes]

    def in_threads(self, *works):
        """Runs each until the last one ends; the errors of all."""
        stop, errors = threading.Event(), []

        def run(work):
            try:
                while not stop.is_set():
                    work()
            except Exception as error:  # pylint: disable=broad-except
                errors.append(error)

        threads = [threading.Thread(target=run, args=(work,)) for work in works[:-1]]
        for thread in threads:
            thread.start()
        try:
            works[-1]()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        return errors

    def caller_of_rows(self, name, first, count):
        """A call of these rows through shared memory, checked to the bit."""
        caller = Caller(self.daemon, self.folder, name, 2 * MIB)
        request = layer_pb.FeedForwardRequest(input=caller.share(0, tensor(self.x[first:first + count])),
                                              layer=self.NAME, output_memory=at(name, MIB))

        def call():
            caller.put(MIB, bytes(count * self.row_bytes))
            answer = caller.stub.FeedForward(request, timeout=60)
            self.assertEqual(caller.get(answer.output), self.rows(first, count))
            self.assertEqual(len(answer.layer_hash), 64)

        return call

    def test_joined_and_divided_calls_have_the_same_bits(self):
        small = [self.caller_of_rows(f'r{i}', 7 * i, count) for i, count in enumerate((1, 2, 1, 3, 16, 17))]
        large = self.caller_of_rows('large', 30, 170)

        def some():
            for _ in range(40):
                large()

        self.assertEqual(self.in_threads(*small, some), [])

    def test_nobody_suffers_for_a_caller_that_truncates(self):
        bad = Caller(self.daemon, self.folder, 'bad', 2 * MIB)
        bad.share(0, tensor(self.x[:8]))
        request = layer_pb.FeedForwardRequest(input=shared('bad', 0, [8, self.DIM]), layer=self.NAME,
                                              output_memory=at('bad', MIB))
        reasons, whole = set(), threading.Lock()

        def truncate():
            with whole:
                os.truncate(bad.path, 4096)
                os.truncate(bad.path, bad.size)

        def misbehave():
            for _ in range(150):
                try:
                    bad.stub.FeedForward(request, timeout=60)
                except grpc.RpcError as raised:
                    reasons.add(RichError(raised).reason)
                    with whole:
                        bad.fill()
                        bad.register()

        works = [self.caller_of_rows(f'r{i}', 7 * i, count) for i, count in enumerate((1, 2, 40))]
        self.assertEqual(self.in_threads(*works, truncate, misbehave), [])
        self.assertLessEqual(reasons, {'REGION_TRUNCATED', 'REGION_DAMAGED'})
        self.assertGreater(reasons, set())
        self.assertTrue(self.daemon.alive())


if __name__ == '__main__':
    unittest.main()
