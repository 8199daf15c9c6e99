"""Memory shared with the daemon: the bits of ordinary calls, and every wrong reference."""
import os
import socket
import unittest

import grpc
import numpy as np

import harness
from harness import BFLOAT16, FLOAT16, FLOAT32, Daemon, RichError, array_of, layer_pb, tensor, tensor_pb
from shared_memory import (EXISTS, INVALID, MIB, NOT_FOUND, PRECONDITION, RMS_NORM, Caller, Shared, at, normal, registry_of,
                           shared, shared_pb)


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

    def test_random_references_are_right_or_refused(self):
        random = np.random.default_rng(5)
        self.caller.put(0, normal(6, 1024).tobytes())
        kept, outcomes = bytes(self.caller.memory), {'right': 0, 'refused': 0}

        def offset():
            return int(random.choice([0, 64, 1024, 2048, 4032, 4096, random.integers(-100, 5000), -64, (1 << 63) - 64]))

        for _ in range(600):
            self.caller.put(0, kept)
            dtype = int(random.choice([FLOAT32, FLOAT16, BFLOAT16]))
            shape = [int(random.integers(0, 20)), int(random.integers(1, 60))]
            request = layer_pb.NormalizeRequest(input=shared('r', offset(), shape, dtype), spec=RMS_NORM)
            if random.random() < 0.5:
                request.output_memory.CopyFrom(at('r', offset()))
            if random.random() < 0.3:
                request.residual.CopyFrom(shared('r', offset(), shape, dtype))
            try:
                answer = self.normalize(request)
            except grpc.RpcError as raised:
                error = RichError(raised)
                self.assertTrue(error.code == INVALID and error.reason and error.fields, error.text)
                outcomes['refused'] += 1
                continue
            outcomes['right'] += 1
            size = shape[0] * shape[1] * (4 if dtype == FLOAT32 else 2)
            for field in ('input', 'residual'):
                if request.HasField(field):
                    begin = getattr(request, field).shared_memory.offset
                    getattr(request, field).CopyFrom(
                        tensor_pb.Tensor(dtype=dtype, shape=shape, data=kept[begin:begin + size]))
            expected = self.normalize(layer_pb.NormalizeRequest(
                input=request.input, residual=request.residual if request.HasField('residual') else None,
                spec=RMS_NORM))
            if request.HasField('output_memory'):
                begin = request.output_memory.offset
                self.assertEqual(self.caller.get(answer.output), expected.output.data)
                self.assertEqual(bytes(self.caller.memory), kept[:begin] + expected.output.data + kept[begin + size:])
            else:
                self.assertEqual(answer.output, expected.output)
                self.assertEqual(bytes(self.caller.memory), kept)
            self.assertEqual(answer.residual_sum, expected.residual_sum)
        self.assertGreater(min(outcomes.values()), 100, outcomes)

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


if __name__ == '__main__':
    unittest.main()
