"""Every command of layerctl against the real daemon, its numbers against NumPy in float64, and its exit statuses."""
import concurrent.futures
import contextlib
import itertools
import json
import math
import re
import struct
import time
import unittest

import grpc
import numpy as np

from harness import (BFLOAT16, FLOAT16, FLOAT32, Daemon, layer_grpc, layerctl, open_channel, round_to, scratch_dir)

DTYPES = {'float32': FLOAT32, 'float16': FLOAT16, 'bfloat16': BFLOAT16}
ULP = {'float32': 2.0**-23, 'float16': 2.0**-10, 'bfloat16': 2.0**-7}
COMMANDS = ('normalize', 'feedforward', 'check', 'layers', 'demo', 'selftest', 'health', 'plan')


def typed(array):
    """An array as people type it."""
    return json.dumps(np.asarray(array).tolist())


def values_of(tensor):
    return np.array(tensor['values'], np.float64).reshape(tensor['shape'])


def write_safetensors(path, tensors):
    """`tensors`: name to (dtype as the format names it, shape, bytes)."""
    header, data = {}, b''
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {'dtype': dtype, 'shape': list(shape), 'data_offsets': [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def read_safetensors(path):
    content = path.read_bytes()
    size = struct.unpack('<Q', content[:8])[0]
    header = json.loads(content[8:8 + size])
    header.pop('__metadata__', None)
    return {name: (entry['dtype'], entry['shape'], content[8 + size:][slice(*entry['data_offsets'])])
            for name, entry in header.items()}


def f32(array):
    array = np.asarray(array, '<f4')
    return 'F32', array.shape, array.tobytes()


def bf16(array):
    array = np.asarray(array, np.float32)
    return 'BF16', array.shape, (round_to(BFLOAT16, array).view(np.uint32) >> 16).astype('<u2').tobytes()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    'identity': lambda x: x, 'sigmoid': sigmoid, 'relu': lambda x: np.maximum(x, 0),
    'relu_squared': lambda x: np.maximum(x, 0)**2,
    'gelu': lambda x: x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2)),
    'gelu_tanh': lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    'quick_gelu': lambda x: x * sigmoid(1.702 * x), 'silu': lambda x: x * sigmoid(x)}


def normalize(x, kind, dtype='float32', eps=None, gamma=None, beta=None, residual=None, gate=None, position='none',
              rounding=None, offset=0.0, group=0, axes=1):
    """Normalize in float64, not yet rounded to the output's dtype."""
    x = np.asarray(x, np.float64)
    if residual is not None:
        x = round_to(DTYPES[dtype], x + np.asarray(residual)).astype(np.float64)
    silu_gate = None if gate is None else ACTIVATIONS['silu'](np.asarray(gate, np.float64))
    if position == 'first':
        x = x * silu_gate
    width = int(np.prod(x.shape[-axes:]))
    grouped = x.reshape(-1, width // (group or width), group or width)
    if kind == 'layer_norm':
        grouped = grouped - grouped.mean(axis=-1, keepdims=True)
    mean_square = (grouped**2).mean(axis=-1, keepdims=True) + (
        eps if eps is not None else {'rms_norm': 1e-6, 'layer_norm': 1e-5}[kind])
    with np.errstate(divide='ignore'):
        inverse = np.where(mean_square == 0, 0, 1 / np.sqrt(mean_square))
    n = (grouped * inverse).reshape(-1, width)
    early = rounding == 'before_gamma' and dtype != 'float32'
    if early:
        n = round_to(DTYPES[dtype], n).astype(np.float64)
    if gamma is not None:
        n = n * (np.asarray(gamma, np.float64).reshape(width) + offset)
    if beta is not None:
        n = n + np.asarray(beta, np.float64).reshape(width)
    n = n.reshape(x.shape)
    if position == 'last':
        n = (round_to(DTYPES[dtype], n) if early else n) * silu_gate
    return n


def feed_forward(x, weights, form, activation, packing='separate', layout='out_in', beta=1.0, gate_max=None,
                 up_limit=None, up_offset=0.0, inner=False, inner_eps=1e-6):
    """FeedForward in float64, not yet rounded; `weights` as the options of layerctl name them."""
    def product(a, name):
        matrix = np.asarray(weights[name], np.float64)
        return a @ (matrix.T if layout == 'out_in' else matrix) + np.asarray(weights.get(name + '-bias', 0.0))
    x = np.asarray(x, np.float64)
    act = (lambda v: v * sigmoid(beta * v)) if activation == 'silu' else ACTIVATIONS[activation]
    if form == 'plain':
        hidden = act(product(x, 'up'))
    else:
        if packing == 'separate':
            gate, up = product(x, 'gate'), product(x, 'up')
        else:
            both = product(x, 'gate-up')
            half = both.shape[-1] // 2
            halves = packing == 'halves'
            gate, up = (both[..., :half], both[..., half:]) if halves else (both[..., 0::2], both[..., 1::2])
        if gate_max is not None:
            gate = np.minimum(gate, gate_max)
        if up_limit is not None:
            up = np.clip(up, -up_limit, up_limit)
        hidden = act(gate) * (up + up_offset)
    if inner:
        hidden = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + inner_eps)
        hidden = hidden * np.asarray(weights.get('inner-norm-gamma', 1.0))
    return product(hidden, 'down')


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__()

    def run_ok(self, *args, **kwargs):
        result = layerctl(*args, server=self.daemon, **kwargs)
        self.assertEqual((result.status, result.stderr), (0, ''), result)
        return result.stdout

    def ask(self, *args):
        """The JSON answer."""
        return json.loads(self.run_ok('--json', *args))

    def failed(self, status, *args, texts=(), server=None, **kwargs):
        """Asserts the exit status and one line on standard error, nothing on standard output."""
        result = layerctl(*args, server=server or self.daemon, **kwargs)
        self.assertEqual(result.status, status, result)
        self.assertEqual(result.stdout, '')
        self.assertRegex(result.stderr, r'^layerctl: .*\n$')
        self.assertEqual(result.stderr.count('\n'), 1, result.stderr)
        for text in texts:
            self.assertIn(text, result.stderr)
        return result.stderr


class Help(unittest.TestCase):
    def test_every_command_explains_itself_with_examples(self):
        for command in ((), *((name,) for name in COMMANDS), ('check', 'normalize'), ('check', 'feedforward')):
            with self.subTest(command=command):
                result = layerctl(*command, '--help')
                self.assertEqual((result.status, result.stderr), (0, ''), result)
                self.assertIn('Usage: layerctl', result.stdout)
                examples = re.findall(r'^  layerctl .*$', result.stdout, re.MULTILINE)
                self.assertTrue(any(' '.join(command) in example for example in examples), 'no example of its own')

    def test_it_tells_commands_and_exit_statuses(self):
        text = layerctl('--help').stdout
        for command in COMMANDS:
            self.assertRegex(text, rf'\n  {command} +\w')
        for status in ('0 good', '1 outside the contract', '2 usage or file', '3 no connection', '4 refused'):
            self.assertIn(status, text)

    def test_version(self):
        self.assertRegex(layerctl('--version').stdout, r'^layerctl \d+\.\d+\.\d+\n$')


class Examples(WithDaemon):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(f'--layer_store={scratch_dir()}')

    def test_the_examples_of_the_help_run(self):
        for layer, options in (('model.norm', ('--kind', 'rms_norm', '--rounding', 'before_gamma')),
                               ('model.layers.0.mlp', ('--hidden', '12'))):
            self.run_ok('layers', 'upload', f'models/stories260k/layers/{layer}', '--seed', '1', '--dim', '8', *options)
        folder = scratch_dir()
        examples = set()
        for command in ((), ('normalize',), ('feedforward',), ('plan',), ('check',), ('demo',), ('health',), ('selftest',)):
            for line in re.findall(r'^  layerctl (.*)$', layerctl(*command, '--help').stdout, re.MULTILINE):
                examples.add(line)
        rng = np.random.default_rng(1)
        np.save(folder / 'x.npy', rng.standard_normal((2, 8), np.float32))
        write_safetensors(folder / 'model.safetensors', {
            'model.norm.weight': f32(np.ones(8)),
            'model.layers.0.mlp.gate_proj.weight': f32(rng.standard_normal((12, 8))),
            'model.layers.0.mlp.up_proj.weight': f32(rng.standard_normal((12, 8))),
            'model.layers.0.mlp.down_proj.weight': f32(rng.standard_normal((8, 12)))})
        write_safetensors(folder / 'weights.safetensors', {'model.norm.weight': f32(np.ones(8))})
        (folder / 'config.json').write_text('{"rms_norm_eps": 1e-5, "hidden_act": "silu"}')
        self.assertGreater(len(examples), 6)
        for line in sorted(examples):
            with self.subTest(line=line):
                args = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
                for index, word in enumerate(args):
                    if re.match(r'[\w.]+\.(npy|safetensors)', word):
                        args[index] = str(folder / word)
                self.run_ok(*args)


class Normalize(WithDaemon):
    def check(self, x, kind, dtype='float32', output_dtype=None, **options):
        args = ['normalize', '--kind', kind, '--input', typed(x), '--dtype', dtype]
        names = {'eps': '--eps', 'position': '--gate-position', 'rounding': '--rounding', 'offset': '--gamma-offset',
                 'group': '--group-size', 'axes': '--axes'}
        for name, value in options.items():
            args += [names.get(name, f'--{name}'), typed(value) if isinstance(value, np.ndarray) else str(value)]
        if output_dtype:
            args += ['--output-dtype', output_dtype]
        answer = self.ask(*args)
        to = output_dtype or dtype
        exact = normalize(x, kind, dtype, **options)
        self.assertEqual((answer['output']['dtype'], answer['output']['shape']), (to, list(np.shape(x))))
        rounded = round_to(DTYPES[to], exact).astype(np.float64)
        # Float64 here sums in another order than there: rarely the next value is meant.
        np.testing.assert_allclose(values_of(answer['output']), rounded, rtol=ULP[to], atol=1e-40)
        return answer

    def setUp(self):
        rng = np.random.default_rng(5)
        self.x = rng.integers(-32, 33, (3, 12)) / 8  # exact in all dtypes
        self.y = rng.integers(-32, 33, (3, 12)) / 8
        self.gamma = rng.integers(1, 17, 12) / 8
        self.beta = rng.integers(-16, 17, 12) / 8

    def test_kinds_dtypes_and_output_dtypes(self):
        for kind, dtype, to in itertools.product(('rms_norm', 'layer_norm'), DTYPES, (None, *DTYPES)):
            with self.subTest(kind=kind, dtype=dtype, to=to):
                self.check(self.x, kind, dtype, to)
                self.check(self.x, kind, dtype, to, gamma=self.gamma, beta=self.beta, rounding='after_gamma')

    def test_rounding(self):
        for dtype in DTYPES:
            answers = [self.check(self.x, 'rms_norm', dtype, gamma=self.gamma, rounding=rounding)['output']['values']
                       for rounding in ('before_gamma', 'after_gamma')]
            self.assertEqual(answers[0] == answers[1], dtype == 'float32')

    def test_epsilon(self):
        for kind in ('rms_norm', 'layer_norm'):
            for eps in (0, 1e-5, 0.5):
                self.check(self.x, kind, eps=eps)
            self.check(self.x / 1024, kind)
            self.check(np.zeros((2, 4)), kind, eps=0)

    def test_gamma_offset(self):
        for dtype in DTYPES:
            self.check(self.x, 'rms_norm', dtype, gamma=self.gamma, offset=1, rounding='after_gamma')
        self.check(self.x, 'layer_norm', gamma=self.gamma, beta=self.beta, offset=-0.25)

    def test_groups(self):
        for kind, group in itertools.product(('rms_norm', 'layer_norm'), (1, 3, 4, 12)):
            self.check(self.x, kind, group=group, gamma=self.gamma)

    def test_gates(self):
        for position, dtype, rounding in itertools.product(('first', 'last'), DTYPES, ('before_gamma', 'after_gamma')):
            with self.subTest(position=position, dtype=dtype, rounding=rounding):
                self.check(self.x, 'rms_norm', dtype, gamma=self.gamma, gate=self.y, position=position,
                           rounding=rounding)
        self.check(self.x, 'rms_norm', position='none')

    def test_residual(self):
        for dtype in DTYPES:
            answer = self.check(self.x, 'rms_norm', dtype, residual=self.y / 4)
            total = round_to(DTYPES[dtype], self.x + self.y / 4)
            np.testing.assert_array_equal(values_of(answer['residual_sum']), total)

    def test_axes(self):
        x = self.x.reshape(3, 4, 3)
        for axes, size in ((1, 3), (2, 12), (3, 36)):
            gamma = np.resize(self.gamma, size)
            self.check(x, 'layer_norm', axes=axes, gamma=gamma)
        self.check(x, 'rms_norm', axes=2, gamma=self.gamma.reshape(4, 3), group=6)

    def test_intermediates(self):
        answer = self.ask('normalize', '--kind', 'layer_norm', '--input', typed(self.x), '--intermediates',
                          '--group-size', '4')
        grouped = self.x.reshape(3, 3, 4)
        np.testing.assert_allclose(values_of(answer['mean']), grouped.mean(-1), rtol=1e-7)
        np.testing.assert_allclose(values_of(answer['inverse_rms']), 1 / np.sqrt(grouped.var(-1) + 1e-5), rtol=1e-7)
        answer = self.ask('normalize', '--kind', 'rms_norm', '--input', typed(self.x), '--intermediates')
        self.assertEqual(answer['inverse_rms']['shape'], [3, 1])
        self.assertNotIn('mean', answer)

    def test_verify_reports(self):
        answer = self.ask('normalize', '--kind', 'rms_norm', '--input', typed(self.x), '--verify')
        self.assertIs(answer['report']['within_contract'], True)
        self.assertEqual([stage['stage'] for stage in answer['report']['stages']], ['norm'])
        self.assertLessEqual(answer['report']['max_ulp_error'], 0.501)
        self.assertLessEqual(answer['report']['stages'][0]['max_error_over_bound'], 1)
        self.assertIn('within the contract',
                      self.run_ok('normalize', '--kind', 'rms_norm', '--input', typed(self.x), '--verify'))

    def test_seeded_is_the_same_every_time_and_as_documented(self):
        def seeded(seed, name, shape, scale, offset=0.0):
            mask = 2**64 - 1
            key = 14695981039346656037
            for byte in name.encode():
                key = ((key ^ byte) * 1099511628211) & mask
            key ^= seed
            units = []
            for index in range(int(np.prod(shape))):
                z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
                z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
                z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
                z ^= z >> 31
                units.append(((z >> 40) - 2**23) / 2**23)
            return (offset + np.array(units) * scale).astype(np.float32).astype(np.float64).reshape(shape)
        answer = self.ask('normalize', '--kind', 'rms_norm', '--seed', '7', '--rows', '2', '--dim', '5')
        exact = normalize(seeded(7, 'input', (2, 5), math.sqrt(3)), 'rms_norm', gamma=seeded(7, 'gamma', (5,), 0.1, 1))
        np.testing.assert_allclose(values_of(answer['output']), exact, rtol=2e-7)

    def test_seeded_gamma_fits_more_than_one_axis(self):
        self.ask('normalize', '--kind', 'rms_norm', '--seed', '7', '--rows', '2', '--dim', '5', '--axes', '2')


class FeedForward(WithDaemon):
    D, H, OUT, ROWS = 5, 4, 3, 2

    def setUp(self):
        rng = np.random.default_rng(6)

        def numbers(*shape):
            return rng.integers(-16, 17, shape) / 8
        self.x = numbers(self.ROWS, self.D)
        self.weights = {'gate': numbers(self.H, self.D), 'up': numbers(self.H, self.D),
                        'down': numbers(self.OUT, self.H), 'gate-up': numbers(2 * self.H, self.D)}
        self.biases = {'gate-bias': numbers(self.H), 'up-bias': numbers(self.H), 'down-bias': numbers(self.OUT),
                       'gate-up-bias': numbers(2 * self.H)}
        self.gamma = np.abs(numbers(self.H)) + 0.5

    def check(self, form='gated', activation='silu', packing='separate', layout='out_in', biases=False, dtype='float32',
              output_dtype=None, extra=None, extra_args=(), **options):
        names = ['up', 'down'] if form == 'plain' else (
            ['gate', 'up', 'down'] if packing == 'separate' else ['gate-up', 'down'])
        weights = {name: self.weights[name] if layout == 'out_in' else self.weights[name].T for name in names}
        if biases:
            weights.update({f'{name}-bias': self.biases[f'{name}-bias'] for name in names})
        weights.update(extra or {})
        args = ['feedforward', '--form', form, '--activation', activation, '--layout', layout, '--dtype', dtype,
                '--input', typed(self.x)]
        if form == 'gated':
            args += ['--packing', packing]
        if output_dtype:
            args += ['--output-dtype', output_dtype]
        for name, value in weights.items():
            args += [f'--{name}', typed(value)]
        answer = self.ask(*args, *extra_args)
        exact = feed_forward(self.x, weights, form, activation, packing, layout, **options)
        to = output_dtype or dtype
        self.assertEqual((answer['output']['dtype'], answer['output']['shape']), (to, [self.ROWS, self.OUT]))
        scale = np.abs(exact).max()
        np.testing.assert_allclose(values_of(answer['output']), exact, rtol=ULP[to] / 2 if to != 'float32' else 0,
                                   atol=scale * 2e-6, err_msg=' '.join(args))
        return answer

    def test_forms_activations_packings_layouts_and_biases(self):
        cases = [('plain', 'separate')] + [('gated', packing) for packing in ('separate', 'halves', 'interleaved')]
        for (form, packing), activation, layout, biases in itertools.product(cases, ACTIVATIONS, ('out_in', 'in_out'),
                                                                             (False, True)):
            with self.subTest(form=form, packing=packing, activation=activation, layout=layout, biases=biases):
                self.check(form, activation, packing, layout, biases)

    def test_dtypes_and_output_dtypes(self):
        for dtype, to in itertools.product(DTYPES, (None, *DTYPES)):
            with self.subTest(dtype=dtype, to=to):
                self.check(dtype=dtype, output_dtype=to, biases=True)
                self.check(dtype=dtype, output_dtype=to, form='plain', activation='gelu')

    def test_limits_and_offset(self):
        for packing in ('separate', 'halves', 'interleaved'):
            self.check(packing=packing, gate_max=0.5, extra_args=('--gate-max', '0.5'))
            self.check(packing=packing, up_limit=1, extra_args=('--up-limit', '1'))
            self.check(packing=packing, biases=True, gate_max=1, up_limit=1, up_offset=1, beta=1.702,
                       extra_args=('--gate-max', '1', '--up-limit', '1', '--up-offset', '1', '--swish-beta', '1.702'))

    def test_swish_beta(self):
        for form, beta in itertools.product(('gated', 'plain'), (0.5, 1.702, 0, -1)):
            self.check(form, beta=beta, extra_args=('--swish-beta', str(beta)))

    def test_inner_norm(self):
        for form, packing in (('gated', 'separate'), ('gated', 'halves'), ('plain', 'separate')):
            self.check(form, packing=packing, activation='relu_squared', inner=True, extra_args=('--inner-norm',))
            self.check(form, packing=packing, inner=True, inner_eps=0.25, extra={'inner-norm-gamma': self.gamma},
                       extra_args=('--inner-norm-eps', '0.25'))

    def test_intermediates(self):
        answer = self.check(biases=True, inner=True, extra_args=('--inner-norm', '--intermediates'))
        gate = self.x @ self.weights['gate'].T + self.biases['gate-bias']
        up = self.x @ self.weights['up'].T + self.biases['up-bias']
        hidden = ACTIVATIONS['silu'](gate) * up
        normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
        for name, expected in (('gate', gate), ('up', up), ('hidden', hidden), ('normed', normed)):
            np.testing.assert_allclose(values_of(answer[name]), expected, rtol=1e-6, atol=1e-7)

    def test_verify_reports_every_stage(self):
        answer = self.check(inner=True, extra_args=('--inner-norm', '--verify'))
        self.assertIs(answer['report']['within_contract'], True)
        self.assertEqual([stage['stage'] for stage in answer['report']['stages']],
                         ['gate', 'up', 'hidden', 'inner_norm', 'output'])
        answer = self.check('plain', extra_args=('--verify',))
        self.assertEqual([stage['stage'] for stage in answer['report']['stages']], ['up', 'hidden', 'output'])

    def test_seeded_layers_verify_in_every_variant(self):
        for args in ((), ('--biases',), ('--form', 'plain', '--activation', 'relu'),
                     ('--packing', 'halves', '--biases'), ('--packing', 'interleaved'),
                     ('--layout', 'in_out'), ('--dtype', 'bfloat16'), ('--inner-norm',),
                     ('--dtype', 'float16', '--output-dtype', 'float32')):
            answer = self.ask('feedforward', '--seed', '4', '--dim', '20', '--hidden', '30', '--rows', '3', '--verify',
                              *args)
            self.assertTrue(answer['report']['within_contract'], args)
            self.assertEqual(answer['output']['shape'], [3, 20])

    def test_options_that_contradict_each_other_are_not_ignored(self):
        seeded = ('feedforward', '--seed', '1', '--dim', '4', '--hidden', '3')
        for args in (('--form', 'plain', '--packing', 'halves'), ('--activation', 'relu', '--swish-beta', '2'),
                     ('--form', 'plain', '--gate-max', '1'), ('--form', 'plain', '--up-offset', '1')):
            with self.subTest(args=args):
                self.assertIn(layerctl(*seeded, *args, server=self.daemon).status, (2, 4))


class TensorsInAndOut(WithDaemon):
    BITS = ('6e-07', '1e20', '1e-45', '-0.0', '3.4028235e38', '0.1', '16777217', '1.17549435e-38', '-1e-38', '33554432')

    def echo(self, *numbers, dtype='float32'):
        """residual_sum of the numbers and −0: each as it came in, in the answer's text."""
        zeros = '[' + ', '.join(['-0.0'] * len(numbers)) + ']'
        text = self.run_ok('--json', 'normalize', '--kind', 'rms_norm', '--input', '[' + ', '.join(numbers) + ']',
                           '--residual', zeros, '--dtype', dtype)
        return re.search(r'"residual_sum": .*"values": \[(.*?)\]', text).group(1).split(', ')

    def test_float32_comes_back_to_the_bit_in_the_shortest_text(self):
        texts = self.echo(*self.BITS)
        for sent, got in zip(self.BITS, texts):
            self.assertEqual(np.float32(sent).tobytes(), np.float32(got).tobytes(), (sent, got))
        rng = np.random.default_rng(3)
        numbers = rng.integers(0, 2**32, 400, dtype=np.uint32).view(np.float32)
        numbers = numbers[np.isfinite(numbers)]
        folder = scratch_dir()
        np.save(folder / 'x.npy', numbers)
        np.save(folder / 'zero.npy', np.full_like(numbers, -0.0))
        answer = self.ask('normalize', '--kind', 'rms_norm', '--input', folder / 'x.npy', '--residual',
                          folder / 'zero.npy')
        back = np.array(answer['residual_sum']['values'], np.float64).astype(np.float32)
        self.assertEqual(back.tobytes(), numbers.tobytes())
        text = self.run_ok('--json', 'normalize', '--kind', 'rms_norm', '--input', folder / 'x.npy', '--residual',
                           folder / 'zero.npy')
        for number, got in zip(numbers, re.search(r'"residual_sum": .*"values": \[(.*?)\]', text).group(1).split(', ')):
            self.assertLessEqual(len(got), len(np.format_float_scientific(number, unique=True, trim='-')), got)

    def test_minus_zero_keeps_its_sign_through_any_json_reader(self):
        # json.loads('-0') is the integer 0, without a sign; so it is in nlohmann's reader, which layerctl uses.
        value = json.loads(f'[{self.echo("-0.0", "1")[0]}]')[0]
        self.assertEqual(np.float32(value).tobytes(), np.float32(-0.0).tobytes())

    def test_minus_zero_may_be_typed_without_a_point(self):
        self.assertEqual(np.float32(self.echo('-0', '1')[0]).tobytes(), np.float32(-0.0).tobytes())

    def test_what_is_not_finite_is_a_string_both_ways(self):
        for kind in ('float32', 'float16', 'bfloat16'):
            self.assertEqual(self.echo('"NaN"', '"Infinity"', '"-Infinity"', '1.5', dtype=kind),
                             ['"NaN"', '"Infinity"', '"-Infinity"', '1.5'])

    def test_typed_lists_nest(self):
        for text, shape in (('[1, 2]', [2]), ('[[1, 2], [3, 4], [5, 6]]', [3, 2]), ('[[[1], [2]]]', [1, 2, 1]),
                            (' [1e0,\n2]', [2]), ('[[[[[[[[1, 2]]]]]]]]', [1] * 7 + [2])):
            answer = self.ask('normalize', '--kind', 'rms_norm', '--input', text)
            self.assertEqual(answer['output']['shape'], shape)
            self.assertEqual(np.shape(answer['output']['values']), tuple(shape))

    def test_bad_lists_are_usage_errors_in_one_line(self):
        for text in ('[1, 2', '[1, [2]]', '[[1, 2], [3]]', '[1, "x"]', '[null]', '[true]', '[{}]', '[nan]', '[1,]', '1',
                     '{}', '', 'x', '[[[[[[[[[1]]]]]]]]]', '[' * 50000 + ']' * 50000, '[1] [2]',
                     '["' + 'y' * 5000 + '"]'):
            with self.subTest(text=text[:20]):
                line = self.failed(2, 'normalize', '--kind', 'rms_norm', '--input', text)
                self.assertLess(len(line), 600)

    def test_npy_in_and_out(self):
        folder = scratch_dir()
        x = np.random.default_rng(2).standard_normal((3, 4, 6))
        for dtype in ('<f4', '<f2'):
            for array in (x, np.asfortranarray(x)):
                np.save(folder / 'x.npy', array.astype(dtype))
                self.run_ok('normalize', '--kind', 'layer_norm', '--input', folder / 'x.npy', '--out',
                            folder / 'y.npy')
                y = np.load(folder / 'y.npy')
                self.assertEqual((y.dtype, y.shape), (np.dtype(dtype), x.shape))
                np.testing.assert_allclose(y.astype(np.float64), normalize(array.astype(dtype), 'layer_norm'),
                                           rtol=2e-3 if dtype == '<f2' else 1e-6, atol=1e-3 if dtype == '<f2' else 1e-6)
        for refused in (x, x.astype('>f4'), x.astype(np.int32), np.array(['a'])):
            np.save(folder / 'bad.npy', refused)
            self.failed(2, 'normalize', '--kind', 'rms_norm', '--input', folder / 'bad.npy', texts=['--input'])
        self.failed(2, 'normalize', '--kind', 'rms_norm', '--input', '[1,2]', '--dtype', 'bfloat16', '--out',
                    folder / 'b.npy', texts=['safetensors'])

    def test_safetensors_in_and_out(self):
        folder = scratch_dir()
        x = np.random.default_rng(2).standard_normal((3, 6)).astype(np.float32)
        gamma = round_to(BFLOAT16, np.linspace(0.5, 1.5, 6))
        write_safetensors(folder / 'in.safetensors', {'a.x': f32(x), 'gamma': bf16(gamma)})
        for to, name in (('', 'output'), (':layers.0/y', 'layers.0/y')):
            self.run_ok('normalize', '--kind', 'rms_norm', '--input', f'{folder}/in.safetensors:a.x', '--gamma',
                        f'{folder}/in.safetensors:gamma', '--out', f'{folder}/out.safetensors{to}')
            tensors = read_safetensors(folder / 'out.safetensors')
            self.assertEqual(list(tensors), [name])
            dtype, shape, data = tensors[name]
            self.assertEqual((dtype, shape), ('F32', [3, 6]))
            np.testing.assert_allclose(np.frombuffer(data, '<f4').reshape(3, 6), normalize(x, 'rms_norm', gamma=gamma),
                                       rtol=2e-7)
        self.run_ok('normalize', '--kind', 'rms_norm', '--input', '[1,2]', '--dtype', 'bfloat16', '--out',
                    folder / 'b.safetensors')
        self.assertEqual(read_safetensors(folder / 'b.safetensors')['output'][:2], ('BF16', [2]))
        for name, text in (('in.safetensors:nothing', 'nothing'), ('in.safetensors', 'NAME'),
                           ('no.safetensors:x', 'no.')):
            self.failed(2, 'normalize', '--kind', 'rms_norm', '--input', f'{folder}/{name}', texts=['--input', text])

    def test_layers_of_a_checkpoint(self):
        folder = scratch_dir()
        rng = np.random.default_rng(9)
        x = rng.standard_normal((2, 6)).astype(np.float32)
        gate, up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (8, 6), (6, 8)))
        gamma = rng.standard_normal(6).astype(np.float32)
        np.save(folder / 'x.npy', x)
        write_safetensors(folder / 'm.safetensors', {
            'model.norm.weight': f32(gamma), 'model.layers.0.mlp.gate_proj.weight': f32(gate),
            'model.layers.0.mlp.up_proj.weight': f32(up), 'model.layers.0.mlp.down_proj.weight': f32(down)})
        (folder / 'config.json').write_text('{"rms_norm_eps": 0.01, "hidden_act": "silu"}')
        answer = self.ask('normalize', '--weights', folder / 'm.safetensors', '--prefix', 'model.norm', '--input',
                          folder / 'x.npy')
        np.testing.assert_allclose(values_of(answer['output']), normalize(x, 'rms_norm', eps=0.01, gamma=gamma),
                                   rtol=3e-7)
        answer = self.ask('feedforward', '--weights', folder / 'm.safetensors', '--prefix', 'model.layers.0.mlp',
                          '--input', folder / 'x.npy', '--verify')
        exact = feed_forward(x, {'gate': gate, 'up': up, 'down': down}, 'gated', 'silu')
        np.testing.assert_allclose(values_of(answer['output']), exact, atol=2e-6 * np.abs(exact).max())
        self.failed(2, 'feedforward', '--weights', folder / 'm.safetensors', '--prefix', 'model.layers.9.mlp',
                    '--input', folder / 'x.npy', texts=['model.layers.9.mlp'])
        self.failed(2, 'feedforward', '--weights', folder / 'm.safetensors', '--input', folder / 'x.npy',
                    texts=['--prefix'])

    def test_the_table_for_people(self):
        text = self.run_ok('normalize', '--kind', 'rms_norm', '--input', '[[0.5,-1.5,2,1]]', '--eps', '0')
        self.assertEqual(text.splitlines()[0], 'output  float32 [1, 4]')
        self.assertEqual(text.split()[-4:], ['0.365148', '-1.09545', '1.46059', '0.730297'])
        text = self.run_ok('normalize', '--kind', 'rms_norm', '--seed', '1', '--rows', '20', '--dim', '10')
        self.assertIn('2 more', text)
        self.assertIn('4 more rows', text)

    def test_one_row_of_nothing_and_no_rows(self):
        answer = self.ask('normalize', '--kind', 'rms_norm', '--seed', '1', '--rows', '0', '--dim', '10')
        self.assertEqual(answer['output'], {'dtype': 'float32', 'shape': [0, 10], 'values': []})
        self.failed(4, 'normalize', '--kind', 'rms_norm', '--input', '[]', texts=['INVALID_ARGUMENT', 'input.shape'])


class OtherCommands(WithDaemon):
    def test_demo_has_the_known_numbers(self):
        text = self.run_ok('demo')
        words = ' '.join(text.split())
        self.assertIn('LayerNorm x 0.000 -1.569 1.177 0.392', words)
        self.assertIn('RMSNorm x 0.365 -1.095 1.461 0.730', words)
        self.assertIn('x + 2 0.891* 0.178* 1.425* 1.069*', words)
        self.assertRegex(text, r'ReLU +2048 +2097152 +\[4, 512\]')
        self.assertRegex(text, r'SwiGLU +1365 +2096640 +\[4, 512\]')
        self.assertEqual(text.split('\nSeen:\n')[1].splitlines(), [
            '  LayerNorm: x * 2 unchanged; x + 2 unchanged',
            '  RMSNorm: x * 2 unchanged; x + 2 4 of 4 values changed',
            '  A closed gate silences its channel whatever the value is, an open one passes it: yes'])
        self.assertTrue(text.isascii(), 'ASCII minus and all')
        self.assertNotIn('-0.000', text)
        self.assertEqual(self.run_ok('demo'), text)

    def test_plan(self):
        def plan(*args):
            result = layerctl('--json', 'plan', *args)
            self.assertEqual(result.status, 0, result)
            return json.loads(result.stdout)
        self.assertEqual(plan('--dim', '4096', '--multiple-of', '256')['hidden_dim'], 11008)
        self.assertEqual(plan('--dim', '4096')['parameters'], 3 * 4096 * 11008)
        plain = plan('--dim', '512', '--hidden', '2048', '--plain')
        self.assertEqual((plain['parameters'], plain['form']), (2097152, 'plain'))
        self.assertEqual(plan('--dim', '512', '--plain')['hidden_dim'], 2048)
        gated = plan('--dim', '512', '--hidden', '1365')
        self.assertEqual((gated['parameters'], gated['form']), (2096640, 'gated'))
        self.assertEqual(gated['flops_per_row'], 2 * 2096640)
        self.assertEqual(gated['weight_bytes'], 4 * 2096640)
        self.assertEqual(plan('--dim', '512', '--hidden', '1365', '--16bit')['weight_bytes'], 2 * 2096640)
        int8 = plan('--dim', '512', '--hidden', '1365', '--int8')
        self.assertEqual((int8['parameters'], int8['weight_bytes'], int8['activation_bytes_per_row']),
                         (2096640, 2096640 + 2 * (2 * 1365 * 16 + 512 * 43), 2 * 512 * 4))
        self.assertEqual(plan('--dim', '512', '--hidden', '1365', '--biases')['parameters'], 2096640 + 2 * 1365 + 512)
        text = layerctl('plan', '--dim', '4096').stdout
        self.assertRegex(text, r'hidden_dim +11008\n')
        for args in (('--dim', '0'), ('--dim', '-5'), ('--dim', '9223372036854775807'), (), ('--dim', 'x'),
                     ('--dim', '8', '--hidden', '0'), ('--dim', '8', '--multiple-of', '0')):
            self.failed(2, 'plan', *args)

    def test_selftest(self):
        lines = self.run_ok('selftest').splitlines()
        self.assertTrue(all(line.startswith('ok ') for line in lines[:-1]), lines)
        self.assertEqual(lines[-1], f'{len(lines) - 1} of {len(lines) - 1} right')

    def test_check_of_seeded_layers(self):
        for args in ((), ('--seed', '9', '--dim', '33', '--hidden', '17', '--rows', '2'), ('--rows', '0')):
            text = self.run_ok('check', *args)
            self.assertEqual(text.count('within the contract'), 12)
            self.assertNotIn('OUTSIDE', text)
        reports = json.loads(self.run_ok('--json', 'check', '--dim', '8', '--hidden', '3'))
        self.assertEqual(len(reports), 12)
        self.assertTrue(all(entry['report']['within_contract'] for entry in reports))

    def test_check_of_one_layer(self):
        for args in (('normalize', '--kind', 'layer_norm', '--input', '[[1,2,3],[4,5,7]]'),
                     ('normalize', '--kind', 'rms_norm', '--seed', '1', '--dim', '12', '--dtype', 'bfloat16',
                      '--rounding', 'before_gamma'),
                     ('feedforward', '--seed', '1', '--dim', '12', '--hidden', '20', '--inner-norm')):
            text = self.run_ok('check', *args)
            self.assertIn('judged here', text)
            self.assertIn('said by the server', text)
            self.assertEqual(text.count('within the contract'), 2)
            self.assertTrue(json.loads(self.run_ok('--json', 'check', *args))['report']['within_contract'])

    def test_general_options_may_stand_behind_any_command(self):
        norm = ('normalize', '--kind', 'rms_norm', '--input', '[1,2]')
        for command in (('health',), ('selftest',), norm, ('check', '--dim', '4', '--hidden', '3'), ('check', *norm)):
            with self.subTest(command=command):
                result = layerctl(*command, '--server', self.daemon.address, '--timeout-s', '30', '--json')
                self.assertEqual(result.status, 0, result)

    def test_a_large_call_ends_when_it_is_answered(self):
        # gRPC polls for up to 10 s for a connection that once could not be written to, and its shutdown waits for that.
        for _ in range(15):
            started = time.monotonic()
            self.run_ok('feedforward', '--seed', '1', '--rows', '4', '--dim', '512', '--hidden', '1365')
            self.assertLess(time.monotonic() - started, 8)

    def test_health(self):
        self.assertEqual(self.run_ok('health'), 'SERVING\n')
        self.assertEqual(self.run_ok('health', '--service', 'layerd.v1.LayerService'), 'SERVING\n')
        self.assertEqual(json.loads(self.run_ok('--json', 'health')), {'status': 'SERVING'})
        self.failed(4, 'health', '--service', 'no.such.Service', texts=['NOT_FOUND'])

    def test_the_server_of_the_environment(self):
        env = {'LAYERD_SERVER': self.daemon.address}
        self.assertEqual(layerctl('health', env=env).stdout, 'SERVING\n')
        result = layerctl('health', '--timeout-s', '5', env={'LAYERD_SERVER': '127.0.0.1:1'})
        self.assertEqual(result.status, 3)
        result = layerctl('health', server=self.daemon, env={'LAYERD_SERVER': '127.0.0.1:1'})
        self.assertEqual(result.status, 0, 'the command line goes over the environment')


class Forwarder(layer_grpc.LayerServiceServicer):
    """A server that answers as the real one does, but for what `change` makes of it."""

    def __init__(self, address, change):
        self.stub = layer_grpc.LayerServiceStub(open_channel(address))
        self.change = change

    def answer(self, method, request, context):
        try:
            answer = method(request, timeout=60)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        self.change(answer)
        return answer

    def Normalize(self, request, context):
        return self.answer(self.stub.Normalize, request, context)

    def FeedForward(self, request, context):
        return self.answer(self.stub.FeedForward, request, context)


@contextlib.contextmanager
def fake_server(servicer):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=[('grpc.max_receive_message_length', -1)])
    layer_grpc.add_LayerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port('127.0.0.1:0')
    server.start()
    try:
        yield f'127.0.0.1:{port}'
    finally:
        server.stop(0).wait()


class ExitStatuses(WithDaemon):
    NORM = ('normalize', '--kind', 'rms_norm', '--seed', '1', '--dim', '12')
    LAYER = ('feedforward', '--seed', '1', '--dim', '12', '--hidden', '20')
    SEEDED = ('check', '--dim', '12', '--hidden', '20')

    def outside(self, change, *commands):
        with fake_server(Forwarder(self.daemon.address, change)) as address:
            for command in commands:
                with self.subTest(command=command):
                    result = layerctl(*command, server=address)
                    self.assertEqual(result.status, 1, result)
                    self.assertLessEqual(result.stderr.count('\n'), 1)

    def test_1_where_a_number_is_slightly_wrong(self):
        def change(answer):
            values = np.frombuffer(answer.output.data, '<f4' if answer.output.dtype == FLOAT32 else '<u2').copy()
            if answer.output.dtype == FLOAT32:
                values[5] *= 1 + 2.0**-14
            else:
                values[5] += 2
            answer.output.data = values.tobytes()
        self.outside(change, self.SEEDED, ('check', *self.NORM), ('check', *self.LAYER))
        with fake_server(Forwarder(self.daemon.address, change)) as address:
            text = layerctl('check', *self.NORM, server=address).stdout
            self.assertIn('OUTSIDE THE CONTRACT', text.split('said by the server')[0])
            self.assertIn('within the contract', text.split('said by the server')[1])

    def test_1_where_a_value_inside_is_wrong(self):
        def change(answer):
            values = np.frombuffer(answer.intermediates.hidden.data, '<f4').copy()
            values[3] += 0.25
            answer.intermediates.hidden.data = values.tobytes()
        self.outside(change, ('check', *self.LAYER))

    def test_1_where_the_server_itself_says_so(self):
        def change(answer):
            answer.report.within_contract = False
        self.outside(change, (*self.NORM, '--verify'), (*self.LAYER, '--verify'), ('--json', *self.NORM, '--verify'),
                     ('check', *self.NORM), ('check', *self.LAYER), self.SEEDED)

    def test_1_where_the_answer_has_another_shape_or_dtype(self):
        def one_row(answer):
            answer.output.data = answer.output.data[:len(answer.output.data) // answer.output.shape[0]]
            answer.output.shape[0] = 1

        def other_dtype(answer):
            answer.output.data = answer.output.data * 2 if answer.output.dtype != FLOAT32 else answer.output.data[::2]
            answer.output.dtype = FLOAT32 if answer.output.dtype != FLOAT32 else FLOAT16
        for change in (one_row, other_dtype):
            self.outside(change, self.SEEDED, ('check', *self.NORM), ('check', *self.LAYER))

    def test_1_where_the_answer_is_damaged(self):
        def no_output(answer):
            answer.ClearField('output')

        def no_report(answer):
            answer.ClearField('report')

        def cut_short(answer):
            answer.output.data = answer.output.data[:-1]

        def bogus_shape(answer):
            answer.output.shape[:] = [2**62, 2**62]
        for change in (no_output, no_report, cut_short, bogus_shape):
            self.outside(change, ('check', *self.NORM), ('check', *self.LAYER))

    def test_1_where_known_values_are_missed(self):
        def change(answer):
            answer.output.data = bytes(len(answer.output.data))
        self.outside(change, ('selftest',), ('demo',))

    def test_answers_of_another_size_are_no_crash(self):
        def change(answer):
            answer.output.shape[:] = [7]
            answer.output.dtype = FLOAT32
            answer.output.data = bytes(28)
        with fake_server(Forwarder(self.daemon.address, change)) as address:
            for command in (('selftest',), ('demo',), self.SEEDED, self.NORM, self.LAYER):
                result = layerctl(*command, server=address)
                self.assertIn(result.status, (0, 1, 4), result)

    def test_2_wrong_usage(self):
        for args, texts in (
                ((), ()), (('nosuch',), ('nosuch',)), (('normalize', '--nosuch'), ('--nosuch',)),
                (('normalize', 'x'), ('x',)), (('normalize', '--input', '[1,2]'), ('--kind',)),
                (('normalize', '--kind', 'rms_norm'), ('--input',)),
                (('normalize', '--kind', 'batch_norm'), ('--kind',)),
                (('normalize', '--kind'), ('--kind',)),
                (('normalize', '--kind', 'rms_norm', '--input', '[1,2]', '--eps', 'x'), ('--eps',)),
                (('normalize', '--kind', 'rms_norm', '--seed', '1'), ('--dim',)),
                (('normalize', '--kind', 'rms_norm', '--input', '[1,2]', '--dtype', 'int8'), ('--dtype',)),
                (('feedforward', '--input', '[1,2]'), ('--form',)),
                (('feedforward', '--input', '[1,2]', '--form', 'plain'), ('--activation',)),
                (('feedforward', '--input', '[1,2]', '--form', 'plain', '--activation', 'relu'), ('--layout',)),
                (('feedforward', '--input', '[1,2]', '--form', 'gated', '--activation', 'silu', '--layout', 'out_in'),
                 ('--packing',)),
                (('feedforward', '--seed', '1', '--dim', '8'), ('--hidden',)),
                (('--timeout-s', '0', 'health'), ('--timeout-s',)), (('plan',), ('--dim',)),
                (('normalize', '--seed', '-1', '--kind', 'rms_norm', '--dim', '8'), ('--seed',))):
            with self.subTest(args=args):
                self.failed(2, *args, texts=texts)

    def test_2_options_are_named_as_they_are_typed(self):
        self.failed(2, 'feedforward', '--input', '[1,2]', '--form', 'gated', '--activation', 'silu', '--layout',
                    'out_in', '--packing', 'halves', '--gate-up', '[1', texts=['--gate-up'])

    def test_2_seeds_that_no_number_holds(self):
        for command, most in ((('check',), 2**64 - 1), (('layers', 'verify', 'models/m/layers/l'), 2**64 - 1),
                              (('layers', 'quantize', 'models/m/layers/l'), 2**63 - 1)):
            for seed in ('-1', '1.5', 'x', str(most + 1)):
                self.failed(2, *command, f'--seed={seed}', texts=['--seed', f'0 to {most}', seed])

    def test_2_files(self):
        folder = scratch_dir()
        (folder / 'short.npy').write_bytes(b'\x93NUMPY\x01\x00')
        for args, texts in ((('--input', folder / 'no.npy'), ('--input', 'no.npy')),
                            (('--input', folder / 'short.npy'), ('--input',)),
                            (('--input', '[1,2]', '--gamma', folder / 'no.npy'), ('--gamma',)),
                            (('--input', '[1,2]', '--out', folder / 'y.txt'), ('y.txt',)),
                            (('--input', '[1,2]', '--out', folder / 'no' / 'y.npy'), ('y.npy',)),
                            (('--input', '[1,2]', '--weights', folder / 'no.safetensors', '--prefix', 'x'),
                             ('no.safetensors',))):
            self.failed(2, 'normalize', '--kind', 'rms_norm', *args, texts=texts)

    def test_3_no_connection(self):
        for server in ('127.0.0.1:1', 'unix:/no/such/socket'):
            for command in (('health',), self.NORM, self.LAYER, ('selftest',), ('check',), ('check', *self.NORM)):
                self.failed(3, '--timeout-s', '20', *command, server=server, texts=['UNAVAILABLE'])
            result = layerctl('demo', server=server)  # it prints as it goes
            self.assertEqual((result.status, result.stderr.count('\n')), (3, 1), result)

    def test_3_no_answer_in_time(self):
        class Silent(layer_grpc.LayerServiceServicer):
            def Normalize(self, request, context):
                while context.is_active():
                    time.sleep(0.02)
        with fake_server(Silent()) as address:
            self.failed(3, '--timeout-s', '0.5', *self.NORM, server=address, texts=['DEADLINE_EXCEEDED'])

    def test_4_refused(self):
        self.failed(4, 'normalize', '--kind', 'rms_norm', '--input', '[1,2]', '--eps', '-1',
                    texts=['INVALID_ARGUMENT', 'spec.epsilon', 'got -1'])
        self.failed(4, 'normalize', '--kind', 'rms_norm', '--input', '[1,2]', '--gamma', '[1]',
                    texts=['INVALID_ARGUMENT', 'gamma.shape'])
        with Daemon('--max_verify_flops=10') as daemon:
            self.failed(4, *self.NORM, '--verify', server=daemon, texts=['RESOURCE_EXHAUSTED', '--max_verify_flops'])
        with fake_server(layer_grpc.LayerServiceServicer()) as address:
            self.failed(4, *self.NORM, server=address, texts=['UNIMPLEMENTED'])


if __name__ == '__main__':
    unittest.main()
