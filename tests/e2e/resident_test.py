"""Layers called by name: the same bits as with the layer in the call, and clear errors."""
import json
import shutil
import tempfile
import time
import unittest

import numpy as np

import harness
import resident
from harness import BFLOAT16, FLOAT16, FLOAT32, Daemon, array_of, error_of, layer_pb, tensor
from resident import RMS_NORM, SWIGLU, by_name, content_hash, evaluate, inline, registry_pb

KWT1 = {  # what no config.json tells: docs/checkpoints.md, layerd.json
    'layers': [
        {'layer': 'layers.{i}.' + norm, 'weights': {'gamma': f'layers.{{i}}.{norm}.weight',
                                                    'beta': f'layers.{{i}}.{norm}.bias'},
         'normalize': {'kind': 'layer_norm', 'epsilon': 9.999999974752427e-07, 'rounding': 'after_gamma'}}
        for norm in ('ln1', 'ln2')
    ] + [
        {'layer': 'layers.{i}.ffn', 'feed_forward': {'form': 'plain', 'activation': 'gelu_tanh', 'layout': 'out_in'},
         'weights': {'up': 'layers.{i}.fc1.weight', 'up_bias': 'layers.{i}.fc1.bias',
                     'down': 'layers.{i}.fc2.weight', 'down_bias': 'layers.{i}.fc2.bias'}}]}
LAYER_NORM = layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_LAYER_NORM, epsilon=9.999999974752427e-07,
                                    rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA)
PLAIN_GELU = layer_pb.FeedForwardSpec(form=layer_pb.FEED_FORWARD_FORM_PLAIN, layout=layer_pb.WEIGHT_LAYOUT_OUT_IN,
                                      activation=layer_pb.ACTIVATION_GELU_TANH)
NEEDS_DATA = unittest.skipUnless((resident.SHARED / 'data').is_dir(), f'no data in {resident.SHARED} (LAYERD_TEST_DATA)')


class SameBits(unittest.TestCase):
    def compare(self, stub, name, spec, weights, width):
        """The layer by name against the layer in the call: output, hash, for every dtype of input."""
        random = np.random.default_rng(len(name))
        for dtype in (FLOAT32, FLOAT16, BFLOAT16):
            for rows in (1, 5, 70):
                x = tensor(random.standard_normal((rows, width)), dtype)
                named = evaluate(stub, by_name(name, spec, x))
                sent = evaluate(stub, inline(spec, weights, x))
                self.assertEqual(named.output.SerializeToString(), sent.output.SerializeToString(), (name, dtype, rows))
                self.assertEqual(named.layer_hash, content_hash(spec, weights), name)
                self.assertEqual(sent.layer_hash, '')

    @NEEDS_DATA
    def test_every_layer_of_stories260k(self):
        models = resident.stories_models()
        tensors = resident.read_safetensors(models / 'stories260k' / 'model.safetensors')
        with Daemon(f'--models={models}').ready() as daemon:
            stub = daemon.stub()
            layers = {layer.name: layer for layer in resident.registry(daemon).ListLayers(
                registry_pb.ListLayersRequest(parent='models/stories260k')).layers}
            norms = ['model.norm'] + [f'model.layers.{i}.{norm}' for i in range(5)
                                      for norm in ('input_layernorm', 'post_attention_layernorm')]
            for norm in norms:
                self.compare(stub, f'models/stories260k/layers/{norm}', RMS_NORM,
                             {'gamma': tensors[f'{norm}.weight']}, 64)
            for i in range(5):
                mlp = f'model.layers.{i}.mlp'
                self.compare(stub, f'models/stories260k/layers/{mlp}', SWIGLU,
                             {part: tensors[f'{mlp}.{part}_proj.weight'] for part in ('gate', 'up', 'down')}, 64)
            self.assertEqual(len(layers), 16)
            self.assertEqual({layer.problem.reason for layer in layers.values()}, {''})

    @NEEDS_DATA
    def test_every_layer_of_kwt1_by_a_description(self):
        models = harness.scratch_dir()
        (models / 'kwt1').mkdir()
        shutil.copy(resident.SHARED / 'data' / 'kwt1' / 'kwt1_ffn_norm.f32.safetensors', models / 'kwt1')
        (models / 'kwt1' / 'layerd.json').write_text(json.dumps(KWT1))
        tensors = resident.read_safetensors(models / 'kwt1' / 'kwt1_ffn_norm.f32.safetensors')
        with Daemon(f'--models={models}').ready() as daemon:
            stub = daemon.stub()
            for i in range(12):
                of = f'layers.{i}'
                for norm in ('ln1', 'ln2'):
                    self.compare(stub, f'models/kwt1/layers/{of}.{norm}', LAYER_NORM,
                                 {'gamma': tensors[f'{of}.{norm}.weight'], 'beta': tensors[f'{of}.{norm}.bias']}, 64)
                self.compare(stub, f'models/kwt1/layers/{of}.ffn', PLAIN_GELU,
                             {'up': tensors[f'{of}.fc1.weight'], 'up_bias': tensors[f'{of}.fc1.bias'],
                              'down': tensors[f'{of}.fc2.weight'], 'down_bias': tensors[f'{of}.fc2.bias']}, 64)

    def test_uploaded_layers_with_every_option(self):
        random = np.random.default_rng(3)

        def weights(dtype, **shapes):
            return {role: tensor(random.standard_normal(shape) / 4, dtype) for role, shape in shapes.items()}

        gated = dict(form=layer_pb.FEED_FORWARD_FORM_GATED, layout=layer_pb.WEIGHT_LAYOUT_IN_OUT)
        cases = [
            (layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_RMS_NORM, rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA,
                                    gamma_offset=1, group_size=6), weights(BFLOAT16, gamma=(12,), beta=(12,))),
            (layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_LAYER_NORM, epsilon=0,
                                    rounding=layer_pb.NORM_ROUNDING_BEFORE_GAMMA), weights(FLOAT32, gamma=(12,))),
            (layer_pb.FeedForwardSpec(activation=layer_pb.ACTIVATION_QUICK_GELU, gate_max=7, up_limit=7, up_offset=1,
                                      packing=layer_pb.GATE_UP_PACKING_INTERLEAVED, **gated),
             weights(FLOAT16, gate_up=(12, 40), gate_up_bias=(40,), down=(20, 12), down_bias=(12,))),
            (layer_pb.FeedForwardSpec(activation=layer_pb.ACTIVATION_RELU_SQUARED,
                                      inner_norm=layer_pb.InnerNorm(epsilon=1e-5),
                                      packing=layer_pb.GATE_UP_PACKING_SEPARATE, **gated),
             weights(FLOAT32, gate=(12, 20), up=(12, 20), gate_bias=(20,), up_bias=(20,), down=(20, 7),
                     inner_norm_gamma=(20,))),
            (layer_pb.FeedForwardSpec(activation=layer_pb.ACTIVATION_SILU, swish_beta=1.5,
                                      packing=layer_pb.GATE_UP_PACKING_HALVES, **gated),
             weights(BFLOAT16, gate_up=(12, 40), down=(20, 12)))]
        with Daemon(f'--layer_store={harness.scratch_dir()}') as daemon:
            stub, registry = daemon.stub(), resident.registry(daemon)
            for i, (spec, of) in enumerate(cases):
                name = f'models/made/layers/case.{i}'
                layer = resident.upload(registry, name, spec, of)
                self.assertEqual(layer.content_hash, content_hash(spec, of))
                self.compare(stub, name, spec, of, 12)

    def test_residual_verify_and_intermediates_go_with_a_name(self):
        spec, weights = RMS_NORM, {'gamma': tensor(np.linspace(0.5, 2, 8))}
        with Daemon(f'--layer_store={harness.scratch_dir()}') as daemon:
            stub = daemon.stub()
            resident.upload(resident.registry(daemon), 'models/m/layers/n', spec, weights)
            x = tensor(np.arange(16).reshape(2, 8))
            options = {'residual': x, 'verify': True, 'intermediates': True, 'output_dtype': BFLOAT16}
            named = evaluate(stub, by_name('models/m/layers/n', spec, x, **options))
            sent = evaluate(stub, inline(spec, weights, x, **options))
            self.assertTrue(named.report.within_contract)
            self.assertNotEqual(named.layer_hash, '')
            named.ClearField('layer_hash')
            self.assertEqual(named.SerializeToString(deterministic=True), sent.SerializeToString(deterministic=True))


    def test_callers_at_once_get_the_bits_of_each_alone(self):
        """Of a layer large enough to be computed for one batch at a time; one call among them is divided."""
        name, dim, rows = 'models/m/layers/batched', 256, 300
        weights = resident.swiglu_weights(9, dim, 1536, BFLOAT16)
        x = np.random.default_rng(9).standard_normal((rows, dim), np.float32)
        with tempfile.TemporaryDirectory() as store, Daemon(f'--layer_store={store}', '--batch_rows=16') as daemon:
            stub = daemon.stub()
            resident.upload(resident.registry(daemon), name, SWIGLU, weights)
            expected = array_of(evaluate(stub, inline(SWIGLU, weights, tensor(x, FLOAT32))).output)
            for _ in range(3):
                calls = [stub.FeedForward.future(by_name(name, SWIGLU, tensor(x[i:i + 1], FLOAT32)), timeout=60)
                         for i in range(48)]
                whole = stub.FeedForward.future(by_name(name, SWIGLU, tensor(x, FLOAT32)), timeout=60)
                for i, call in enumerate(calls):
                    self.assertEqual(array_of(call.result().output).tobytes(), expected[i:i + 1].tobytes(), i)
                self.assertEqual(array_of(whole.result().output).tobytes(), expected.tobytes())


class Errors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(f'--layer_store={harness.scratch_dir()}')
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.stub = cls.daemon.stub()
        registry = resident.registry(cls.daemon)
        cls.swiglu = resident.swiglu_weights(1, dim=4, hidden=6)
        resident.upload(registry, 'models/m/layers/mlp', SWIGLU, cls.swiglu)
        resident.upload(registry, 'models/m/layers/norm', RMS_NORM, {'gamma': tensor(np.ones(4))})
        cls.x = tensor(np.ones((1, 4)))

    def refused(self, request, code, reason, field):
        method = self.stub.Normalize if isinstance(request, layer_pb.NormalizeRequest) else self.stub.FeedForward
        error = error_of(method, request)
        self.assertEqual((error.code.name, error.reason), (code, reason), error)
        self.assertEqual([violation[0] for violation in error.fields], [field] if field else [], error)
        return error

    def test_missing_and_forbidden_look_the_same(self):
        texts = set()
        for name in ('models/m/layers/none', 'models/none/layers/mlp', 'models/../layers/mlp', 'models/m/layers/..',
                     '/etc/passwd', 'models/m/layers//etc/passwd', 'models/m/layers/%2e%2e', 'models/m/layers/a\0b',
                     'models/m/layers/../../m/layers/mlp', 'models/M/layers/mlp', 'mlp', 'models/m/layers/', '..', '%00'):
            error = self.refused(layer_pb.FeedForwardRequest(input=self.x, layer=name), 'NOT_FOUND', 'LAYER_NOT_FOUND',
                                 'layer')
            self.assertEqual(error.resource[0], 'layer')
            texts.add(error.text.split('"')[0])
        self.assertEqual(len(texts), 1, texts)

    def test_a_name_of_20_kilobytes_gets_an_error_that_arrives(self):
        error = self.refused(layer_pb.FeedForwardRequest(input=self.x, layer='models/m/layers/' + 'é' * 10000),
                             'NOT_FOUND', 'LAYER_NOT_FOUND', 'layer')
        self.assertLess(len(error.text), 400)

    def test_two_sources_of_weights(self):
        weights = layer_pb.FeedForwardWeights(gate=self.swiglu['gate'])
        self.refused(layer_pb.FeedForwardRequest(input=self.x, layer='models/m/layers/mlp', weights=weights),
                     'INVALID_ARGUMENT', 'TWO_SOURCES', 'weights.gate')
        for role in ('gamma', 'beta'):
            self.refused(layer_pb.NormalizeRequest(input=self.x, layer='models/m/layers/norm', **{role: tensor([1.0])}),
                         'INVALID_ARGUMENT', 'TWO_SOURCES', role)

    def test_the_wrong_kind(self):
        self.refused(layer_pb.FeedForwardRequest(input=self.x, layer='models/m/layers/norm'), 'INVALID_ARGUMENT',
                     'WRONG_KIND', 'layer')
        self.refused(layer_pb.NormalizeRequest(input=self.x, layer='models/m/layers/mlp'), 'INVALID_ARGUMENT',
                     'WRONG_KIND', 'layer')

    def test_options_that_contradict_the_layer(self):
        for said, field in (
                (dict(activation=layer_pb.ACTIVATION_GELU), 'activation'), (dict(swish_beta=2), 'swish_beta'),
                (dict(form=layer_pb.FEED_FORWARD_FORM_PLAIN), 'form'), (dict(gate_max=7), 'gate_max'),
                (dict(layout=layer_pb.WEIGHT_LAYOUT_IN_OUT), 'layout'), (dict(up_limit=7), 'up_limit'),
                (dict(packing=layer_pb.GATE_UP_PACKING_HALVES), 'packing'), (dict(up_offset=1), 'up_offset'),
                (dict(inner_norm=layer_pb.InnerNorm()), 'inner_norm')):
            self.refused(layer_pb.FeedForwardRequest(input=self.x, layer='models/m/layers/mlp',
                                                     spec=layer_pb.FeedForwardSpec(**said)),
                         'INVALID_ARGUMENT', 'CONTRADICTS_LAYER', f'spec.{field}')
        for said, field in (
                (dict(kind=layer_pb.NORM_KIND_LAYER_NORM), 'kind'), (dict(epsilon=0), 'epsilon'),
                (dict(rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA), 'rounding'), (dict(gamma_offset=1), 'gamma_offset'),
                (dict(group_size=2), 'group_size'), (dict(normalized_axes=2), 'normalized_axes'),
                (dict(gate_position=layer_pb.GATE_POSITION_LAST), 'gate_position')):
            self.refused(layer_pb.NormalizeRequest(input=self.x, layer='models/m/layers/norm',
                                                   spec=layer_pb.NormalizeSpec(**said)),
                         'INVALID_ARGUMENT', 'CONTRADICTS_LAYER', f'spec.{field}')

    def test_options_that_agree_are_taken(self):
        self.stub.FeedForward(layer_pb.FeedForwardRequest(input=self.x, layer='models/m/layers/mlp', spec=SWIGLU),
                              timeout=60)
        self.stub.Normalize(layer_pb.NormalizeRequest(input=self.x, layer='models/m/layers/norm', spec=RMS_NORM),
                            timeout=60)

    def test_an_input_that_does_not_fit_the_layer(self):
        wide = tensor(np.ones((1, 5)))
        self.refused(layer_pb.NormalizeRequest(input=wide, layer='models/m/layers/norm'), 'INVALID_ARGUMENT',
                     'SHAPE_MISMATCH', 'input.shape')
        self.refused(layer_pb.FeedForwardRequest(input=wide, layer='models/m/layers/mlp'), 'INVALID_ARGUMENT',
                     'SHAPE_MISMATCH', 'input.shape')

    def test_a_server_without_layers(self):
        with Daemon() as daemon:
            error = error_of(daemon.stub().Normalize, layer_pb.NormalizeRequest(input=self.x, layer='models/m/layers/n'))
            self.assertEqual((error.code.name, error.reason), ('NOT_FOUND', 'LAYER_NOT_FOUND'))
            registry = resident.registry(daemon)
            self.assertEqual(len(registry.ListLayers(registry_pb.ListLayersRequest()).layers), 0)
            error = error_of(registry.CreateLayer, resident.messages('models/m/layers/n', SWIGLU,
                                                                     resident.safetensors(self.swiglu)))
            self.assertEqual((error.code.name, error.reason), ('FAILED_PRECONDITION', 'NO_LAYER_STORE'))


if __name__ == '__main__':
    unittest.main()
