"""Callers who truncate, unregister or die in the middle of calls through shared memory: they harm nobody but themselves."""
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import unittest

import grpc

import harness
import resident
from harness import BFLOAT16, RichError, layer_pb, tensor
from shared_memory import (INVALID, MIB, NOT_FOUND, PRECONDITION, RMS_NORM, Caller, Shared, at, normal, shared, shared_pb)


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
import harness, shared_memory as t
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
