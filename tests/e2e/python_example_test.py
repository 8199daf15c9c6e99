"""examples/python/generate.py: layers of the daemon tell the same story, for 200 tokens, as those of numpy."""
import os
import pathlib
import subprocess
import sys
import unittest

import numpy as np

import harness
import resident

DATA = pathlib.Path(os.environ.get('LAYERD_TEST_DATA') or harness.SOURCE_DIR.parent / 'shared') / 'data'
GENERATE = harness.SOURCE_DIR / 'examples' / 'python' / 'generate.py'
TOKENS = 200
# How the model's authors say that its story begins with greedy decoding (llama2.c, doc/stories260K.md).
PUBLISHED = ('Once upon a time, there was a little girl named Lily. She loved to play outside in the park. '
             'One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n')


def generate(*args):
    environment = {**os.environ, 'LAYERD_TEST_DATA': str(DATA.parent), 'PYTHONDONTWRITEBYTECODE': '1'}
    return subprocess.run([sys.executable, str(GENERATE), *args], env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120)


@unittest.skipUnless((DATA / 'stories260k').is_dir(), f'no model in {DATA} (LAYERD_TEST_DATA)')
class GenerateTest(unittest.TestCase):

    def story(self, name, *args):
        """Text, and the saved arrays."""
        file = harness.scratch_dir() / f'{name}.npz'
        done = generate('--tokens', str(TOKENS), '--save', str(file), *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        print(f'{name}: {done.stderr.strip()}: {done.stdout[:60]!r}', flush=True)
        return done, np.load(file)

    def test_the_served_story_is_the_local_one(self):
        with harness.Daemon('--threads=1') as daemon:
            served, served_arrays = self.story('served', '--server', daemon.address)
        local, local_arrays = self.story('local', '--local')

        prompt = len(local_arrays['tokens']) - TOKENS
        self.assertEqual(local_arrays['logits'].shape, (prompt + TOKENS - 1, 512))
        self.assertIn(f'{16 * (prompt + TOKENS - 1)} calls', served.stderr)
        self.assertIn(' 0 calls', local.stderr)
        self.assertTrue(local.stdout.startswith(PUBLISHED), local.stdout)

        self.assertEqual(served.stdout, local.stdout)
        self.assertEqual(served_arrays['tokens'].tolist(), local_arrays['tokens'].tolist())
        difference = float(np.abs(served_arrays['logits'] - local_arrays['logits']).max())
        print(f'logits: at most {difference:.3g} apart, of up to {np.abs(local_arrays["logits"]).max():.3g}')
        # Both are the exact model to a few float32 roundings a layer; another gate or epsilon is off by far more.
        self.assertLess(difference, 1e-4)
        self.assertEqual(local_arrays['logits'].dtype, np.float32)

    def test_the_story_by_name_is_the_one_with_weights_in_the_calls(self):
        with harness.Daemon('--threads=1', f'--models={resident.stories_models()}').ready() as daemon:
            sent, sent_arrays = self.story('sent', '--server', daemon.address)
            named, named_arrays = self.story('named', '--server', daemon.address, '--resident', 'stories260k')
        self.assertEqual(named.stdout, sent.stdout)
        self.assertEqual(named_arrays['logits'].tobytes(), sent_arrays['logits'].tobytes())
        self.assertEqual(named.stderr.split(', ')[1], sent.stderr.split(', ')[1])  # as many calls

    def test_another_prompt_tells_another_story(self):
        with harness.Daemon('--threads=1') as daemon:
            served = generate('--tokens', '20', '--prompt', 'The cat “Zoë”', '--server', daemon.address)
        local = generate('--tokens', '20', '--prompt', 'The cat “Zoë”', '--local')
        self.assertEqual((served.returncode, local.returncode), (0, 0), served.stderr + local.stderr)
        self.assertEqual(served.stdout, local.stdout)
        self.assertTrue(local.stdout.startswith('The cat “Zoë”'), local.stdout)

    def test_shows_the_details_of_an_error(self):
        program = ('import generate, numpy, sys\n'
                   'one = numpy.ones(4, numpy.float32)\n'
                   'generate.ServedLayers(sys.argv[1], {"n.weight": one}, -1).norm("n", one)\n')
        with harness.Daemon('--threads=1') as daemon:
            done = subprocess.run([sys.executable, '-c', program, daemon.address], cwd=GENERATE.parent, text=True,
                                  env={**os.environ, 'PYTHONDONTWRITEBYTECODE': '1'}, capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stderr.startswith('INVALID_ARGUMENT: spec.epsilon: '), done.stderr)
        self.assertIn('\n  reason EPSILON_OUT_OF_RANGE\n', done.stderr)
        self.assertIn('\n  field spec.epsilon: ', done.stderr)

    def test_says_what_is_wrong_when_there_is_no_server(self):
        done = generate('--tokens', '1', '--server', f'unix:{harness.scratch_dir()}/none')
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stderr.startswith('UNAVAILABLE: '), done.stderr)
        self.assertNotIn('Traceback', done.stderr)


if __name__ == '__main__':
    unittest.main()
