"""kernel_bench runs: one tiny cell of each kind, what it writes, and what bench/report makes of it. No time is judged."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

KERNEL_BENCH = pathlib.Path(os.environ['LAYERD_BIN_DIR']) / 'kernel_bench'
REPORT = pathlib.Path(__file__).resolve().parents[2] / 'bench' / 'report'
QUICK = ('--pairs', '5', '--sample_ms', '0.1', '--threads', '1')


def run(*arguments):
    return subprocess.run([str(a) for a in arguments], capture_output=True, text=True, check=False)


class KernelBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def measure(self, pattern):
        path = self.folder / 'cells.json'
        done = run(KERNEL_BENCH, *QUICK, '--filter', pattern, '--json', path)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(path.read_text()), done.stdout, path

    def test_a_norm_beside_a_copy(self):
        data, text, path = self.measure('^rms_norm/kernel/float32/1x4096/t1$')
        self.assertTrue({'processor', 'cpus', 'compiler', 'simd', 'OpenBLAS', 'date'} <= set(data['machine']))
        [cell] = data['cells']
        self.assertEqual({key: cell[key] for key in ('name', 'kernel', 'variant', 'dtype', 'dim', 'rows', 'threads')},
                         {'name': 'rms_norm/kernel/float32/1x4096/t1', 'kernel': 'rms_norm', 'variant': 'kernel',
                          'dtype': 'float32', 'dim': 4096, 'rows': 1, 'threads': 1})
        self.assertIsNone(cell['goal'])
        self.assertIsNone(cell['gflops'])
        self.assertEqual(cell['bytes'], 2 * 4 * 4096)
        self.assertIn(cell['bound'], ('copy', 'non-temporal copy'))
        for field in ('ratio', 'seconds', 'bound_seconds', 'gbs', 'error'):
            self.assertGreater(cell[field], 0, field)
        self.assertGreaterEqual(cell['spread'], 1)
        self.assertLess(cell['error'], 1e-6)
        self.assertIn(cell['name'], text)
        report = run(REPORT, path)
        self.assertEqual(report.returncode, 0, report.stderr)
        self.assertIn(f'| {cell["name"]} |', report.stdout)

    def test_layers_beside_reading_and_multiplying(self):
        data, _, path = self.measure('^feed_forward/.*/bfloat16/512x1365/M4/t1$')
        self.assertEqual([cell['variant'] for cell in data['cells']], ['packed', 'inline'])
        for cell in data['cells']:
            self.assertIn(cell['bound'], ('read', 'multiply'))
            self.assertGreater(cell['gflops'], 0)
            self.assertEqual(cell['bytes'], 3 * 512 * 1365 * 2 + 4 * 512 * 4)
            self.assertLess(cell['error'], 1e-5)
        report = run(REPORT, path, '--threads', '1', '--svg', self.folder / 'plot.svg')
        self.assertEqual(report.returncode, 0, report.stderr)
        self.assertIn('feed_forward, packed, d 512, h 1365, 1 thread; error', report.stdout)
        self.assertIn('d 512, h 1365: bfloat16', (self.folder / 'plot.svg').read_text())

    def test_int8_layers_and_the_quantiser(self):
        data, _, _ = self.measure('^(feed_forward|pack)/(packed|layer)/int8/512x1365/(M4/)?t1$|^quantize/float32/512')
        layer, pack, quantize = data['cells']
        self.assertEqual(layer['bytes'], 2 * 1365 * 512 * (1 + 2 / 32) + 512 * (1365 + 43 * 2) + 4 * 512 * 4)
        self.assertLess(layer['error'], 1e-5)
        self.assertEqual(pack['error'], 0)
        self.assertGreater(quantize['error'], 1e-3)  # half of a 127th of the largest of 32 values
        self.assertLess(quantize['error'], 3e-2)

    def test_a_layer_beside_another(self):
        data, _, _ = self.measure('^layer_norm/over_rms_norm/float32/1x4096/t1$')
        [cell] = data['cells']
        self.assertEqual((cell['bound'], cell['goal']), ('rms_norm/kernel', 1.15))

    def test_every_cell_has_a_name_of_its_own(self):
        names = run(KERNEL_BENCH, '--threads', '1', '--list').stdout.split()
        self.assertEqual(len(names), len(set(names)))
        for kernel in ('feed_forward/packed', 'feed_forward/inline', 'product/out_in', 'product/in_out',
                       'rms_norm/kernel', 'rms_norm/layer', 'layer_norm/kernel', 'activation/silu', 'gating/silu',
                       'widen', 'narrow', 'pack/layer'):
            self.assertTrue(any(name.startswith(kernel + '/') for name in names), kernel)

    def test_what_cannot_be_done_is_said(self):
        for arguments, status, text in (
                (('--filter', 'no such cell'), 2, "no cell has a name that matches 'no such cell'"),
                (('--filter', '('), 2, 'kernel_bench: '),
                (('--simd', 'mmx'), 2, "cannot run --simd 'mmx'"),
                ((*QUICK, '--filter', '^rms_norm/kernel/float32/1x4096/t1$', '--json', self.folder / 'no' / 'file'), 1,
                 'cannot be written')):
            done = run(KERNEL_BENCH, *arguments)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(text, done.stderr)


if __name__ == '__main__':
    unittest.main()
