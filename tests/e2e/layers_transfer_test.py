"""layerctl layers verify, progress, and servers that are wrong, slow or silent."""
import concurrent.futures
import contextlib
import os
import pty
import re
import subprocess
import threading
import time
import unittest

import grpc

import harness
from harness import Daemon, layer_grpc, layerctl, open_channel
from layers_support import MLP, NORM, LayersTest
from models_test import wait_for
from resident import registry_grpc, registry_pb


class Progress(LayersTest):
    UPLOAD = ('layers', 'upload', 'models/u/layers/x', '--seed', '1', '--dim', '64', '--hidden', '64', '--chunk-bytes', '64')

    def test_none_where_no_terminal_is(self):
        self.run_ok(*self.UPLOAD)
        self.run_ok('layers', 'download', 'models/u/layers/x', '--out', self.folder / 'x.safetensors')

    def test_where_it_is_asked_for(self):
        for command in (self.UPLOAD, ('layers', 'download', 'models/u/layers/x', '--out', self.folder / 'x.safetensors'),
                        ('layers', 'verify', 'models/u/layers/x')):
            result = layerctl(*command, '--progress', server=self.daemon)
            self.assertEqual(result.status, 0, result)
            lines = re.split('[\r\n]+', result.stderr.strip())
            for line in lines:
                self.assertRegex(line, r'^\S+layers/x \[[#-]+\] +\d+%  [\d.]+ \w+ of 48\.\d KiB  [\d.]+ \w+/s  [\d:-]+ '
                                 'left$')
            self.assertIn(' 100%  48.', lines[-1])
            self.assertTrue(result.stderr.endswith('\n'))

    def on_a_terminal(self, *args):
        """The exit status, and what came on a terminal that is standard error."""
        ours, theirs = pty.openpty()
        with os.fdopen(ours, 'rb', buffering=0) as terminal:
            process = subprocess.Popen([harness.LAYERCTL, '--server', self.daemon.address, *map(str, args)],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs)
            os.close(theirs)
            output = b''
            with contextlib.suppress(OSError):  # the end of a terminal
                while piece := terminal.read(4096):
                    output += piece
            return process.wait(60), output.decode()

    def test_on_a_terminal_it_is_wiped_or_never_shown(self):
        status, output = self.on_a_terminal(*self.UPLOAD)
        self.assertEqual(status, 0)
        if output:  # a machine so busy that it took more than a second
            self.assertTrue(output.endswith('\r\x1b[K'), output)
        status, output = self.on_a_terminal(*self.UPLOAD, '--progress')
        self.assertEqual(status, 0)
        self.assertIn('\r', output)
        self.assertIn('100%', output)


class Forwarder(layer_grpc.LayerServiceServicer, registry_grpc.LayerRegistryServicer):
    """A server that answers as the real one does, but for what `changes` make of its answers by method."""

    def __init__(self, address, **changes):
        channel = open_channel(address)
        self.layers, self.registry = layer_grpc.LayerServiceStub(channel), registry_grpc.LayerRegistryStub(channel)
        self.changes = changes

    def changed(self, method, answer):
        self.changes.get(method, lambda _: None)(answer)
        return answer

    def Normalize(self, request, context):
        return self.changed('Normalize', self.layers.Normalize(request, timeout=60))

    def FeedForward(self, request, context):
        return self.changed('FeedForward', self.layers.FeedForward(request, timeout=60))

    def GetLayer(self, request, context):
        return self.changed('GetLayer', self.registry.GetLayer(request, timeout=60))

    def DownloadLayer(self, request, context):
        for part in self.registry.DownloadLayer(request, timeout=60):
            yield self.changed('DownloadLayer', part)


@contextlib.contextmanager
def fake_server(servicer):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    layer_grpc.add_LayerServiceServicer_to_server(servicer, server)
    registry_grpc.add_LayerRegistryServicer_to_server(servicer, server)
    port = server.add_insecure_port('127.0.0.1:0')
    server.start()
    try:
        yield f'127.0.0.1:{port}'
    finally:
        server.stop(0).wait()


class Verifying(LayersTest):
    def test_good_layers(self):
        text = self.run_ok('layers', 'verify', MLP)
        self.assertEqual(text.splitlines()[0], f'{MLP}  {self.hash}')
        self.assertEqual(re.findall(r'^(\w+) .*within the contract$', text, re.MULTILINE), ['float32'])
        answer = self.ask('layers', 'verify', NORM, '--rows', '7', '--seed', '3')
        self.assertEqual((answer['good'], answer['verified_by_server']), (True, True))
        self.assertEqual([case['input'] for case in answer['cases']], ['float32', 'bfloat16'])
        for case in answer['cases']:
            self.assertEqual(case['layer_hash'], answer['content_hash'])
            self.assertTrue(case['report']['within_contract'])

    def test_every_kind_of_layer(self):
        norm = ('--kind', 'layer_norm', '--rounding', 'after_gamma', '--dim', '12')
        for args in ((*norm, '--gate-position', 'first'), (*norm, '--gate-position', 'last', '--group-size', '3'),
                     (*norm, '--gamma-offset', '1', '--dtype', 'float16'),
                     ('--dim', '12', '--hidden', '20', '--packing', 'halves', '--biases', '--dtype', 'bfloat16'),
                     ('--dim', '12', '--hidden', '20', '--form', 'plain', '--activation', 'gelu', '--inner-norm')):
            etag = [layer['etag'] for layer in self.ask('layers', 'list', '--model', 'u')['layers']]
            self.run_ok('layers', 'upload', 'models/u/layers/x', '--seed', '4', *args, *(('--etag', *etag) if etag else ()))
            self.assertTrue(self.ask('layers', 'verify', 'models/u/layers/x')['good'], args)

    def test_a_layer_too_large_for_the_server_to_verify_is_judged_here(self):
        with Daemon(f'--models={self.models}', '--max_verify_flops=10').ready() as daemon:
            wait_for(lambda: 'model_read' in daemon.log())
            self.assertIn('judged here only', self.run_ok('layers', 'verify', MLP, server=daemon))
            self.assertFalse(self.ask('layers', 'verify', NORM, server=daemon)['verified_by_server'])

    def outside(self, name, **changes):
        with fake_server(Forwarder(self.daemon.address, **changes)) as address:
            result = layerctl('layers', 'verify', name, server=address)
            self.assertEqual(result.status, 1, result)
            return result

    def test_through_a_server_that_changes_nothing(self):
        with fake_server(Forwarder(self.daemon.address)) as address:
            self.run_ok('layers', 'verify', MLP, server=address)
            self.run_ok('layers', 'verify', NORM, server=address)

    def test_1_where_a_number_is_slightly_wrong(self):
        def change(answer):
            data = bytearray(answer.output.data)
            data[1 if answer.output.dtype == harness.FLOAT32 else 0] ^= 8  # 2^11 ulp of a float32
            answer.output.data = bytes(data)
        self.assertIn('OUTSIDE THE CONTRACT', self.outside(MLP, FeedForward=change).stdout)
        self.assertIn('OUTSIDE THE CONTRACT', self.outside(NORM, Normalize=change).stdout)

    def test_1_where_the_server_itself_says_so(self):
        def change(answer):
            answer.report.within_contract = False
        self.outside(MLP, FeedForward=change)

    def test_1_where_hashes_differ(self):
        def other_layer(answer):
            answer.layer_hash = 'a' * 64

        def no_hash(answer):
            answer.content_hash = ''
        self.assertIn('the answer for float32', self.outside(MLP, FeedForward=other_layer).stderr)
        self.assertIn('describe', self.outside(MLP, GetLayer=no_hash).stderr)

    def test_1_where_the_bytes_are_others(self):
        def change(part):
            if len(part.chunk) > 1000:  # a weight, not the header
                part.chunk = part.chunk[:-1] + bytes([part.chunk[-1] ^ 1])
        result = self.outside(MLP, DownloadLayer=change)
        self.assertIn('content hash', result.stderr)
        with fake_server(Forwarder(self.daemon.address, DownloadLayer=change)) as address:
            self.failed(1, 'layers', 'download', MLP, '--out', self.folder / 'x.safetensors', server=address)
        self.assertEqual(list(self.folder.iterdir()), [])


class Waiting(LayersTest):
    def test_a_server_that_takes_no_bytes_is_given_up(self):
        class Silent(Forwarder):
            def CreateLayer(self, requests, context):
                released.wait()
                return registry_pb.Layer()

            def DownloadLayer(self, request, context):
                released.wait()
                yield registry_pb.DownloadLayerResponse()
        released = threading.Event()
        self.addCleanup(released.set)
        with fake_server(Silent(self.daemon.address)) as address:
            for command in (('upload', 'models/u/layers/x', '--seed', '1', '--dim', '4', '--hidden', '4'),
                            ('upload', 'models/u/layers/x', '--seed', '1', '--dim', '1024', '--hidden', '4096'),
                            ('download', MLP, '--out', self.folder / 'x.safetensors'), ('verify', MLP)):
                self.failed(3, '--timeout-s', '0.5', 'layers', *command, server=address, texts=['DEADLINE_EXCEEDED'])
            released.set()

    def test_a_transfer_may_take_longer_than_one_call(self):
        class Slow(Forwarder):
            def DownloadLayer(self, request, context):
                for part in self.registry.DownloadLayer(request, timeout=60):
                    time.sleep(0.5)  # slowness is what is tried here
                    yield part
        started = time.monotonic()
        with fake_server(Slow(self.daemon.address)) as address:
            self.run_ok('--timeout-s', '2', 'layers', 'download', MLP, '--out', self.folder / 'x.safetensors', server=address)
        self.assertGreater(time.monotonic() - started, 2, 'longer than --timeout-s')


if __name__ == '__main__':
    unittest.main()
