"""Int8 layers: quantised by layerctl, as the docs say (NumPy quantises them again here), called by name and in the call, and
what is refused."""
import json
import unittest

import numpy as np

import golden_math
import harness
import resident
from harness import BFLOAT16, FLOAT16, FLOAT32, INT8, Daemon, array_of, error_of, layer_pb, layerctl, tensor
from layers_support import MLP, NORM, LayersTest
from models_test import wait_for
from resident import SWIGLU, by_name, content_hash, evaluate, inline, registry_pb

NEEDS_DATA = unittest.skipUnless((resident.SHARED / 'data').is_dir(), f'no data in {resident.SHARED} (LAYERD_TEST_DATA)')
ROLES = ('gate', 'up', 'down')


def blocks(w):
    """[out, in] as [out, blocks, 32], filled up with zeros."""
    w = np.asarray(w, np.float64)
    return np.pad(w, ((0, 0), (0, -w.shape[1] % 32))).reshape(w.shape[0], -1, 32)


def quantised(w):
    """q [out, in] and scale [out, ⌈in/32⌉] by docs/layers.md."""
    largest = np.abs(blocks(w)).max(axis=2)
    scale = (largest / 127).astype(np.float16)
    scale = np.where(scale.astype(np.float64) * 127 < largest, np.nextafter(scale, np.float16(np.inf)), scale)
    divisor = np.where(scale == 0, 1, scale.astype(np.float64))
    q = np.rint(blocks(w) / divisor[:, :, None]).reshape(w.shape[0], -1)[:, :w.shape[1]]
    return q, scale


def values(q, scale):
    """scale · q as float32."""
    return (blocks(q) * np.asarray(scale, np.float64)[:, :, None]).reshape(q.shape[0], -1)[:, :q.shape[1]].astype(np.float32)


def int8_weights(seed, dim=40, hidden=72):
    """A SwiGLU layer with int8 matrices, as messages by role."""
    random = np.random.default_rng(seed)
    weights = {}
    for role, shape in (('gate', (hidden, dim)), ('up', (hidden, dim)), ('down', (dim, hidden))):
        weights[role] = tensor(random.integers(-128, 128, shape), INT8)
        weights[role + '_scale'] = tensor(random.uniform(0.001, 0.003, (shape[0], -(-shape[1] // 32))), FLOAT16)
    return weights


def in_float32(weights):
    """The float32 layer of the same values."""
    return {role: tensor(values(array_of(weights[role]), array_of(weights[role + '_scale']))) for role in ROLES}


def relative_error(got, exact):
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    return np.sqrt(((got - exact)**2).sum() / (exact**2).sum())


class Quantising(LayersTest):
    @NEEDS_DATA
    def test_of_stories260k_every_layer_says_its_error_and_keeps_it(self):
        models = resident.stories_models()
        tensors = resident.read_safetensors(models / 'stories260k' / 'model.safetensors')
        random = np.random.default_rng(1)
        with Daemon(f'--models={models}', f'--layer_store={harness.scratch_dir()}').ready() as daemon:
            stub, registry = daemon.stub(), resident.registry(daemon)
            for i in range(5):
                source, name = f'models/stories260k/layers/model.layers.{i}.mlp', f'models/int8/layers/mlp.{i}'
                self.run_ok('layers', 'quantize', name, '--layer', source, server=daemon)
                floats = {role: tensors[f'model.layers.{i}.mlp.{role}_proj.weight'] for role in ROLES}
                weights = {}
                for role in ROLES:
                    q, scale = quantised(array_of(floats[role]))
                    weights[role], weights[role + '_scale'] = tensor(q, INT8), tensor(scale, FLOAT16)

                # The layer is the one that the docs define, from what the checkpoint has.
                layer = registry.GetLayer(registry_pb.GetLayerRequest(name=name), timeout=60)
                self.assertEqual(layer.content_hash, content_hash(SWIGLU, weights))
                self.assertEqual(layer.quantization.source_hash, content_hash(SWIGLU, floats))
                self.assertEqual(layer.parameters, 3 * 64 * 172)
                self.assertEqual(layer.weight_bytes, sum(len(weight.data) for weight in weights.values()))

                # By name and in the call: the same bits, and those of its values in float32.
                for dtype in (FLOAT32, BFLOAT16):
                    for rows in (1, 5, 70):
                        x = tensor(random.standard_normal((rows, 64)), dtype)
                        named = evaluate(stub, by_name(name, SWIGLU, x)).output.SerializeToString()
                        sent = evaluate(stub, inline(SWIGLU, weights, x)).output.SerializeToString()
                        wide = evaluate(stub, inline(SWIGLU, in_float32(weights), x)).output.SerializeToString()
                        self.assertTrue(named == sent == wide, (i, dtype, rows))

                # The errors are those that it tells.
                told = layer.quantization
                self.assertEqual([matrix.role for matrix in told.matrices], list(ROLES))
                for matrix in told.matrices:
                    exact = array_of(floats[matrix.role])
                    got = values(array_of(weights[matrix.role]), array_of(weights[matrix.role + '_scale']))
                    self.assertAlmostEqual(matrix.relative_rms_error / relative_error(got, exact), 1, 9)
                    self.assertEqual(matrix.max_abs_error, np.abs(got.astype(np.float64) - exact).max())
                self.assertEqual((told.rows, told.seed), (16, 1))
                seeded = tensor(golden_math.seeded(1, 'input', (16, 64), 3**0.5))
                error = relative_error(*(array_of(evaluate(stub, by_name(one, SWIGLU, seeded)).output)
                                         for one in (name, source)))
                self.assertAlmostEqual(told.output_relative_rms_error / error, 1, 6)
                x = tensor(random.standard_normal((100, 64)))
                error = relative_error(*(array_of(evaluate(stub, by_name(one, SWIGLU, x)).output)
                                         for one in (name, source)))
                self.assertLess(error, 1.5 * told.output_relative_rms_error)
                self.assertLess(told.output_relative_rms_error, 0.02)
                self.run_ok('layers', 'verify', name, server=daemon)

    def test_what_is_printed_is_what_describe_says(self):
        printed = self.run_ok('layers', 'quantize', 'models/q/layers/mlp', '--layer', MLP, '--rows', '7', '--seed', '3')
        layer = self.get('models/q/layers/mlp')
        told = layer.quantization
        self.assertEqual((told.source_hash, told.rows, told.seed), (self.hash, 7, 3))
        lines = printed.splitlines()
        self.assertEqual(lines[0], f'models/q/layers/mlp  {layer.content_hash}')
        for line, matrix in zip(lines[1:], told.matrices):
            self.assertRegex(line, rf'^  weights of {matrix.role} +relative rms error {matrix.relative_rms_error:.3g} +'
                                   rf'max abs error {matrix.max_abs_error:.3g}$')
        self.assertRegex(lines[4], rf'^  output +relative rms error {told.output_relative_rms_error:.3g} +'
                                   r'for 7 rows of seed 3$')
        self.assertEqual(len(lines), 5)
        text = self.run_ok('layers', 'describe', 'models/q/layers/mlp')
        self.assertIn('quantization\n' + '\n'.join(lines[1:]) + '\n', text)
        self.assertRegex(text, rf'\n  quantized_from +{self.hash}\n')
        self.assertRegex(text, r'\n  gate +int8 +\[40, 16\] +gate\n  gate_scale +float16 +\[40, 1\] +gate_scale\n')
        described = self.ask('layers', 'describe', 'models/q/layers/mlp')
        self.assertEqual(described['quantization'], {
            'source_hash': told.source_hash,
            'matrices': [{'role': matrix.role, 'relative_rms_error': matrix.relative_rms_error,
                          'max_abs_error': matrix.max_abs_error} for matrix in told.matrices],
            'output_relative_rms_error': told.output_relative_rms_error, 'rows': 7, 'seed': 3})
        self.assertNotIn('quantization', self.ask('layers', 'describe', MLP))
        listed = [line.split() for line in self.run_ok('layers', 'list', '--model', 'q').splitlines()]
        self.assertEqual(listed[1][:6], ['models/q/layers/mlp', 'gated', 'silu', '16', '40', 'int8'])

    def test_a_file_is_the_layer_with_its_error(self):
        file = self.folder / 'q.safetensors'
        answer = self.ask('layers', 'quantize', '--layer', MLP, '--out', file)
        self.assertEqual(answer['file'], str(file))
        uploaded = self.ask('layers', 'upload', 'models/q/layers/a', '--weights', file)
        self.assertEqual((uploaded['content_hash'], uploaded['quantization'], uploaded['weight_bytes']),
                         (answer['content_hash'], answer['quantization'], answer['weight_bytes']))
        # From the checkpoint itself, and there and back again.
        again = self.ask('layers', 'quantize', 'models/q/layers/b', '--weights', self.models / 'm', '--prefix',
                         'model.layers.0.mlp')
        self.assertEqual((again['content_hash'], again['quantization']), (answer['content_hash'], answer['quantization']))
        self.run_ok('layers', 'download', 'models/q/layers/b', '--out', self.folder / 'back.safetensors')
        self.assertEqual((self.folder / 'back.safetensors').read_bytes(), file.read_bytes())
        # For every command that takes a layer's file, or single weights of files.
        rows = ('--seed', '2', '--dim', '16', '--rows', '3')
        named = self.ask('feedforward', '--layer', 'models/q/layers/a', *rows)['output']
        self.assertEqual(self.ask('feedforward', '--weights', file, *rows)['output'], named)
        singly = [option for role in ROLES for option in
                  (f'--{role}', f'{file}:{role}', f'--{role}-scale', f'{file}:{role}_scale')]
        self.assertEqual(self.ask('feedforward', '--form', 'gated', '--activation', 'silu', '--packing', 'separate', '--layout',
                                  'out_in', *singly, *rows)['output'], named)
        weights = resident.read_safetensors(file)
        np.save(self.folder / 'gate.npy', array_of(weights['gate']).astype(np.int8))
        singly[1] = self.folder / 'gate.npy'
        singly[3] = json.dumps(array_of(weights['gate_scale']).tolist())
        self.assertEqual(self.ask('feedforward', '--form', 'gated', '--activation', 'silu', '--packing', 'separate', '--layout',
                                  'out_in', *singly, *rows)['output'], named)
        self.assertIn('within the contract', self.run_ok('check', 'feedforward', '--weights', file, *rows))

    def test_all_of_a_checkpoint(self):
        answer = self.ask('layers', 'quantize', 'models/q', '--from', self.models / 'm')
        self.assertEqual((answer['skipped'], answer['failed']), ([], []))
        layers = {layer['name'].rpartition('/')[2]: layer for layer in answer['layers']}
        self.assertEqual(set(layers), {'model.layers.0.mlp', 'model.layers.1.mlp', 'model.norm'})
        self.assertEqual({'quantization' in layer for name, layer in layers.items() if name.endswith('.mlp')}, {True})
        self.assertNotIn('quantization', layers['model.norm'])
        self.assertEqual(layers['model.layers.0.mlp']['quantization']['source_hash'], self.hash)
        evaluate(self.daemon.stub(), by_name('models/q/layers/model.norm', resident.RMS_NORM, tensor(np.ones((1, 16)))))
        self.assertEqual(len(self.run_ok('layers', 'quantize', 'models/r', '--from', self.models / 'm').splitlines()), 11)

    def test_every_layout_and_packing_becomes_out_in(self):
        for packing in ('separate', 'halves', 'interleaved'):
            hashes = set()
            for layout in ('out_in', 'in_out'):
                self.run_ok('layers', 'upload', f'models/u/layers/{packing}.{layout}', '--seed', '1', '--dim', '40', '--hidden',
                            '70', '--biases', '--dtype', 'bfloat16', '--packing', packing, '--layout', layout)
                made = self.ask('layers', 'quantize', f'models/q/layers/{packing}.{layout}', '--layer',
                                f'models/u/layers/{packing}.{layout}')
                self.assertEqual((made['feed_forward']['layout'], made['feed_forward']['packing']), ('out_in', packing))
                self.assertEqual([w['dtype'] for w in made['weights'] if w['role'].endswith('_bias')][:1], ['bfloat16'])
                self.assertLess(made['quantization']['output_relative_rms_error'], 0.02)
                hashes.add(made['content_hash'])
            self.assertEqual(len(hashes), 2)  # a seed makes other matrices of other shapes

    def test_another_error_for_the_same_layer_replaces_the_old_one(self):
        self.run_ok('layers', 'quantize', 'models/q/layers/mlp', '--layer', MLP)
        before = self.get('models/q/layers/mlp')
        self.run_ok('layers', 'quantize', 'models/q/layers/mlp', '--layer', MLP, '--seed', '9')
        after = self.get('models/q/layers/mlp')
        self.assertEqual((before.content_hash, before.quantization.seed, after.quantization.seed),
                         (after.content_hash, 1, 9))

    def test_wrong_usage_and_what_cannot_be_quantised(self):
        self.run_ok('layers', 'quantize', 'models/q/layers/done', '--layer', MLP)
        nan = dict(resident.swiglu_weights(1))
        nan['down'] = tensor(np.where(np.arange(16 * 40) == 45, np.nan, 1).reshape(16, 40))
        resident.upload(self.registry, 'models/u/layers/nan', SWIGLU, nan)
        out = ('--out', self.folder / 'x.safetensors')
        for args, text in (
                ((), 'one source, --layer, --weights or --from, got none'),
                (('n', '--layer', MLP, '--from', self.models / 'm'), 'one source'),
                (('--layer', MLP), 'either the NAME to upload to, or --out, got neither'),
                (('n', '--layer', MLP, *out), 'got both'),
                (('--layer', MLP, '--out', self.folder / 'x.npy'), '--out: expected FILE.safetensors'),
                (('--from', self.models / 'm', *out), '--from makes more than one'),
                (('--layer', MLP, '--etag', 'x', *out), '--etag'),
                (('models/q', '--from', self.models / 'm', '--etag', 'x'), '--etag'),
                (('n', '--layer', MLP, '--activation', 'gelu'), '--layer has its own'),
                (('n', '--layer', MLP, '--rows', '0'), '--rows'), (('n', '--layer', MLP, '--seed', '-1'), '--seed'),
                (('n', '--layer', NORM), f'--layer: {NORM}: expected a feed-forward layer, got a norm'),
                (('n', '--layer', 'models/q/layers/done'), 'weights.gate.dtype: expected float32, float16 or bfloat16'),
                (('n', '--layer', 'models/u/layers/nan'), 'weights.down: expected finite weights of at most 127'),
                (('--layer', MLP, '--out', self.folder / 'none' / 'x.safetensors'), 'x.safetensors')):
            with self.subTest(args=args):
                self.failed(2, 'layers', 'quantize', *args, texts=[text])
        result = layerctl('layers', 'quantize', 'n', '--layer', 'models/u/layers/nan', server=self.daemon)
        self.assertIn('got nan for output 1, input 5', result.stderr)
        self.failed(4, 'layers', 'quantize', 'n', '--layer', 'models/m/layers/none', texts=['NOT_FOUND'])
        self.failed(4, 'layers', 'quantize', 'models/../n', '--layer', MLP, texts=['INVALID_ARGUMENT', 'header.name'])
        self.failed(3, 'layers', 'quantize', 'n', '--layer', MLP, server='127.0.0.1:1', texts=['UNAVAILABLE'])
        self.assertEqual(list(self.folder.iterdir()), [])


class Wire(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = harness.scratch_dir()
        cls.daemon = Daemon(f'--layer_store={harness.scratch_dir()}')
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.stub, cls.registry = cls.daemon.stub(), resident.registry(cls.daemon)
        cls.weights = int8_weights(1)
        cls.x = tensor(np.random.default_rng(2).standard_normal((3, 40)))

    def changed(self, **weights):
        """The request with other weights; None takes one away."""
        changed = {role: weight for role, weight in {**self.weights, **weights}.items() if weight is not None}
        return inline(SWIGLU, changed, self.x)

    def refused(self, request, field, reason, *texts):
        error = error_of(self.stub.FeedForward, request)
        self.assertEqual((error.code.name, error.reason), ('INVALID_ARGUMENT', reason), error)
        self.assertEqual([path for path, _, _ in error.fields], [field], error)
        for text in texts:
            self.assertIn(text, error.text)

    def test_in_the_call_by_bytes_and_by_values(self):
        wide = evaluate(self.stub, inline(SWIGLU, in_float32(self.weights), self.x))
        request = self.changed()
        request.verify = True
        answer = evaluate(self.stub, request)
        self.assertEqual(answer.output, wide.output)
        self.assertTrue(answer.report.within_contract)
        typed = self.changed()
        for role in ROLES:
            for name in (role, role + '_scale'):
                message = getattr(typed.weights, name)
                message.values.extend(array_of(message).ravel().tolist())
                message.ClearField('data')
        self.assertEqual(evaluate(self.stub, typed).output, wide.output)

    def test_what_does_not_fit_in_the_call(self):
        scale = self.weights['gate_scale']
        self.refused(self.changed(gate_scale=None), 'weights.gate_scale', 'MISSING',
                     'expected scales, float16 [72, 2], since weights.gate is int8, got nothing')
        self.refused(self.changed(gate=tensor(np.ones((72, 40)))), 'weights.gate_scale', 'UNEXPECTED_FIELD',
                     'since weights.gate is float32')
        self.refused(self.changed(gate_up_scale=scale), 'weights.gate_up_scale', 'UNEXPECTED_FIELD',
                     'since there is no weights.gate_up')
        for shape in ((72,), (72, 1), (72, 3), (2, 72), (72, 2, 1), (72, 40)):
            self.refused(self.changed(gate_scale=tensor(np.ones(shape), FLOAT16)), 'weights.gate_scale.shape',
                         'SHAPE_MISMATCH', 'expected [72, 2], one for each 32 inputs of weights.gate [72, 40], got ['
                         + ', '.join(map(str, shape)))
        for dtype, name in ((FLOAT32, 'float32'), (BFLOAT16, 'bfloat16'), (INT8, 'int8')):
            self.refused(self.changed(down_scale=tensor(np.ones((40, 3)), dtype)), 'weights.down_scale.dtype',
                         'DTYPE_MISMATCH', f'expected float16, got {name}')
        request = self.changed()
        request.spec.layout = layer_pb.WEIGHT_LAYOUT_IN_OUT
        request.weights.gate.shape[:] = request.weights.up.shape[:] = [40, 72]
        request.weights.down.shape[:] = [72, 40]
        self.refused(request, 'weights.gate.dtype', 'DTYPE_MISMATCH', 'for layout IN_OUT, got int8')
        self.refused(self.changed(gate=tensor(np.ones((72, 41)), INT8)), 'weights.gate.shape', 'SHAPE_MISMATCH')

    def test_int8_where_no_matrix_is(self):
        ints = tensor(np.ones((3, 40)), INT8)
        for request, field in ((inline(SWIGLU, self.weights, ints), 'input.dtype'),
                               (inline(SWIGLU, self.weights, self.x, output_dtype=INT8), 'output_dtype'),
                               (self.changed(gate_bias=tensor(np.ones(72), INT8)), 'weights.gate_bias.dtype')):
            self.refused(request, field, 'DTYPE_MISMATCH', 'expected float32, float16 or bfloat16, got int8')
        for field, request in (('input.dtype', layer_pb.NormalizeRequest(input=ints)),
                               ('gamma.dtype', layer_pb.NormalizeRequest(input=self.x, gamma=tensor(np.ones(40), INT8))),
                               ('beta.dtype', layer_pb.NormalizeRequest(input=self.x, beta=tensor(np.ones(40), INT8))),
                               ('residual.dtype', layer_pb.NormalizeRequest(input=self.x, residual=ints)),
                               ('output_dtype', layer_pb.NormalizeRequest(input=self.x, output_dtype=INT8))):
            request.spec.kind = layer_pb.NORM_KIND_RMS_NORM
            error = error_of(self.stub.Normalize, request)
            self.assertEqual((error.reason, [path for path, _, _ in error.fields]), ('DTYPE_MISMATCH', [field]), error)

    def test_values_that_are_no_int8(self):
        for value in (0.5, 128, -129, 1e30, float('nan'), float('-inf')):
            request = self.changed()
            request.weights.gate.ClearField('data')
            request.weights.gate.values.extend([1.0] * (72 * 40 - 1) + [value])
            self.refused(request, 'weights.gate.values', 'OUT_OF_RANGE', 'whole numbers of -128 to 127 for DTYPE_INT8')

    def test_scales_that_are_not_finite_follow_ieee(self):
        scale = np.array(array_of(self.weights['down_scale']))
        scale[7, 1], scale[9, 0], scale[11, 2] = np.inf, np.nan, -scale[11, 2]
        weights = {**self.weights, 'down_scale': tensor(scale, FLOAT16)}
        got = array_of(evaluate(self.stub, inline(SWIGLU, weights, self.x)).output)
        self.assertFalse(np.isfinite(got[:, [7, 9]]).any())
        self.assertTrue(np.isfinite(np.delete(got, [7, 9], axis=1)).all())
        self.assertEqual(got.tobytes(),
                         array_of(evaluate(self.stub, inline(SWIGLU, in_float32(weights), self.x)).output).tobytes())

    def test_uploads_that_do_not_fit(self):
        def refused(weights, field, reason, **fields):
            error = error_of(resident.upload, self.registry, 'models/u/layers/x', SWIGLU, weights, **fields)
            self.assertEqual((error.code.name, error.reason, [path for path, _, _ in error.fields]),
                             ('INVALID_ARGUMENT', reason, [field]), error)

        without = {role: weight for role, weight in self.weights.items() if role != 'up_scale'}
        refused(without, 'weights.up_scale', 'MISSING')
        refused({**self.weights, 'up_scale': tensor(np.ones((72, 2)))}, 'weights.up_scale.dtype', 'DTYPE_MISMATCH')
        refused({**self.weights, 'up_scale': tensor(np.ones((72, 1)), FLOAT16)}, 'weights.up_scale.shape', 'SHAPE_MISMATCH')
        refused({**self.weights, 'up': tensor(np.ones((72, 40)), FLOAT16)}, 'weights.up_scale', 'UNEXPECTED_FIELD')
        refused({**self.weights, 'up_bias': tensor(np.ones(72), INT8)}, 'weights.up_bias.dtype', 'DTYPE_MISMATCH')

        def told(**fields):
            fields = {'source_hash': 'a' * 64, 'rows': 1, 'seed': 1,
                      'matrices': [registry_pb.MatrixError(role=role) for role in ROLES], **fields}
            return registry_pb.Quantization(**fields)

        error = registry_pb.MatrixError
        for quantization, field in ((told(source_hash='x'), 'source_hash'), (told(rows=-1), 'rows'),
                                    (told(seed=-1), 'seed'), (told(matrices=[]), 'matrices'),
                                    (told(output_relative_rms_error=float('nan')), 'output_relative_rms_error'),
                                    (told(matrices=[error(role='gate_up' * 9999)]), 'matrices'),
                                    (told(matrices=[error(role=role, max_abs_error=-1) for role in ROLES]), 'matrices')):
            refused(self.weights, f'header.quantization.{field}', 'QUANTIZATION', quantization=quantization)
        refused(in_float32(self.weights), 'header.quantization', 'QUANTIZATION', quantization=told())
        body = resident.safetensors({'gamma': tensor(np.ones(4))})
        error = error_of(self.registry.CreateLayer, resident.messages('models/u/layers/n', resident.RMS_NORM, body,
                                                                      quantization=told()))
        self.assertEqual([path for path, _, _ in error.fields], ['header.quantization'], error)
        layer = resident.upload(self.registry, 'models/u/layers/x', SWIGLU, self.weights, quantization=told())
        self.assertEqual(layer.quantization, told())
        self.assertEqual(resident.download(self.registry, 'models/u/layers/x')[0].quantization, told())


class Described(unittest.TestCase):
    def test_a_checkpoint_with_int8_matrices_that_layerd_json_names(self):
        models = harness.scratch_dir()
        (models / 'm').mkdir()
        weights = int8_weights(5)
        names = {role: f'blocks.0.{role}' for role in weights}
        (models / 'm' / 'model.safetensors').write_bytes(
            resident.safetensors({names[role]: weight for role, weight in weights.items()}))
        (models / 'm' / 'layerd.json').write_text(json.dumps({'layers': [{
            'layer': 'blocks.{i}.ffn', 'feed_forward': {'form': 'gated', 'activation': 'silu', 'packing': 'separate',
                                                        'layout': 'out_in'},
            'weights': {role: name.replace('0', '{i}') for role, name in names.items()}}]}))
        with Daemon(f'--models={models}').ready() as daemon:
            wait_for(lambda: 'model_read' in daemon.log())
            x = tensor(np.random.default_rng(2).standard_normal((3, 40)), BFLOAT16)
            named = evaluate(daemon.stub(), by_name('models/m/layers/blocks.0.ffn', SWIGLU, x))
            self.assertEqual(named.output, evaluate(daemon.stub(), inline(SWIGLU, weights, x)).output)
            self.assertEqual(named.layer_hash, content_hash(SWIGLU, weights))


if __name__ == '__main__':
    unittest.main()
