"""What the golden tests share: a daemon, requests for its layers, layerctl's answers as arrays, and a judge that keeps
a table of the greatest errors, printed at the end.

Their data is in $LAYERD_TEST_DATA/data and $LAYERD_TEST_DATA/cases ("shared" beside the source tree by default); a test
whose data is not there is skipped.
"""
import json
import os
import pathlib
import unittest

import numpy as np

import harness
from golden_math import ulp
from harness import FLOAT32, array_of, layer_pb, layerctl, tensor

SHARED = pathlib.Path(os.environ.get('LAYERD_TEST_DATA') or harness.SOURCE_DIR.parent / 'shared')
FFN_TOLERANCE = 3e-6  # of models whose values are of the order of 1

summary = {}  # family: [checked tensors, greatest error, in ulp, over its bound]


def setUpModule():
    GoldenTest.daemon = harness.Daemon('--threads=2')
    unittest.addModuleCleanup(GoldenTest.daemon.__exit__, None, None, None)
    GoldenTest.stub = GoldenTest.daemon.stub()


def tearDownModule():
    print(f'\n{"family":36} {"tensors":>7} {"max abs":>10} {"max ulp":>10} {"of bound":>9}')
    for family, (count, error, ulps, of_bound) in summary.items():
        print(f'{family:36} {count:7} {error:10.3g} {ulps:10.4g} {of_bound:9.3f}')


def needs(path):
    """Skips a test class where `path` is absent."""
    return unittest.skipUnless(path.exists(), f'no data in {path} (LAYERD_TEST_DATA)')


def typed(array):
    """As people type a tensor for layerctl."""
    def spelt(value):
        if isinstance(value, list):
            return '[' + ','.join(map(spelt, value)) + ']'
        return '"NaN"' if value != value else repr(value)
    return spelt(np.asarray(array, np.float64).tolist())


def norm_request(kind, x, dtype=FLOAT32, gamma=None, beta=None, output_dtype=None, rounding=0, **spec):
    spec = layer_pb.NormalizeSpec(kind=f'NORM_KIND_{kind.upper()}', rounding=rounding, **spec)
    request = layer_pb.NormalizeRequest(input=tensor(x, dtype), spec=spec, output_dtype=output_dtype)
    if gamma is not None:
        request.gamma.CopyFrom(tensor(gamma, dtype))
    if beta is not None:
        request.beta.CopyFrom(tensor(beta, dtype))
    return request


class GoldenTest(unittest.TestCase):
    daemon = stub = None

    def normalize(self, *args, **kwargs):
        return array_of(self.stub.Normalize(norm_request(*args, **kwargs), timeout=60).output)

    def ffn(self, x, weights, act, form='gated', layout='out_in', packing='separate', dtype=FLOAT32,
            weight_dtype=FLOAT32, output_dtype=None, swish_beta=None, **options):
        """The answer; `weights` are the arrays of FeedForwardWeights by name."""
        spec = layer_pb.FeedForwardSpec(
            form=f'FEED_FORWARD_FORM_{form.upper()}', activation=f'ACTIVATION_{act.upper()}', swish_beta=swish_beta,
            layout=f'WEIGHT_LAYOUT_{layout.upper()}')
        if form == 'gated':
            spec.packing = layer_pb.GateUpPacking.Value(f'GATE_UP_PACKING_{packing.upper()}')
        weights = {name: tensor(value, weight_dtype) for name, value in weights.items()}
        return self.stub.FeedForward(layer_pb.FeedForwardRequest(
            input=tensor(x, dtype), spec=spec, weights=layer_pb.FeedForwardWeights(**weights),
            output_dtype=output_dtype, **options), timeout=60)

    def activated(self, x, act, dtype=FLOAT32, **options):
        """act(x) as a plain layer with identity matrices."""
        eye = np.eye(x.shape[-1])
        return array_of(self.ffn(x, {'up': eye, 'down': eye}, act, form='plain', dtype=dtype, **options).output)

    def ctl(self, *args):
        """The tensors of layerctl's --json answer as arrays, by name, and the report."""
        result = layerctl(*args, '--json', server=self.daemon)
        self.assertEqual((result.status, result.stderr), (0, ''))
        answer = json.loads(result.stdout, parse_int=float)  # −0 is a number too
        for name in answer.keys() - {'report'}:
            flat = np.array(answer[name]['values'], dtype=object).astype(np.float32)
            answer[name] = flat.reshape([int(size) for size in answer[name]['shape']])
        return answer

    def ctl_file(self, *args):
        """The output that layerctl writes to a file."""
        file = harness.scratch_dir() / 'out.npy'
        result = layerctl(*args, '--out', file, server=self.daemon)
        self.assertEqual((result.status, result.stderr), (0, ''))
        return np.load(file)

    def judge(self, family, got, exact, bound, dtype=FLOAT32):
        """Every element within its bound; the greatest errors go to the table."""
        got, exact = np.asarray(got, np.longdouble), np.asarray(exact, np.longdouble)
        self.assertEqual(got.shape, exact.shape)
        self.assertGreater(got.size, 0)
        error = np.abs(got - exact)
        of_bound = error / bound
        row = summary.setdefault(family, [0, 0.0, 0.0, 0.0])
        row[0] += 1
        row[1:] = [max(a, float(b.max())) for a, b in zip(row[1:], (error, error / ulp(exact, dtype), of_bound))]
        worst = np.unravel_index(np.argmax(of_bound), got.shape)
        self.assertTrue((of_bound <= 1).all(), f'{family} at {worst}: got {got[worst]}, expected {exact[worst]}, '
                                               f'{of_bound[worst]} times the bound')

    def same_bits(self, a, b):
        self.assertEqual(a.shape, b.shape)
        self.assertEqual(a.astype(np.float32).tobytes(), b.astype(np.float32).tobytes())
