"""service_bench runs: one tiny cell of each face, and the daemon and the echo that it starts end with it, however it ends.
No time is judged."""
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

SERVICE_BENCH = pathlib.Path(os.environ['LAYERD_BIN_DIR']) / 'service_bench'
ONE_CELL = ('--threads', '1', '--pairs', '5', '--sample_ms', '0.1', '--filter')
ENDLESS_CELL = ('--threads', '1', '--pairs', '1000', '--sample_ms', '1000', '--filter')


class ServiceBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.environment = dict(os.environ, TMPDIR=folder.name)
        self.addCleanup(self.kill_children)

    def run_bench(self, *arguments):
        return subprocess.run([SERVICE_BENCH, *map(str, arguments)], env=self.environment, capture_output=True, text=True,
                              check=False)

    def children(self):
        """The command lines, by process, of those that were told of a folder in ours."""
        found = {}
        for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
            try:
                words = path.read_bytes().decode(errors='replace').split('\0')
            except OSError:  # it has ended
                continue
            if any(str(self.folder / 'layerd_bench_') in word for word in words):
                found[int(path.parent.name)] = words
        return found

    def kill_children(self):
        for pid in self.children():
            os.kill(pid, signal.SIGKILL)

    def wait_until(self, what, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.05)

    def start(self, pattern):
        """The benchmark in the middle of an endless cell, its daemon's process, and the folder of the shared memory."""
        bench = subprocess.Popen([SERVICE_BENCH, *ENDLESS_CELL, pattern], env=self.environment, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
        self.addCleanup(bench.communicate)
        self.addCleanup(bench.kill)
        while not bench.stdout.readline().startswith('cell '):  # the head of the table
            self.assertIsNone(bench.poll())
        self.assertEqual(len(self.children()), 2)
        [(daemon, words)] = [child for child in self.children().items() if child[1][0].endswith('/layerd')]
        [memory] = [word.split('=')[1] for word in words if word.startswith('--shared_memory_dir=')]
        return bench, daemon, pathlib.Path(memory)

    def assert_nothing_left(self):
        self.assertEqual(self.children(), {})
        self.assertEqual(list(self.folder.glob('layerd_bench_*')), [])

    def test_a_row_beside_an_echo(self):
        path = self.folder / 'cells.json'
        done = self.run_bench(*ONE_CELL, '^normalize/over_echo_(tcp|unix)/float32/1x4096/t1$', '--json', path)
        self.assertEqual(done.returncode, 0, done.stderr)
        cells = json.loads(path.read_text())['cells']
        self.assertEqual([cell['variant'] for cell in cells], ['over_echo_tcp', 'over_echo_unix'])
        for cell in cells:
            self.assertEqual((cell['bound'], cell['bytes']), ('echo', 2 * 4 * 4096))
            self.assertGreater(cell['ratio'], 0)
            self.assertLess(cell['error'], 1e-6)
        self.assert_nothing_left()

    def test_killed_it_leaves_nothing(self):
        for number in (signal.SIGKILL, signal.SIGINT):
            bench, _, memory = self.start('^normalize/shared_memory/')
            self.wait_until('shared memory', lambda: any(memory.iterdir()))
            bench.send_signal(number)
            self.assertEqual(bench.wait(60), -number)
            self.wait_until('the end of the children', lambda: not self.children())
            self.assert_nothing_left()
            self.assertFalse(memory.exists())

    def test_a_cell_that_fails_leaves_nothing(self):
        bench, daemon, memory = self.start('^normalize/over_echo_tcp/float32/1x4096/t1$')
        os.kill(daemon, signal.SIGKILL)
        _, errors = bench.communicate(timeout=60)
        self.assertEqual(bench.returncode, 1)
        self.assertRegex(errors, '^service_bench: UNAVAILABLE')
        self.assert_nothing_left()
        self.assertFalse(memory.exists())

    def test_every_cell_has_a_name_of_its_own(self):
        names = self.run_bench('--threads', '1', '--list').stdout.split()
        self.assertEqual(len(names), len(set(names)))
        kinds = {'/'.join(name.split('/')[:2]) for name in names}
        self.assertEqual(kinds, {'normalize/' + variant for variant in (
            'over_echo_tcp', 'over_echo_unix', 'over_protobuf_tcp', 'shared_memory', 'over_64_calls', 'callers_64',
            'streamed_call', 'stream')} | {'feed_forward/' + variant for variant in (
                'one_caller', 'callers', 'overload')})

    def test_what_cannot_be_done_is_said(self):
        plain = self.folder / 'plain'
        plain.touch()
        for arguments, status, text in (
                (('--filter', 'no such cell'), 2, "no cell has a name that matches 'no such cell'"),
                (('--filter', '('), 2, 'service_bench: '),
                (('--daemon', '/bin/false'), 1, 'service_bench: /bin/false does not serve'),
                (('--daemon', plain), 1, 'service_bench: cannot run ')):
            done = self.run_bench(*arguments)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(text, done.stderr)
            self.assert_nothing_left()


if __name__ == '__main__':
    unittest.main()
