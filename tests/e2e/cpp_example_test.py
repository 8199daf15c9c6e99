"""The installed C++ package, found by a program of its own, and what that program gets from a daemon."""
import os
import pathlib
import subprocess
import tempfile
import unittest

from harness import SOURCE_DIR, Daemon


def run(*command, **options):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert result.returncode == 0, f'{command}\n{result.stdout[-4000:]}'
    return result.stdout


class InstalledPackage(unittest.TestCase):
    def test_the_example_builds_against_it_and_asks_a_daemon(self):
        build = os.environ.get('LAYERD_BUILD_DIR', str(SOURCE_DIR / 'build' / 'release'))
        with tempfile.TemporaryDirectory() as folder:
            prefix, example = pathlib.Path(folder, 'prefix'), pathlib.Path(folder, 'example')
            run('cmake', '--install', build, '--prefix', str(prefix))
            for program in ('layerd', 'layerctl'):
                self.assertTrue((prefix / 'bin' / program).is_file())
            self.assertTrue((prefix / 'share/layerd/proto/layerd/v1/layer_service.proto').is_file())
            run('cmake', '-G', 'Ninja', '-S', str(SOURCE_DIR / 'examples' / 'cpp'), '-B', str(example),
                f'-DCMAKE_PREFIX_PATH={prefix}', f'-DCMAKE_CXX_FLAGS={os.environ.get("LAYERD_CXX_FLAGS", "")}')
            run('cmake', '--build', str(example))
            with Daemon() as daemon:
                output = run(str(example / 'ask'), daemon.address, timeout=120)
        lines = output.splitlines()
        self.assertEqual(lines[0].split(), ['0.365148', '-1.09544', '1.46059', '0.730297'])
        self.assertRegex(lines[1], r'^output \[2, 64\], largest error \S+e-0[67], within the contract$')
        self.assertEqual(lines[2], 'weights.down: MISSING')


if __name__ == '__main__':
    unittest.main()
