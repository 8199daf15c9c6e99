"""What the daemon does with an OpenBLAS that is broken, incomplete, or sums in another order, and with each core type
that a user may ask it for.
"""
import os
import pathlib
import subprocess
import unittest


from harness import BIN_DIR, LAYERD, Daemon, layerctl

FAKES = BIN_DIR.parent / 'tests' / 'fake_openblas'
# What a CPU must have to run the kernels of a core type, in the words of /proc/cpuinfo.
CORES = {'Prescott': {'pni'}, 'Sandybridge': {'avx'}, 'Haswell': {'avx2', 'fma'},
         'SkylakeX': {'avx512f', 'avx512bw', 'avx512dq', 'avx512vl'}}
# Enough rows that OpenBLAS is asked where it is used.
LAYER = ('feedforward', '--seed', '1', '--rows', '300', '--dim', '48', '--hidden', '80', '--json')


def library_path(fault):
    folder = FAKES / fault
    assert (folder / 'libopenblas.so.0').is_file(), folder
    return {'LD_LIBRARY_PATH': str(folder)}


class Libraries(unittest.TestCase):
    def answer(self, daemon):
        result = layerctl('--server', daemon.address, *LAYER)
        self.assertEqual(result.status, 0, result.stderr)
        return result.stdout

    def test_one_that_multiplies_wrongly_is_not_served_with(self):
        result = subprocess.run([LAYERD, '--grpc_listen=127.0.0.1:0'], env={**os.environ, **library_path('WRONG')},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stderr, r'^layerd: refusing to serve: [^\n]*OpenBLAS[^\n]*\n$')
        self.assertEqual(result.stdout, '')

    def test_others_that_cannot_be_used_are_named_and_change_no_bit(self):
        with Daemon() as daemon:
            expected = self.answer(daemon)
        for fault, line in (('INCOMPLETE', 'level=warning event=openblas_not_used reason="?libopenblas.so.0 lacks'),
                            ('REORDERED', 'core=Fake .*follows_order=no used=no')):
            with self.subTest(fault), Daemon(env=library_path(fault)) as daemon:
                self.assertRegex(daemon.log(), line)
                self.assertEqual(self.answer(daemon), expected)

    def test_whichever_core_type_the_user_asks_for_no_bit_changes(self):
        features = set()
        for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('flags'):
                features = set(line.split())
                break
        with Daemon() as daemon:
            expected = self.answer(daemon)
        asked = [core for core, needs in CORES.items() if needs <= features]
        if not asked:
            self.skipTest('no CPU that these core types are of')
        for core in asked:
            with self.subTest(core), Daemon(env={'OPENBLAS_CORETYPE': core}) as daemon:
                self.assertRegex(daemon.log(), f'core={core} ')
                self.assertEqual(self.answer(daemon), expected)


if __name__ == '__main__':
    unittest.main()
