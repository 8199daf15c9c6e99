"""layerctl on inputs beyond every message: it sends them as streams, and nobody sees it but by the memory."""
import os
import subprocess
import sys
import time
import unittest

import numpy as np

import harness
from harness import Daemon, layer_pb, layerctl, scratch_dir, tensor

# A daemon whose messages are far smaller than the inputs below.
SMALL = ('--max_message_mib=4', '--message_memory_mib=32')
RMS_NORM = layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_RMS_NORM)
# A second's work or two of one thread for some 10⁵ rows of 64, by weights of 3 MiB.
LAYER = ('--form', 'gated', '--activation', 'silu', '--layout', 'out_in', '--seed', 1, '--hidden', 4096)

# Runs a command and prints the most memory that it had. A process of its own, since a child is taken to have had the memory
# of the process that started it.
TELL_MEMORY = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def saved(array):
    path = scratch_dir() / 'x.npy'
    np.save(path, array)
    return path


def normalized(array, **options):
    """What one message answers."""
    with Daemon() as daemon:
        request = layer_pb.NormalizeRequest(input=tensor(array), spec=RMS_NORM, **options)
        return daemon.stub().Normalize(request, timeout=60)


class LargeFiles(unittest.TestCase):
    def test_a_norm_of_any_size_has_the_bits_of_one_message(self):
        # 24 MiB is a stream from the beginning, 6 and 10 MiB become one when the daemon, or its gRPC, refuses them.
        with Daemon(*SMALL) as daemon:
            for shape in ((6, 1000, 1024), (2560, 1024), (1536, 1024)):
                x, out = normal(1, *shape), scratch_dir() / 'y.npy'
                before = daemon.peak_memory_bytes()
                result = layerctl('normalize', '--kind', 'rms_norm', '--input', saved(x), '--out', out, server=daemon)
                self.assertEqual((result.status, result.stderr), (0, ''))
                self.assertEqual(np.load(out).shape, shape)
                self.assertEqual(np.load(out).tobytes(), normalized(x).output.data)
                self.assertLess(daemon.peak_memory_bytes() - before, (64 << 20) + harness.SANITIZER_BYTES)

    def test_the_client_holds_input_and_output_and_little_else(self):
        x = saved(normal(1, 24576, 1024))  # 96 MiB
        with Daemon(*SMALL) as daemon:
            result = subprocess.run([sys.executable, '-c', TELL_MEMORY, harness.LAYERCTL, '--server', daemon.address,
                                     'normalize', '--kind', 'rms_norm', '--input', x, '--out', x.with_name('y.npy')],
                                    stdout=subprocess.PIPE, text=True, check=True)
        self.assertLess(int(result.stdout), ((2 * 96 + 64) << 20) + harness.SANITIZER_BYTES)

    def test_residual_and_verdict_are_those_of_one_message(self):
        x, residual = normal(1, 4500, 1024), normal(2, 4500, 1024)
        expected = normalized(x, residual=tensor(residual), verify=True)
        with Daemon(*SMALL) as daemon:
            arguments = ('normalize', '--kind', 'rms_norm', '--input', saved(x), '--residual', saved(residual),
                         '--verify', '--out', scratch_dir() / 'y.npy')
            streamed = layerctl(*arguments, server=daemon)
            self.assertEqual((streamed.status, streamed.stderr), (0, ''))
            self.assertIn(f'{expected.report.max_abs_error:.4g}', streamed.stdout)
            self.assertIn('within the contract', streamed.stdout)

    def test_a_layer_of_any_number_of_rows_has_the_bits_of_one_message(self):
        x = normal(1, 100000, 64)
        arguments = ('feedforward', *LAYER[:-1], 16, '--input', saved(x))
        outputs = []
        for flags in (SMALL, ()):
            with Daemon(*flags) as daemon:
                out = scratch_dir() / 'y.npy'
                if flags:
                    result = layerctl(*arguments, '--out', out, server=daemon)
                    self.assertEqual((result.status, result.stderr), (0, ''))
                    outputs.append(np.load(out))
                else:  # below the size that is streamed
                    for begin in range(0, len(x), 50000):
                        result = layerctl(*arguments[:-1], saved(x[begin:begin + 50000]), '--out', out, server=daemon)
                        self.assertEqual((result.status, result.stderr), (0, ''))
                        outputs.append(np.load(out))
        self.assertEqual(outputs[0].tobytes(), np.concatenate(outputs[1:]).tobytes())


class EndsInTheMiddle(unittest.TestCase):
    """What ends a stream is told as what ends a call: exit status and text are those of one message."""

    def outcome(self, flags, rows, during=None, timeout_s=60):
        """(exit status, text) of layerctl; `during` is called when the daemon has computed a part of it."""
        with Daemon('--threads=1', *flags) as daemon:
            before = daemon.cpu_seconds()
            client = subprocess.Popen(
                [harness.LAYERCTL, '--server', daemon.address, '--timeout-s', str(timeout_s), 'feedforward',
                 *map(str, LAYER), '--input', saved(normal(1, rows, 64)), '--out', scratch_dir() / 'y.npy'],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if during:
                while client.poll() is None and daemon.cpu_seconds() < before + 0.1:
                    time.sleep(0.002)
                self.assertIsNone(client.poll(), 'it was over before')
                during(daemon)
            _, text = client.communicate(timeout=600)
            return client.returncode, text

    def both(self, **options):
        """The outcomes of a stream, and of one message of 15 MiB, which both take a second or so."""
        return (self.outcome(('--grace_s=0',) + SMALL, 100000, **options),
                self.outcome(('--grace_s=0',), 60000, **options))

    def test_a_deadline(self):
        stream, message = self.both(timeout_s=0.5)
        self.assertEqual(stream, message)
        self.assertEqual(stream[0], 3)

    def test_a_daemon_that_is_stopped(self):
        stream, message = self.both(during=lambda daemon: daemon.stop())
        self.assertEqual(stream, message)
        self.assertIn(stream[0], (3, 4))

    def test_a_daemon_that_is_killed(self):
        stream, message = self.both(during=lambda daemon: daemon.kill())
        self.assertEqual((stream[0], message[0]), (3, 3))
        for text in (stream[1], message[1]):
            self.assertRegex(text, r'\Alayerctl: .*\n\Z')

    def test_a_daemon_that_is_stopped_and_has_time(self):
        rows = 20000 if os.environ.get('LAYERD_CXX_FLAGS') else 100000  # sanitizers take 100 times as long on some CPUs
        status, text = self.outcome(('--grace_s=600',) + SMALL, rows, timeout_s=600,
                                    during=lambda daemon: daemon.send_signal(15))
        self.assertEqual((status, text), (0, ''))


if __name__ == '__main__':
    unittest.main()
