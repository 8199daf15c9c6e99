"""What the daemon and layerctl do where the machine has too little: memory, threads, room to write."""
import os
import resource
import subprocess
import unittest

import grpc
import numpy as np

from harness import LAYERD, LAYERCTL, Daemon, RichError, error_of, norm_request, scratch_dir


def start(*flags, limit=None, prefix=()):
    """Starts a daemon that is expected to end by itself."""
    def before():
        if limit:
            resource.setrlimit(limit[0], (limit[1], limit[1]))
    return subprocess.run([*prefix, LAYERD, '--grpc_listen=127.0.0.1:0', *flags], preexec_fn=before, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)


class Start(unittest.TestCase):
    def one_line(self, result, *texts):
        self.assertEqual(result.returncode, 1, result)
        self.assertRegex(result.stderr, r'\Alayerd: [^\n]*\n\Z')
        for text in texts:
            self.assertIn(text, result.stderr)

    @unittest.skipIf(os.environ.get('LAYERD_CXX_FLAGS'), 'sanitizers need more address space than there is')
    def test_too_little_address_space_is_said(self):
        self.one_line(start(limit=(resource.RLIMIT_AS, 128 << 20)), 'cannot start')

    def test_a_port_file_that_is_no_file_is_left_alone(self):
        path = scratch_dir() / 'fifo'
        os.mkfifo(path)
        self.one_line(start(f'--port_file={path}'), '--port_file', str(path))
        self.assertTrue(path.is_fifo())


class Memory(unittest.TestCase):
    def test_no_rows_cost_nothing_even_verified(self):
        with Daemon() as daemon:
            request = norm_request(np.ones((1, 1)))
            del request.input.shape[:]
            request.input.shape.extend([0, 2147483647])
            request.input.ClearField('data')
            request.verify = True
            before = daemon.peak_memory_bytes()
            self.assertEqual(list(daemon.stub().Normalize(request, timeout=60).output.shape), [0, 2147483647])
            self.assertLess(daemon.peak_memory_bytes() - before, 64 << 20)

    def test_an_empty_message_lacks_its_first_field(self):
        with Daemon() as daemon:
            request = norm_request([[1]])
            request.Clear()
            error = error_of(daemon.stub().Normalize, request)
            self.assertEqual((error.code.name, error.reason), ('INVALID_ARGUMENT', 'MISSING'))

    def test_a_call_without_a_message_is_told_so(self):
        with Daemon() as daemon:
            for method in ('layerd.v1.LayerService/Normalize', 'layerd.v1.LayerRegistry/ListLayers',
                           'layerd.v1.LayerRegistry/DownloadLayer', 'layerd.v1.SharedMemoryRegistry/ListRegions',
                           'grpc.health.v1.Health/Check', 'grpc.health.v1.Health/Watch'):
                call = daemon.channel().stream_unary(f'/{method}')  # by which no message may be sent
                with self.assertRaises(grpc.RpcError) as raised:
                    call(iter(()), timeout=60)
                error = RichError(raised.exception)
                self.assertEqual((error.code.name, error.reason), ('INVALID_ARGUMENT', 'MALFORMED_MESSAGE'), method)
                self.assertIn('got none', error.text)


class Output(unittest.TestCase):
    def test_what_cannot_be_printed_is_an_error(self):
        for command in (['plan', '--dim', '64'], ['--help'], ['plan', '--help']):
            with open('/dev/full', 'w', encoding='ascii') as full:
                result = subprocess.run([LAYERCTL, *command], stdout=full, stderr=subprocess.PIPE, text=True,
                                        timeout=60, check=False)
            self.assertEqual((result.returncode, result.stderr),
                             (2, 'layerctl: cannot write to standard output\n'), command)

    def test_options_that_would_be_ignored_are_refused(self):
        for command in (['--out', 'z.npy', 'plan', '--dim', '3'], ['--json', 'demo'], ['--server', '', 'health'],
                        ['plan', '--dim', '3', '--hidden', '9', '--multiple-of', '4'],
                        ['check', '--dim', '8', 'normalize', '--kind', 'rms_norm', '--input', '[1]'],
                        ['normalize', '--kind', 'rms_norm', '--input', '[1]', '--rows', '3'],
                        ['normalize', '--kind', 'rms_norm', '--input', '[1]', '--prefix', 'x'],
                        ['--timeout-s', 'nan', 'health']):
            result = subprocess.run([LAYERCTL, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                    timeout=60, check=False)
            self.assertEqual(result.returncode, 2, (command, result))
            self.assertEqual(result.stderr.count('\n'), 1, (command, result))


if __name__ == '__main__':
    unittest.main()
