"""Real models through the daemon, by grpcio and by layerctl, against exact results in float64: stories260K (RMSNorm
and SwiGLU, in float32 and bfloat16) and KWT-1 (LayerNorm and a biased GELU layer); and layers made from a seed.
"""
import json
import sys
import unittest

import numpy as np

import golden_math
import harness
from golden_math import Norm, activation, ulp
from golden_support import FFN_TOLERANCE, SHARED, GoldenTest, needs, typed
from golden_support import setUpModule, tearDownModule  # noqa: F401
from harness import BFLOAT16, FLOAT32, array_of, layer_pb

sys.path.insert(0, str(harness.SOURCE_DIR / 'examples' / 'python'))
from model_files import read_safetensors  # noqa: E402

STORIES, KWT = SHARED / 'data' / 'stories260k', SHARED / 'data' / 'kwt1'
ACTIVATIONS, KWT_ACTIVATIONS = (folder / 'activations.safetensors' for folder in (STORIES, KWT))
KWT_EPSILON = 9.999999974752427e-07


def widened(bits):
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@needs(STORIES)
class Stories260KTest(GoldenTest):

    @classmethod
    def setUpClass(cls):
        cls.data = read_safetensors(ACTIVATIONS)
        cls.files = {FLOAT32: STORIES / 'stories260k.f32.safetensors',
                     BFLOAT16: STORIES / 'stories260k.bf16.safetensors'}
        cls.weights = {FLOAT32: read_safetensors(cls.files[FLOAT32]),
                       BFLOAT16: {k: widened(v) for k, v in read_safetensors(cls.files[BFLOAT16]).items()}}

    def norm(self, x, prefix, dtype=FLOAT32):
        """With float32 output, and nothing rounded before it."""
        return self.normalize('rms_norm', x, dtype, self.weights[dtype][f'{prefix}.weight'], output_dtype=FLOAT32,
                              rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA, epsilon=1e-5)

    def mlp(self, x, layer, dtype=FLOAT32, weight_dtype=FLOAT32, act='silu', **options):
        weights = {part: self.weights[weight_dtype][f'model.layers.{layer}.mlp.{part}_proj.weight']
                   for part in ('gate', 'up', 'down')}
        answer = self.ffn(x, weights, act, dtype=dtype, weight_dtype=weight_dtype, output_dtype=FLOAT32, verify=True,
                          **options)
        self.assertTrue(answer.report.within_contract, answer.report)
        self.assertEqual([stage.stage for stage in answer.report.stages], ['gate', 'up', 'hidden', 'output'])
        return answer

    def test_covers_the_file(self):
        """Every expectation of the file is one of those below."""
        gates = ('geglu_erf', 'geglu_tanh', 'reglu', 'glu', 'bilinear')
        block = ('post_attention_layernorm.out', 'mlp.out', 'mlp.out_from_block', 'ffn_block_out')
        self.assertEqual({name for name, array in self.data.items() if array.dtype == np.float64},
                         {f'{set_}layers.{n}.{name}' for set_ in ('', 'bf16.') for n in range(5) for name in block} |
                         {f'layers.{n}.{name}' for n in range(5) for name in ('input_layernorm.out',
                                                                              'mlp.hidden_from_block')} |
                         {f'layers.2.mlp.out.{gate}' for gate in gates} | {'norm.out', 'logits'})

    def norm_cases(self):
        """Input, the norm's name in the checkpoint, the exact result's name."""
        cases = [(f'layers.{n}.{block}_in', f'model.layers.{n}.{norm}', f'layers.{n}.{norm}.out') for n in range(5)
                 for block, norm in (('attn_block', 'input_layernorm'), ('ffn_block', 'post_attention_layernorm'))]
        cases.append(('norm.in', 'model.norm', 'norm.out'))
        self.assertEqual(len(cases), 11)
        return cases

    def test_norms(self):
        for x, prefix, out in self.norm_cases():
            exact = self.data[out]
            self.assertEqual((exact.dtype, exact.shape), (np.float64, (28, 64)))
            got = self.norm(self.data[x], prefix)
            self.judge('stories260K norms', got, exact, 0.501 * ulp(exact))
            self.same_bits(self.ctl_file('normalize', '--weights', self.files[FLOAT32], '--prefix', prefix,
                                         '--input', f'{ACTIVATIONS}:{x}'), got)
        logits = got.astype(np.float64) @ self.weights[FLOAT32]['model.embed_tokens.weight'].T.astype(np.float64)
        self.judge('stories260K logits', logits, self.data['logits'], 1e-5)

    def test_feed_forward(self):
        for n in range(5):
            got = array_of(self.mlp(self.data[f'layers.{n}.mlp.in'], n).output)
            self.judge('stories260K mlp', got, self.data[f'layers.{n}.mlp.out'], FFN_TOLERANCE)
            answer = self.ctl('feedforward', '--weights', self.files[FLOAT32], '--prefix', f'model.layers.{n}.mlp',
                              '--input', f'{ACTIVATIONS}:layers.{n}.mlp.in', '--verify')
            self.same_bits(answer['output'], got)
            self.assertIs(answer['report']['within_contract'], True)

    def test_block(self):
        for n in range(5):
            x = self.data[f'layers.{n}.ffn_block_in']
            answer = self.mlp(self.norm(x, f'model.layers.{n}.post_attention_layernorm'), n, intermediates=True)
            self.judge('stories260K block: hidden', array_of(answer.intermediates.hidden),
                       self.data[f'layers.{n}.mlp.hidden_from_block'], FFN_TOLERANCE)
            out = array_of(answer.output)
            self.judge('stories260K block: mlp', out, self.data[f'layers.{n}.mlp.out_from_block'], FFN_TOLERANCE)
            self.judge('stories260K block: x + mlp', x + out, self.data[f'layers.{n}.ffn_block_out'], FFN_TOLERANCE)

    def test_other_gates(self):
        gates = {'geglu_erf': 'gelu', 'geglu_tanh': 'gelu_tanh', 'reglu': 'relu', 'glu': 'sigmoid',
                 'bilinear': 'identity'}
        for gate, act in gates.items():
            got = array_of(self.mlp(self.data['layers.2.mlp.in'], 2, act=act).output)
            self.judge('stories260K mlp, 5 other gates', got, self.data[f'layers.2.mlp.out.{gate}'], FFN_TOLERANCE)
            self.same_bits(self.ctl_file('feedforward', '--weights', self.files[FLOAT32], '--activation', act,
                                         '--prefix', 'model.layers.2.mlp',
                                         '--input', f'{ACTIVATIONS}:layers.2.mlp.in'), got)

    def test_bfloat16(self):
        for n in range(5):
            block_in, mlp_in = (widened(self.data[f'bf16.layers.{n}.{name}']) for name in ('ffn_block_in', 'mlp.in'))
            exact = {name: self.data[f'bf16.layers.{n}.{name}'] for name in (
                'post_attention_layernorm.out', 'mlp.out', 'mlp.out_from_block', 'ffn_block_out')}
            prefix = f'model.layers.{n}.post_attention_layernorm'
            normed = self.norm(block_in, prefix, BFLOAT16)
            norm_exact = exact['post_attention_layernorm.out']
            self.judge('stories260K bf16 norms', normed, norm_exact, 0.501 * ulp(norm_exact))
            self.same_bits(self.ctl_file('normalize', '--weights', self.files[BFLOAT16], '--prefix', prefix,
                                         '--rounding', 'after_gamma', '--output-dtype', 'float32',
                                         '--input', f'{ACTIVATIONS}:bf16.layers.{n}.ffn_block_in'), normed)

            out = array_of(self.mlp(mlp_in, n, BFLOAT16, BFLOAT16).output)
            self.judge('stories260K bf16 mlp', out, exact['mlp.out'], FFN_TOLERANCE)
            self.same_bits(self.ctl_file('feedforward', '--weights', self.files[BFLOAT16],
                                         '--prefix', f'model.layers.{n}.mlp', '--output-dtype', 'float32',
                                         '--input', f'{ACTIVATIONS}:bf16.layers.{n}.mlp.in'), out)
            # N4: the bits of a float32 layer with the same values.
            weights = {part: self.weights[BFLOAT16][f'model.layers.{n}.mlp.{part}_proj.weight']
                       for part in ('gate', 'up', 'down')}
            self.same_bits(array_of(self.ffn(mlp_in, weights, 'silu').output), out)

            from_block = array_of(self.mlp(normed, n, FLOAT32, BFLOAT16).output)
            self.judge('stories260K bf16 block: mlp', from_block, exact['mlp.out_from_block'], FFN_TOLERANCE)
            self.judge('stories260K bf16 block: x + mlp', block_in.astype(np.float64) + from_block,
                       exact['ffn_block_out'], FFN_TOLERANCE)

    def test_three_rows_typed(self):
        rows = json.loads((STORIES / 'layer0_3rows.json').read_text())
        self.assertEqual(np.shape(rows['x']), (3, 64))
        file = self.files[FLOAT32]
        normed = self.ctl('normalize', '--weights', file, '--prefix', 'model.layers.0.post_attention_layernorm',
                          '--eps', repr(rows['eps']), '--input', typed(rows['x']))['output']
        self.judge('layer0_3rows.json: norm', normed, rows['norm'], 0.501 * ulp(rows['norm']))
        out = self.ctl('feedforward', '--weights', file, '--prefix', 'model.layers.0.mlp', '--activation', 'silu',
                       '--input', typed(normed))['output']
        self.judge('layer0_3rows.json: ffn', out, rows['ffn'], FFN_TOLERANCE)
        self.judge('layer0_3rows.json: block', np.asarray(rows['x']) + out, rows['block'], FFN_TOLERANCE)

    def test_experts_by_the_published_choice(self):
        """Mixtral's names; the routing is the file's, since it is no layer of the service."""
        file = STORIES / 'moe5_cases.safetensors'
        cases = read_safetensors(file)
        weights = STORIES / 'moe5_from_layers.f32.safetensors'
        outputs = [self.ctl_file('feedforward', '--weights', weights, '--activation', 'silu', '--input', f'{file}:x',
                                 '--prefix', f'model.layers.0.block_sparse_moe.experts.{e}') for e in range(5)]
        experts = np.stack(outputs, axis=1).astype(np.float64)
        choices = [name.removesuffix('.out') for name in cases if name.endswith('.out')]
        self.assertEqual(len(choices), 6)
        for choice in choices:
            chosen = np.take_along_axis(experts, cases[f'{choice}.expert_index'][:, :, None], axis=1)
            out = (chosen * cases[f'{choice}.expert_weight'][:, :, None]).sum(axis=1)
            self.judge('5 experts, summed here', out, cases[f'{choice}.out'], FFN_TOLERANCE)


@needs(KWT)
class KeywordTransformerTest(GoldenTest):

    @classmethod
    def setUpClass(cls):
        cls.data, cls.file = read_safetensors(KWT_ACTIVATIONS), KWT / 'kwt1_ffn_norm.f32.safetensors'
        cls.weights = read_safetensors(cls.file)
        cls.places = [(word, layer) for word in ('yes', 'stop') for layer in (0, 5, 11)]

    def test_covers_the_file(self):
        self.assertEqual({'.'.join(name.split('.')[:3]) for name in self.data},
                         {f'{word}.layers.{layer}' for word, layer in self.places})

    def test_layer_norms(self):
        for word, layer in self.places:
            for ln in ('ln1', 'ln2'):
                x, exact = self.data[f'{word}.layers.{layer}.{ln}.in'], self.data[f'{word}.layers.{layer}.{ln}.out']
                gamma, beta = (self.weights[f'layers.{layer}.{ln}.{part}'] for part in ('weight', 'bias'))
                got = self.normalize('layer_norm', x, gamma=gamma, beta=beta, epsilon=KWT_EPSILON)
                self.judge('KWT-1 layer norms', got, exact, Norm('layer_norm', x, gamma, beta, KWT_EPSILON).bound())
                self.same_bits(self.ctl_file('normalize', '--weights', self.file, '--prefix', f'layers.{layer}.{ln}',
                                             '--eps', repr(KWT_EPSILON), '--kind', 'layer_norm', '--input',
                                             f'{KWT_ACTIVATIONS}:{word}.layers.{layer}.{ln}.in'), got)

    def test_feed_forward(self):
        for word, layer in self.places:
            place = f'{word}.layers.{layer}'
            fc1, fc1_bias, fc2, fc2_bias = (self.weights[f'layers.{layer}.{name}'] for name in (
                'fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias'))
            weights = {'up': fc1, 'up_bias': fc1_bias, 'down': fc2, 'down_bias': fc2_bias}
            for act, name in (('gelu_tanh', 'fc.out'), ('gelu', 'fc.out.gelu_erf')):
                answer = self.ffn(self.data[f'{place}.fc.in'], weights, act, form='plain', verify=True,
                                  intermediates=True)
                self.assertTrue(answer.report.within_contract, answer.report)
                got = array_of(answer.output)
                self.judge(f'KWT-1 {name}', got, self.data[f'{place}.{name}'], FFN_TOLERANCE)
                self.judge('KWT-1 fc1.pre', array_of(answer.intermediates.up), self.data[f'{place}.fc1.pre'],
                           FFN_TOLERANCE)
                self.same_bits(self.ctl_file('feedforward', '--weights', self.file, '--prefix', f'layers.{layer}',
                                             '--activation', act, '--input',
                                             f'{KWT_ACTIVATIONS}:{place}.fc.in'), got)


class SeededTest(GoldenTest):
    """layerctl --seed against golden_math.seeded(): the comment in lib/layers/seeded.h suffices to make them anew."""
    ROWS, DIM, HIDDEN = 4, 64, 172

    def ask(self, command, seed, *options):
        return self.ctl(command, '--seed', str(seed), '--rows', str(self.ROWS), '--dim', str(self.DIM), *options)

    def make(self, seed, name, dtype=FLOAT32):
        d, h = self.DIM, self.HIDDEN
        shape, scale, offset = {
            'input': ((self.ROWS, d), 3**0.5, 0), 'gamma': ((d,), 0.1, 1), 'beta': ((d,), 0.1, 0),
            'gate': ((h, d), (3 / d)**0.5, 0), 'up': ((h, d), (3 / d)**0.5, 0), 'down': ((d, h), (3 / h)**0.5, 0),
            'gate_up': ((2 * h, d), (3 / d)**0.5, 0), 'gate_up_bias': ((2 * h,), 0.1, 0),
            'gate_bias': ((h,), 0.1, 0), 'up_bias': ((h,), 0.1, 0), 'down_bias': ((d,), 0.1, 0)}[name]
        return harness.round_to(dtype, golden_math.seeded(seed, name, shape, scale, offset))

    def weights_of(self, name, seed, dtype, packed, suffix=''):
        """Matrix or bias `name`, from gate and up packed together where they are."""
        if packed is None:
            return self.make(seed, name + suffix, dtype)
        both, i = self.make(seed, 'gate_up' + suffix, dtype), ('gate', 'up').index(name)
        return np.split(both, 2)[i] if packed == 'halves' else both[i::2]

    def check(self, family, answer, seed, biases=False, dtype=FLOAT32, packed=None, act='silu'):
        """float64 on weights made here: products by N4, the end to FFN_TOLERANCE."""
        x, down = (self.make(seed, name, dtype).astype(np.float64) for name in ('input', 'down'))
        weights = {name: self.weights_of(name, seed, dtype, packed) for name in ('gate', 'up') if name in answer}
        biases_of = {name: self.weights_of(name, seed, dtype, packed, '_bias') for name in weights if biases}
        stages = {}
        for name, weight in weights.items():
            bias = biases_of[name].astype(np.float64) if biases else 0
            stages[name] = x @ weight.T.astype(np.float64) + bias
            self.judge(f'seeded {family}: {name}', answer[name], stages[name],
                       golden_math.product_bound(x, weight) + (ulp(stages[name]) if biases else 0))
        hidden = activation(act, stages['gate']) * stages['up'] if 'gate' in stages else activation(act, stages['up'])
        out = hidden @ down.T + (self.make(seed, 'down_bias', dtype) if biases else 0)
        self.judge(f'seeded {family}: output', answer['output'], out, FFN_TOLERANCE)

    def test_feed_forward(self):
        hidden = ('--hidden', str(self.HIDDEN))
        self.assertEqual(self.ask('feedforward', 1, *hidden)['output'].shape, (4, 64))
        for seed in (1, 0, 2**64 - 1):
            self.check('SwiGLU', self.ask('feedforward', seed, *hidden, '--intermediates'), seed)
        self.check('SwiGLU, biases', self.ask('feedforward', 1, *hidden, '--biases', '--intermediates'), 1, biases=True)
        for packing in ('halves', 'interleaved'):
            self.check(f'SwiGLU, {packing}', self.ask('feedforward', 1, *hidden, '--packing', packing, '--biases',
                                                      '--intermediates'), 1, biases=True, packed=packing)
        self.check('ReLU', self.ask('feedforward', 1, *hidden, '--form', 'plain', '--activation', 'relu', '--biases',
                                    '--intermediates'), 1, biases=True, act='relu')
        self.check('bfloat16', self.ask('feedforward', 1, *hidden, '--dtype', 'bfloat16', '--output-dtype', 'float32',
                                        '--intermediates'), 1, dtype=BFLOAT16)

    def test_norms(self):
        for kind, names in (('rms_norm', ['gamma']), ('layer_norm', ['gamma', 'beta'])):
            got = self.ask('normalize', 1, '--kind', kind)['output']
            exact = Norm(kind, self.make(1, 'input'), *(self.make(1, name) for name in names),
                         epsilon={'rms_norm': 1e-6, 'layer_norm': 1e-5}[kind])
            self.judge('seeded norms', got, exact.output, exact.bound())

    def test_to_the_bit(self):
        """An identity layer shows the input, and unit vectors show the columns of gate and up."""
        answer = self.ctl('feedforward', '--seed', '7', '--rows', '1000', '--dim', '1', '--form', 'plain',
                          '--activation', 'identity', '--layout', 'out_in', '--up', '[[1]]', '--down', '[[1]]')
        self.same_bits(answer['output'], golden_math.seeded(7, 'input', (1000, 1), 3**0.5))
        answer = self.ctl('feedforward', '--seed', '7', '--input', typed(np.eye(8)), '--hidden', '5', '--intermediates')
        for name in ('gate', 'up'):
            self.same_bits(answer[name], golden_math.seeded(7, name, (5, 8), (3 / 8)**0.5).T.copy())


if __name__ == '__main__':
    unittest.main()
