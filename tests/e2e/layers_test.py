"""layerctl layers, and calls by name, against the real daemon: what it prints, its files and its exit statuses."""
import json
import re
import unittest

import numpy as np

import resident
from harness import Daemon, layer_pb, layerctl, scratch_dir, tensor
from layers_support import MLP, NORM, LayersTest, role_weights
from models_test import tensors_of, wait_for, write_model
from resident import RMS_NORM, SWIGLU, content_hash, registry_pb

HASH = r'[0-9a-f]{64}'


class Showing(LayersTest):
    def test_list_for_people_and_as_json(self):
        self.run_ok('layers', 'upload', 'models/u/layers/half', '--seed', '1', '--dim', '16', '--hidden', '8', '--dtype',
                    'bfloat16')
        lines = self.run_ok('layers', 'list').splitlines()
        self.assertEqual(re.split('  +', lines[0]), ['name', 'kind', 'dim', 'hidden', 'dtype', 'size', 'state'])
        rows = [re.split('  +', line) for line in lines[1:]]
        listed = self.registry.ListLayers(registry_pb.ListLayersRequest()).layers
        self.assertEqual([row[0] for row in rows], [layer.name for layer in listed])
        self.assertEqual(rows[-1], ['models/u/layers/half', 'gated silu', '16', '8', 'bfloat16', '768 B', 'usable'])
        self.assertIn([NORM, 'rms_norm', '16', '-', 'float32', '64 B'], [row[:6] for row in rows])
        names = [layer['name'] for layer in self.ask('layers', 'list')['layers']]
        self.assertEqual(names, [row[0] for row in rows])

    def test_list_by_model_and_filter(self):
        self.run_ok('layers', 'upload', 'models/u/layers/half', '--seed', '1', '--dim', '16', '--hidden', '8')
        for args, names in ((('--model', 'u'), ['models/u/layers/half']), (('--model', 'nobody'), []),
                            (('--filter', 'kind:normalize'), [NORM]),
                            (('--filter', 'source:upload *a*'), ['models/u/layers/half']),
                            (('--model', 'm', '--filter', '*.1.mlp'), ['models/m/layers/model.layers.1.mlp'])):
            self.assertEqual([layer['name'] for layer in self.ask('layers', 'list', *args)['layers']], names, args)
        self.failed(4, 'layers', 'list', '--filter', 'kind:other', texts=['INVALID_ARGUMENT', 'filter'])
        self.failed(4, 'layers', 'list', '--model', 'a/b', texts=['INVALID_ARGUMENT', 'parent'])

    def test_describe_tells_what_was_inferred_and_from_what(self):
        described = self.ask('layers', 'describe', MLP)
        message = self.get(MLP)
        self.assertEqual(described['feed_forward'], {'form': 'gated', 'activation': 'silu', 'packing': 'separate',
                                                     'layout': 'out_in'})
        self.assertEqual([(w['role'], w['dtype'], w['shape'], w['tensor']) for w in described['weights']],
                         [(w.role, 'float32', list(w.shape), w.tensor) for w in message.weights])
        for field in ('name', 'dim', 'hidden_dim', 'out_dim', 'parameters', 'weight_bytes', 'prepared', 'pinned'):
            self.assertEqual(described[field], getattr(message, field), field)
        self.assertEqual(described['source'], 'checkpoint')
        self.assertNotIn('etag', described)
        self.assertEqual([(i['option'], i['value'], i['source']) for i in described['inferences']],
                         [(i.option, i.value, i.source) for i in message.inferences])
        text = self.run_ok('layers', 'describe', MLP)
        self.assertTrue(text.startswith(MLP + '\n'))
        for inference in message.inferences:
            self.assertRegex(text, rf'\n  {inference.option} +{inference.value} +{re.escape(inference.source)}\n')
        self.assertRegex(text, r'gate +float32 +\[40, 16\] +model\.layers\.0\.mlp\.gate_proj\.weight')

    def test_describe_an_upload(self):
        uploaded = self.ask('layers', 'upload', 'models/u/layers/n', '--seed', '2', '--dim', '8', '--kind', 'layer_norm',
                            '--rounding', 'after_gamma', '--dtype', 'float16')
        described = self.ask('layers', 'describe', 'models/u/layers/n')
        self.assertEqual(described, uploaded)
        message = self.get('models/u/layers/n')
        self.assertEqual((described['content_hash'], described['etag'], described['sha256']),
                         (message.content_hash, message.etag, message.sha256))
        self.assertEqual(described['normalize'], {'kind': 'layer_norm', 'epsilon': 1e-5, 'rounding': 'after_gamma'})
        self.assertEqual(described['create_time'][:19], message.create_time.ToJsonString()[:19])
        self.assertIn(message.content_hash, self.run_ok('layers', 'describe', 'models/u/layers/n'))

    def test_a_layer_that_cannot_be_used_says_why(self):
        models = scratch_dir()
        named = tensors_of(1)
        named['model.layers.0.mlp.down_proj.weight'] = tensor(np.zeros((16, 39)))
        write_model(models / 'm', named)
        with Daemon(f'--models={models}', f'--layer_store={scratch_dir()}').ready() as daemon:
            wait_for(lambda: 'model_read' in daemon.log())
            described = self.ask('layers', 'describe', MLP, server=daemon)
            self.assertIn('down_proj', described['problem']['message'])
            self.assertNotIn('weights', described)
            reason = described['problem']['reason']
            self.assertIn(f'unusable: {reason}', self.run_ok('layers', 'list', server=daemon))
            self.assertRegex(self.run_ok('layers', 'describe', MLP, server=daemon), r'\n  problem +.*down_proj')
            for command in (('layers', 'verify', MLP), ('feedforward', '--layer', MLP, '--seed', '1'),
                            ('layers', 'download', MLP, '--out', self.folder / 'x.safetensors')):
                self.failed(4, *command, server=daemon, texts=['FAILED_PRECONDITION', 'down_proj'])
            self.assertEqual(list(self.folder.iterdir()), [])
            # What can be used of it can be uploaded.
            result = layerctl('layers', 'upload', 'models/u', '--from', models / 'm', server=daemon)
            self.assertEqual(result.status, 0, result)
            self.assertRegex(result.stdout, rf'^models/u/layers/model\.norm  {HASH}\n$')
            self.assertRegex(result.stderr, r'^layerctl: skipped models/u/layers/model\.layers\.0\.mlp: .*down_proj.*\n$')


class Uploading(LayersTest):
    NAME = 'models/u/layers/mlp'

    def upload(self, *args):
        return self.ask('layers', 'upload', self.NAME, *args)['content_hash']

    def test_a_layer_of_a_checkpoint(self):
        prefix = ('--prefix', 'model.layers.0.mlp')
        for path in (self.checkpoint, self.models / 'm'):
            self.assertEqual(self.upload('--weights', path, *prefix), self.hash)
        # A file alone does not tell the activation.
        (self.folder / 'm.safetensors').write_bytes(self.checkpoint.read_bytes())
        self.failed(2, 'layers', 'upload', self.NAME, '--weights', self.folder / 'm.safetensors', *prefix,
                    texts=['activation'])
        self.assertEqual(self.upload('--weights', self.folder / 'm.safetensors', *prefix, '--activation', 'silu'),
                         self.hash)

    def test_options_go_over_what_was_inferred(self):
        spec = layer_pb.FeedForwardSpec()
        spec.CopyFrom(SWIGLU)
        spec.gate_max, spec.up_offset, spec.inner_norm.epsilon = 7, 1, 1e-3
        self.assertEqual(self.upload('--weights', self.checkpoint, '--prefix', 'model.layers.0.mlp', '--gate-max', '7',
                                     '--up-offset', '1', '--inner-norm-eps', '1e-3'),
                         content_hash(spec, role_weights(self.tensors)))
        norm = layer_pb.NormalizeSpec()
        norm.CopyFrom(RMS_NORM)
        norm.epsilon, norm.gamma_offset, norm.group_size = 0, 1, 4
        self.assertEqual(self.ask('layers', 'upload', 'models/u/layers/n', '--weights', self.checkpoint, '--prefix',
                                  'model.norm', '--eps', '0', '--gamma-offset', '1', '--group-size', '4')['content_hash'],
                         content_hash(norm, {'gamma': self.tensors['model.norm.weight']}))

    def test_chunks_of_any_size(self):
        for args in ((), ('--chunk-bytes', '1'), ('--chunk-bytes', '4097'), ('--chunk-kib', '1'),
                     ('--chunk-kib', '65536')):
            self.assertEqual(self.upload('--weights', self.checkpoint, '--prefix', 'model.layers.0.mlp', *args),
                             self.hash, args)
            self.run_ok('layers', 'delete', self.NAME)

    def test_a_layer_is_replaced_by_its_etag_only(self):
        seeded = ('--dim', '8', '--hidden', '4', '--seed')
        first = self.upload(*seeded, '1')
        self.assertEqual(self.upload(*seeded, '1'), first, 'the same again is no error')
        self.failed(4, 'layers', 'upload', self.NAME, *seeded, '2', texts=['ALREADY_EXISTS', self.NAME])
        self.failed(4, 'layers', 'upload', self.NAME, *seeded, '2', '--etag', '0' * 64, texts=['ABORTED'])
        second = self.upload(*seeded, '2', '--etag', first)
        self.assertNotEqual(second, first)
        self.assertEqual(self.get(self.NAME).content_hash, second)
        self.failed(4, 'layers', 'delete', self.NAME, '--etag', first, texts=['ABORTED'])
        self.assertEqual(self.run_ok('layers', 'delete', self.NAME, '--etag', second), f'deleted {self.NAME}\n')
        self.failed(4, 'layers', 'delete', self.NAME, texts=['NOT_FOUND'])

    def test_a_whole_checkpoint(self):
        names = [f'models/u/layers/{layer}' for layer in ('model.layers.0.mlp', 'model.layers.1.mlp', 'model.norm')]
        text = self.run_ok('layers', 'upload', 'models/u', '--from', self.models / 'm')
        self.assertEqual([line.split('  ')[0] for line in text.splitlines()], names)
        self.assertEqual(text.splitlines()[0].split('  ')[1], self.hash)
        self.assertEqual(self.get(names[2]).content_hash,
                         content_hash(RMS_NORM, {'gamma': self.tensors['model.norm.weight']}))
        self.run_ok('layers', 'delete', names[0])
        again = self.ask('layers', 'upload', 'models/u', '--from', self.models / 'm')
        self.assertEqual(([layer['name'] for layer in again['layers']], again['skipped'], again['failed']), (names, [], []))

    def test_a_checkpoint_of_which_a_layer_is_refused(self):
        self.run_ok('layers', 'upload', 'models/u/layers/model.layers.0.mlp', '--seed', '1', '--dim', '4', '--hidden', '4')
        result = layerctl('--json', 'layers', 'upload', 'models/u', '--from', self.models / 'm', server=self.daemon)
        self.assertEqual(result.status, 4, result)
        self.assertIn('ALREADY_EXISTS', result.stderr)
        answer = json.loads(result.stdout)
        self.assertEqual([layer['name'] for layer in answer['failed']], ['models/u/layers/model.layers.0.mlp'])
        self.assertEqual(answer['failed'][0]['reason'], 'LAYER_EXISTS')
        self.assertEqual(len(answer['layers']), 2, 'the others are uploaded all the same')
        # Without a connection there is no point in going on.
        result = layerctl('layers', 'upload', 'models/u', '--from', self.models / 'm', server='127.0.0.1:1')
        self.assertEqual((result.status, result.stderr.count('UNAVAILABLE')), (3, 1), result)

    def test_what_does_not_fit_the_store_is_refused(self):
        large = ('--seed', '1', '--dim', '2048', '--hidden', '1024')  # 24 MiB
        self.failed(4, 'layers', 'upload', self.NAME, *large, texts=['RESOURCE_EXHAUSTED', '--layer_store_mib'])
        self.failed(4, 'layers', 'upload', MLP, '--seed', '1', '--dim', '4', '--hidden', '4',
                    texts=['FAILED_PRECONDITION', 'models/m'])
        with Daemon() as daemon:
            self.failed(4, 'layers', 'upload', self.NAME, '--seed', '1', '--dim', '4', '--hidden', '4', server=daemon,
                        texts=['FAILED_PRECONDITION', '--layer_store'])

    def test_bad_names_are_the_servers_to_refuse(self):
        for name in ('x', '', 'models/u', 'models/../layers/x', 'models/u/layers/.x', 'models/u/layers/a%2eb',
                     '/models/u/layers/x', 'models/u/layers/' + 'x' * 200):
            self.failed(4, 'layers', 'upload', name, '--seed', '1', '--dim', '4', '--hidden', '4',
                        texts=['INVALID_ARGUMENT', 'name'])
            for command in ('describe', 'verify', 'delete'):
                self.failed(4, 'layers', command, name, texts=['name'])


class Downloading(LayersTest):
    def test_the_file_has_the_layer_and_can_be_uploaded(self):
        file = self.folder / 'mlp.safetensors'
        for name in (MLP, NORM):
            self.run_ok('layers', 'download', name, '--out', file)
            header, hash_, _ = resident.download(self.registry, name)
            weights = resident.read_safetensors(file)
            spec = header.normalize if name == NORM else header.feed_forward
            self.assertEqual(content_hash(spec, weights), hash_)
            uploaded = self.ask('layers', 'upload', 'models/u/layers/' + name[-3:], '--weights', file)
            self.assertEqual(uploaded['content_hash'], hash_)
        answer = self.ask('layers', 'download', MLP, '--out', file)
        self.assertEqual(answer, {'name': MLP, 'content_hash': self.hash, 'file': str(file)})
        self.assertEqual([path.name for path in self.folder.iterdir()], ['mlp.safetensors'], 'nothing else is left')
        # The file is a layer for every command that takes one.
        by_file = self.ask('feedforward', '--weights', file, '--seed', '1', '--dim', '16')
        by_name = self.ask('feedforward', '--layer', MLP, '--seed', '1', '--dim', '16')
        self.assertEqual(by_file['output'], by_name['output'])
        self.assertIn('within the contract', self.run_ok('check', 'feedforward', '--weights', file, '--seed', '1', '--dim',
                                                         '16'))

    def test_options_survive_the_file(self):
        self.run_ok('layers', 'upload', 'models/u/layers/x', '--seed', '3', '--dim', '6', '--hidden', '10', '--biases',
                    '--dtype', 'bfloat16', '--packing', 'interleaved', '--layout', 'in_out', '--swish-beta', '1.702',
                    '--gate-max', '7', '--up-limit', '7', '--up-offset', '1', '--inner-norm-eps', '1e-7')
        self.run_ok('layers', 'download', 'models/u/layers/x', '--out', self.folder / 'x.safetensors')
        again = self.ask('layers', 'upload', 'models/u/layers/y', '--weights', self.folder / 'x.safetensors')
        self.assertEqual(again['content_hash'], self.get('models/u/layers/x').content_hash)

    def test_a_file_that_cannot_be_written(self):
        self.failed(2, 'layers', 'download', MLP, texts=['--out'])
        self.failed(2, 'layers', 'download', MLP, '--out', self.folder / 'none' / 'x.safetensors', texts=['x.safetensors'])
        self.failed(4, 'layers', 'download', 'models/m/layers/none', '--out', self.folder / 'x.safetensors', texts=['NOT_FOUND'])
        self.assertEqual(list(self.folder.iterdir()), [])


class CallsByName(LayersTest):
    def test_the_same_bits_as_with_the_layer_in_the_call(self):
        for command, name, prefix in (('feedforward', MLP, 'model.layers.0.mlp'), ('normalize', NORM, 'model.norm')):
            for dtype in ('float32', 'bfloat16'):
                rows = ('--seed', '5', '--dim', '16', '--rows', '3', '--dtype', dtype)
                named = self.ask(command, '--layer', name, *rows, '--intermediates', '--verify')
                sent = self.ask(command, '--weights', self.models / 'm', '--prefix', prefix, *rows, '--intermediates',
                                '--verify')
                self.assertEqual(named.pop('layer_hash'), self.get(name).content_hash)
                self.assertEqual(named, sent)
        self.assertEqual(self.get(MLP).content_hash, self.hash)
        self.assertIn(f'layer_hash  {self.hash}\n', self.run_ok('feedforward', '--layer', MLP, '--seed', '1'))

    def test_the_width_of_a_seeded_input_is_the_layers(self):
        self.assertEqual(self.ask('normalize', '--layer', NORM, '--seed', '1', '--rows', '2')['output']['shape'], [2, 16])
        self.failed(4, 'normalize', '--layer', 'models/m/layers/none', '--seed', '1', texts=['NOT_FOUND'])
        self.failed(2, 'normalize', '--layer', NORM, texts=['--input'])

    def test_what_is_said_must_be_the_layers(self):
        x = ('--seed', '1')
        self.run_ok('feedforward', '--layer', MLP, *x, '--form', 'gated', '--activation', 'silu', '--packing', 'separate',
                    '--layout', 'out_in')
        self.run_ok('normalize', '--layer', NORM, *x, '--kind', 'rms_norm', '--eps', '1e-5', '--rounding', 'before_gamma')
        for command, name, said, field in (('feedforward', MLP, ('--activation', 'gelu'), 'spec.activation'),
                                           ('feedforward', MLP, ('--gate-max', '7'), 'spec.gate_max'),
                                           ('feedforward', MLP, ('--inner-norm',), 'spec.inner_norm'),
                                           ('normalize', NORM, ('--kind', 'layer_norm'), 'spec.kind'),
                                           ('normalize', NORM, ('--eps', '0'), 'spec.epsilon'),
                                           ('normalize', NORM, ('--gamma-offset', '1'), 'spec.gamma_offset')):
            self.failed(4, command, '--layer', name, *x, *said, texts=['INVALID_ARGUMENT', field])
        self.failed(4, 'normalize', '--layer', MLP, *x, texts=['INVALID_ARGUMENT', 'layer'])
        self.failed(4, 'feedforward', '--layer', NORM, *x, texts=['INVALID_ARGUMENT', 'layer'])

    def test_residual_and_gate_are_inputs(self):
        x = json.dumps(np.linspace(-1, 1, 16).tolist())
        answer = self.ask('normalize', '--layer', NORM, '--input', x, '--residual', x)
        np.testing.assert_allclose(answer['residual_sum']['values'], 2 * np.linspace(-1, 1, 16), rtol=1e-6)
        self.run_ok('layers', 'upload', 'models/u/layers/gated', '--seed', '1', '--dim', '16', '--kind', 'rms_norm',
                    '--rounding', 'before_gamma', '--gate-position', 'last')
        self.assertIn('output', self.ask('normalize', '--layer', 'models/u/layers/gated', '--input', x, '--gate', x))

    def test_options_that_would_be_ignored_are_refused(self):
        x = ('--input', '[1,2]')
        for args in (('normalize', '--layer', NORM, *x, '--gamma', '[1,2]'), ('normalize', '--layer', NORM, *x, '--seed', '1'),
                     ('normalize', '--layer', NORM, '--seed', '1', '--gamma-offset', '0'),
                     ('feedforward', '--layer', MLP, *x, '--up', '[[1,2]]'),
                     ('feedforward', '--layer', MLP, '--seed', '1', '--hidden', '8'),
                     ('feedforward', '--layer', MLP, '--seed', '1', '--biases'),
                     ('feedforward', '--layer', MLP, '--weights', self.checkpoint, '--prefix', 'a', '--seed', '1'),
                     ('check', 'normalize', '--layer', NORM, *x)):
            self.failed(2, *args)


class Usage(LayersTest):
    SEEDED = ('layers', 'upload', 'models/u/layers/x', '--seed', '1', '--dim', '4')

    def test_wrong_usage(self):
        for args, text in (
                (('layers',), ''), (('layers', 'nosuch'), 'nosuch'), (('layers', 'describe'), 'NAME'),
                (('layers', 'upload', 'models/u/layers/x'), 'one source'),
                ((*self.SEEDED, '--hidden', '4', '--weights', self.checkpoint), 'one source'),
                (self.SEEDED, '--hidden or --kind'), (('layers', 'upload', 'n', '--seed', '1', '--hidden', '3'), '--dim'),
                ((*self.SEEDED, '--kind', 'rms_norm'), '--rounding'),
                ((*self.SEEDED, '--hidden', '4', '--kind', 'rms_norm'), 'options of a norm'),
                ((*self.SEEDED, '--kind', 'rms_norm', '--rounding', 'after_gamma', '--activation', 'silu'),
                 'options of a feed-forward layer'),
                ((*self.SEEDED, '--hidden', '4', '--chunk-bytes', '0'), '--chunk-bytes'),
                ((*self.SEEDED, '--hidden', '4', '--chunk-bytes', '1', '--chunk-kib', '1'), 'excludes'),
                ((*self.SEEDED, '--hidden', '4', '--packing', 'halves', '--form', 'plain'), '--packing'),
                (('layers', 'upload', 'n', '--weights', self.checkpoint), '--prefix'),
                (('layers', 'upload', 'n', '--weights', self.models / 'm'), '--prefix'),
                (('layers', 'upload', 'n', '--weights', self.checkpoint, '--prefix', 'none'), 'none'),
                (('layers', 'upload', 'n', '--weights', self.checkpoint, '--prefix', 'model.norm', '--dim', '4'), '--dim'),
                (('layers', 'upload', 'n', '--prefix', 'a', '--seed', '1'), '--prefix'),
                (('layers', 'upload', 'u', '--from', self.models / 'm'), 'models/MODEL'),
                (('layers', 'upload', 'models/u', '--from', self.models / 'none'), '--from'),
                (('layers', 'upload', 'models/u', '--from', self.models / 'm', '--etag', 'x'), '--etag'),
                (('layers', 'upload', 'models/u', '--from', self.models / 'm', '--gate-max', '7'), '--from'),
                (('--out', 'x', 'layers', 'list'), '--out')):
            with self.subTest(args=args):
                self.failed(2, *args, texts=[text])

    def test_no_connection(self):
        for command in (('list',), ('describe', MLP), ('verify', MLP), ('delete', MLP), ('download', MLP, '--out', 'x.safetensors'),
                        ('upload', 'models/u/layers/x', '--seed', '1', '--dim', '4', '--hidden', '4')):
            self.failed(3, '--timeout-s', '20', 'layers', *command, server='127.0.0.1:1', texts=['UNAVAILABLE'])

    def test_the_help_explains_each_command_with_examples(self):
        for command in ('list', 'describe', 'upload', 'quantize', 'download', 'delete', 'verify'):
            result = layerctl('layers', command, '--help')
            self.assertEqual((result.status, result.stderr), (0, ''), result)
            self.assertRegex(result.stdout, rf'\n  layerctl layers {command}')

    def test_the_examples_of_the_help_run(self):
        write_model(self.folder / 'stories260k', self.tensors)
        write_model(self.folder / 'CHECKPOINT_DIR', self.tensors)
        (self.folder / 'model.safetensors').write_bytes(self.checkpoint.read_bytes())
        with Daemon(f'--models={self.folder}', f'--layer_store={scratch_dir()}').ready() as daemon:
            wait_for(lambda: daemon.log().count('model_read') == 2)
            self.run_ok('layers', 'download', MLP, '--out', self.folder / 'downloaded.safetensors')
            for command in ('list', 'describe', 'upload', 'quantize', 'download', 'verify', 'delete'):
                lines = re.findall(r'^  layerctl (.*)$', layerctl('layers', command, '--help').stdout, re.MULTILINE)
                self.assertTrue(lines)
                for line in lines:
                    etag = daemon and [layer['etag'] for layer in self.ask('layers', 'list', server=daemon)['layers']
                                       if layer['name'] == 'models/mine/layers/mlp']
                    args = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
                    args = [str(self.folder / word) if re.match(r'[\w.]+\.safetensors|CHECKPOINT_DIR', word) else word
                            for word in args]
                    args = [etag[0] if word == 'ETAG' else word for word in args]
                    self.run_ok(*args, server=daemon)


if __name__ == '__main__':
    unittest.main()
