"""Published test vectors (ONNX's and other projects') and cases that public fault reports ask for, through the daemon
by grpcio and by layerctl.
"""
import collections
import json
import unittest

import numpy as np

import golden_math
import harness
from golden_math import Norm, activation, ulp
from golden_support import SHARED, GoldenTest, needs, norm_request, typed
from golden_support import setUpModule, tearDownModule  # noqa: F401
from harness import BFLOAT16, FLOAT16, FLOAT32, array_of, layer_pb, layerctl

CASES, NUMERICS = SHARED / 'data' / 'cases', SHARED / 'cases' / 'numerics.json'
DTYPES = {'F32': FLOAT32, 'F16': FLOAT16, 'BF16': BFLOAT16}
NAMES = {FLOAT32: 'float32', FLOAT16: 'float16', BFLOAT16: 'bfloat16'}


def read_json(path):
    return json.loads(path.read_text())


@needs(CASES)
class PublishedCasesTest(GoldenTest):
    """onnx_tanh, softmax and topk are not layers of the service (tanh alone is no activation of a public model)."""

    def onnx(self, file):
        cases = read_json(CASES / f'onnx_{file}.json')
        for case in cases:
            for part in ('inputs', 'outputs'):
                case[part] = [np.array(t['data'], t['dtype']).reshape(t['shape']) for t in case[part]]
        return cases

    def check_norm(self, family, kind, x, gamma, beta, epsilon, axes=1):
        """Through both clients, against the formula; the answer of the service."""
        given = {name: value for name, value in (('gamma', gamma), ('beta', beta)) if value is not None}
        exact = Norm(kind, np.asarray(x, np.float32), **{k: np.asarray(v, np.float32) for k, v in given.items()},
                     epsilon=epsilon, axes=axes)
        request = norm_request(kind, x, **given, epsilon=epsilon, normalized_axes=axes)
        request.intermediates = True
        answer = self.stub.Normalize(request, timeout=60)
        got = array_of(answer.output)
        self.judge(family, got, exact.output, exact.bound())
        self.judge(f'{family}: r', array_of(answer.intermediates.inverse_rms).ravel(), exact.r.ravel(),
                   0.501 * ulp(exact.r.ravel()) + 2.0**-50 * exact.r.ravel())
        options = [text for name, value in given.items() for text in (f'--{name}', typed(value))]
        self.same_bits(self.ctl('normalize', '--kind', kind, '--input', typed(x), '--eps', repr(epsilon),
                                '--axes', str(axes), *options)['output'], got)
        return answer

    def test_onnx_norms(self):
        for file, kind in (('layernormalization_2d', 'layer_norm'), ('rmsnormalization_2d', 'rms_norm')):
            cases = self.onnx(file)
            self.assertEqual(len(cases), 4)
            axes_seen = set()
            for case in cases:
                attrs = case['attrs']
                self.assertEqual(attrs.get('stash_type', 1), 1)  # statistics in float32 or better
                axis, (x, gamma, *beta) = attrs.get('axis', -1), case['inputs']
                axes_seen.add(axis)
                answer = self.check_norm(f'ONNX {file}', kind, x, gamma, beta[0] if beta else None,
                                         attrs.get('epsilon', 1e-5), -axis if axis < 0 else x.ndim - axis)
                published = [answer.output, answer.intermediates.mean, answer.intermediates.inverse_rms]
                self.assertEqual(len(case['outputs']), 3 if kind == 'layer_norm' else 1)
                for expected, message in zip(case['outputs'], published):
                    expected = expected.astype(np.float64)
                    got = array_of(message).reshape(expected.shape)
                    self.assertLessEqual(np.abs(got - expected).max(), case['max_abs_err_vs_f64'] + ulp(expected).max())
            self.assertEqual(axes_seen, {0, 1, -1, -2})

    def test_onnx_activations(self):
        count = 0
        for file, name in (('gelu', None), ('relu', 'relu'), ('sigmoid', 'sigmoid'), ('swish', 'silu')):
            for i, case in enumerate(self.onnx(file)):
                act = name or {'none': 'gelu', 'tanh': 'gelu_tanh'}[case['attrs'].get('approximate', 'none')]
                beta = case['attrs']['alpha'] if file == 'swish' else None
                (x,), (published,) = case['inputs'], case['outputs']
                got = self.activated(x, act, swish_beta=beta)
                exact = activation(act, x)
                self.judge(f'ONNX {file}', got, exact, 2 * ulp(exact))
                self.assertLessEqual(np.abs(got - published.astype(np.float64)).max(),
                                     case['max_abs_err_vs_f64'] + 2 * ulp(exact).max())
                if i == 0:
                    eye = typed(np.eye(x.shape[-1]))
                    self.same_bits(self.ctl('feedforward', '--form', 'plain', '--layout', 'out_in', '--activation', act,
                                            '--up', eye, '--down', eye, '--input', typed(x),
                                            *(['--swish-beta', repr(beta)] if beta else []))['output'], got)
                count += 1
        self.assertEqual(count, 8)

    def test_onnx_products(self):
        """A·B + C as a plain layer whose activation and last matrix are the identity."""
        cases = self.onnx('gemm') + [case for case in self.onnx('matmul') if case['name'] == 'matmul_2d']
        self.assertEqual(len(cases), 4)
        for case in cases:
            self.assertLessEqual(set(case['attrs']), {'transB'})
            transposed = case['attrs'].get('transB', 0) == 1
            (a, b, *c), (published,) = case['inputs'], case['outputs']
            weights = {'up': b, 'down': np.eye(published.shape[-1])}
            if c:
                weights['up_bias'] = c[0].ravel()
            layout = 'out_in' if transposed else 'in_out'
            got = array_of(self.ffn(a, weights, 'identity', form='plain', layout=layout).output)
            b = b if transposed else b.T
            exact = a.astype(np.float64) @ b.T.astype(np.float64) + (c[0].astype(np.float64) if c else 0)
            # N4, and the bias is one more rounding.
            self.judge('ONNX gemm, matmul_2d', got, exact, golden_math.product_bound(a, b) + ulp(exact))
            self.assertLessEqual(np.abs(got - published.astype(np.float64)).max(),
                                 case['max_abs_err_vs_f64'] + 4 * ulp(exact).max())

    def check_published(self, case, got):
        """Within the published tolerance, which exact arithmetic meets, and one rounding."""
        expected = np.asarray(case['expected'], np.float64)
        self.assertEqual(got.shape, expected.shape)
        self.assertLessEqual((np.abs(got - expected) - 0.501 * ulp(expected)).max(), case['published_tolerance_used'],
                             case['source'])

    def test_small_cases(self):
        cases = read_json(CASES / 'small_cases.json')
        counts = collections.Counter()
        for case in cases:
            op = case['op'].split()[0].rstrip(':')
            x = np.asarray(case['input'], np.float32)
            if op in ('layernorm', 'rmsnorm'):
                kind = {'layernorm': 'layer_norm', 'rmsnorm': 'rms_norm'}[op]
                got = array_of(self.check_norm(f'small_cases {op}', kind, case['input'], case['gamma'],
                                               case.get('beta'), float(case['eps'])).output)
            elif op in ('silu', 'gelu_erf', 'gelu_tanh'):
                act = {'gelu_erf': 'gelu'}.get(op, op)
                got, exact = self.activated(x, act), activation(act, x)
                self.judge('small_cases activations', got, exact, 2 * ulp(exact))
            elif op == 'gelu_tanh(x+bias)':
                weights = {'up': np.eye(x.shape[-1]), 'up_bias': case['bias'], 'down': np.eye(x.shape[-1])}
                got = array_of(self.ffn(x, weights, 'gelu_tanh', form='plain').output)
            elif op == 'swiglu':
                width = len(case['W'])
                bias = np.full(width, case['bias'])
                got = array_of(self.ffn(x, {'gate': case['W'], 'up': case['V'], 'gate_bias': bias, 'up_bias': bias,
                                            'down': np.eye(width)}, 'silu').output)
            else:
                self.assertEqual(op, 'glu')
                got = self.glu(x)
            self.check_published(case, got)
            counts[op] += 1
        self.assertEqual(counts, {'layernorm': 18, 'rmsnorm': 6, 'silu': 2, 'gelu_erf': 2, 'gelu_tanh': 2,
                                  'gelu_tanh(x+bias)': 1, 'swiglu': 2, 'glu': 2})

    def glu(self, x):
        """first half · σ(second half), with one and the same answer by each packing."""
        half = x.shape[-1] // 2
        up, gate = np.split(np.eye(2 * half), 2)
        packed = {'separate': {'gate': gate, 'up': up}, 'halves': {'gate_up': np.concatenate([gate, up])},
                  'interleaved': {'gate_up': np.stack([gate, up], axis=1).reshape(2 * half, -1)}}
        answers = [array_of(self.ffn(x, {**weights, 'down': np.eye(half)}, 'sigmoid', packing=packing).output)
                   for packing, weights in packed.items()]
        self.same_bits(answers[1], answers[0])
        self.same_bits(answers[2], answers[0])
        return answers[0]


@needs(NUMERICS)
class FaultReportsTest(GoldenTest):

    @classmethod
    def setUpClass(cls):
        cls.cases = read_json(NUMERICS)

    def of(self, op, count):
        cases = [case for case in self.cases if case['op'] == op]
        self.assertEqual(len(cases), count)
        return cases

    def test_covers_the_file(self):
        # Routing is no layer of the service.
        self.assertEqual(len(self.of('normalize', 12) + self.of('activation', 4) + self.of('convert', 2) +
                             self.of('route', 2)), len(self.cases))

    def test_normalize(self):
        for case in self.of('normalize', 12):
            with self.subTest(case['id']):
                if isinstance(case['epsilon'], list):
                    self.check_refused(case)
                else:
                    self.check_norm(case)

    def check_norm(self, case):
        kind, x, dtype, epsilon = case['kind'], case['input'], DTYPES[case['dtype']], case['epsilon']
        spec, options = {'epsilon': epsilon}, ['--eps', repr(epsilon), '--dtype', NAMES[dtype]]
        gamma, offset = case.get('gamma'), float(case.get('gamma_offset', 0))
        if gamma is not None:
            spec.update(gamma=gamma, rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA, gamma_offset=offset)
            options += ['--gamma', typed(gamma), '--rounding', 'after_gamma', '--gamma-offset', repr(offset)]
        got = self.normalize(kind, x, dtype, **spec)
        exact = Norm(kind, harness.round_to(dtype, x), gamma, epsilon=epsilon, gamma_offset=offset)
        self.judge(f'numerics.json {kind}', got, exact.output, exact.bound(dtype), dtype)
        if case.get('exact'):
            self.assertEqual(got.tolist(), case['expected'])
        else:
            expected = np.asarray(case['expected'])
            self.assertTrue((np.abs(got - expected) <= case['rtol'] * np.abs(expected)).all(), (got, expected))
        self.same_bits(self.ctl('normalize', '--kind', kind, '--input', typed(x), *options)['output'], got)
        if 'repeat 200 times' in case['fault']:
            calls = [self.stub.Normalize.future(norm_request(kind, x, dtype, **spec), timeout=60) for _ in range(200)]
            for call in calls:
                self.same_bits(array_of(call.result().output), got)

    def check_refused(self, case):
        for epsilon in case['epsilon']:
            request = norm_request(case['kind'], case['input'], epsilon=float(epsilon))
            error = harness.error_of(self.stub.Normalize, request)
            self.assertEqual((error.code.name, [field[0] for field in error.fields]),
                             ('INVALID_ARGUMENT', ['spec.epsilon']))
            result = layerctl('normalize', '--kind', case['kind'], '--input', typed(case['input']),
                              f'--eps={float(epsilon)!r}', server=self.daemon)
            self.assertEqual(result.status, 4, result.stderr)
            self.assertIn('spec.epsilon', result.stderr)

    def test_activations(self):
        for case in self.of('activation', 4):
            dtype, act = DTYPES[case['dtype']], case['kind']
            x, expected = (np.array([float(value) for value in case[part]])[:, None] for part in ('input', 'expected'))
            got = self.activated(x, act, dtype)  # one value a row: NaN stays at home
            nan = np.isnan(expected)
            self.assertEqual(np.isnan(got).tolist(), nan.tolist())
            error = np.abs(got - expected)[~nan]
            self.assertTrue((error <= case['rtol'] * np.abs(expected[~nan])).all(), (case['id'], got, expected))
            exact = activation(act, x)[~nan]
            self.judge('numerics.json activations', got[~nan], exact, 2 * ulp(exact, dtype), dtype)
            answer = self.ctl('feedforward', '--form', 'plain', '--layout', 'out_in', '--activation', act,
                              '--dtype', NAMES[dtype], '--up', '[[1]]', '--down', '[[1]]', '--input', typed(x))
            self.assertTrue(np.array_equal(answer['output'], got, equal_nan=True))

    def test_narrowing(self):
        for case in self.of('convert', 2):
            dtype = {'f32_to_bf16': BFLOAT16, 'f32_to_f16': FLOAT16}[case['kind']]
            x = np.array([float(value) for value in case['input']])[:, None]
            out = self.ffn(x, {'up': [[1]], 'down': [[1]]}, 'identity', form='plain', output_dtype=dtype).output
            self.assertEqual(out.dtype, dtype)
            bits = np.frombuffer(out.data, '<u2')
            self.assertEqual(len(bits), len(case['expected_bits']))
            for got, value, expected in zip(bits, array_of(out).ravel(), case['expected_bits']):
                self.assertEqual('NaN' if np.isnan(value) else f'{got:04X}', expected)


if __name__ == '__main__':
    unittest.main()
