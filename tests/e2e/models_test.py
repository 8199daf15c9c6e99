"""Folders of checkpoints under a running server: readiness, replacement, damage, memory."""
import json
import os
import shutil
import time
import unittest

import numpy as np

import harness
import resident
from harness import BFLOAT16, Daemon, error_of, health_pb, layer_pb, tensor
from resident import RMS_NORM, SWIGLU, by_name, content_hash, evaluate, inline, registry_pb, safetensors

CONFIG = {'model_type': 'llama', 'hidden_act': 'silu', 'hidden_size': 16, 'intermediate_size': 40, 'rms_norm_eps': 1e-5}
MLP, NORM = 'models/m/layers/model.layers.0.mlp', 'models/m/layers/model.norm'
X = tensor(np.linspace(-1, 1, 32).reshape(2, 16))
SERVING, NOT_SERVING = health_pb.HealthCheckResponse.SERVING, health_pb.HealthCheckResponse.NOT_SERVING


def tensors_of(seed, layers=1, **sizes):
    """A small Llama's tensors by name, and its layers' weights by role."""
    named = {'model.norm.weight': tensor(np.linspace(0.5, 1.5, sizes.get('dim', 16)) + seed)}
    for i in range(layers):
        for role, weight in resident.swiglu_weights(seed + i, **sizes).items():
            named[f'model.layers.{i}.mlp.{role}_proj.weight'] = weight
    return named


def write_model(folder, named, config=None):
    """Replaces a model's files as a careful copier does: each whole, by renaming."""
    folder.mkdir(exist_ok=True)
    for name, content in (('config.json', json.dumps(config or CONFIG).encode()),
                          ('model.safetensors', named if isinstance(named, bytes) else safetensors(named))):
        (folder / f'.{name}.new').write_bytes(content)
        os.replace(folder / f'.{name}.new', folder / name)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError('waited in vain')
        time.sleep(0.01)


def health(daemon, service=''):
    return daemon.health().Check(health_pb.HealthCheckRequest(service=service), timeout=60).status


def get(registry, name):
    return registry.GetLayer(registry_pb.GetLayerRequest(name=name), timeout=60)


class Readiness(unittest.TestCase):
    def test_ready_without_models_and_with_good_ones(self):
        models = harness.scratch_dir()
        write_model(models / 'm', tensors_of(1))
        for flags in ([], [f'--models={models}']):
            with Daemon(*flags) as daemon:
                for service in ('', 'layerd.v1.LayerService', 'layerd.v1.LayerRegistry'):
                    wait_for(lambda: health(daemon, service) == SERVING)

    def test_not_ready_while_a_model_cannot_be_read_and_ready_when_it_is_repaired(self):
        models = harness.scratch_dir()
        write_model(models / 'good', tensors_of(1))
        write_model(models / 'bad', b'\xff' * 100)
        with Daemon(f'--models={models}') as daemon:
            wait_for(lambda: 'model_unusable' in daemon.log())
            self.assertEqual(health(daemon), NOT_SERVING)
            # Calls are answered all the same.
            evaluate(daemon.stub(), by_name('models/good/layers/model.norm', RMS_NORM, X))
            error = error_of(daemon.stub().Normalize, by_name('models/bad/layers/model.norm', RMS_NORM, X))
            self.assertEqual(error.code.name, 'NOT_FOUND')
            write_model(models / 'bad', tensors_of(2))
            wait_for(lambda: health(daemon) == SERVING)
            evaluate(daemon.stub(), by_name('models/bad/layers/model.norm', RMS_NORM, X))
            # Once ready it stays so, whatever comes.
            write_model(models / 'worse', b'\xff' * 100)
            wait_for(lambda: daemon.log().count('model_unusable') >= 2)
            self.assertEqual(health(daemon), SERVING)

    def test_folders_that_cannot_be_used_end_the_start(self):
        for flag in ('models', 'layer_store'):
            result = harness.run_layerd('--grpc_listen=127.0.0.1:0', f'--{flag}={harness.scratch_dir()}/none')
            self.assertEqual((result.status, result.stderr.count('\n')), (1, 1), result)
            self.assertIn(f'--{flag}', result.stderr)
        for flag in ('--pin=m.mlp', '--preload=models/m/mlp', '--layer_memory_mib=-1', '--layer_store_mib=0'):
            result = harness.run_layerd('--grpc_listen=127.0.0.1:0', flag)
            self.assertEqual(result.status, 1, result)
            self.assertIn(flag.partition('=')[0], result.stderr)


class Replacement(unittest.TestCase):
    def setUp(self):
        self.models = harness.scratch_dir()
        self.old, self.new = tensors_of(1), tensors_of(5)
        write_model(self.models / 'm', self.old)

    def weights(self, named):
        return {role: named[f'model.layers.0.mlp.{role}_proj.weight'] for role in ('gate', 'up', 'down')}

    def test_a_model_is_replaced_whole(self):
        with Daemon(f'--models={self.models}') as daemon:
            stub, registry = daemon.stub(), resident.registry(daemon)
            old, new = (content_hash(SWIGLU, self.weights(named)) for named in (self.old, self.new))
            wait_for(lambda: 'model_read' in daemon.log())
            self.assertEqual(evaluate(stub, by_name(MLP, SWIGLU, X)).layer_hash, old)
            write_model(self.models / 'm', self.new)
            hashes = []
            wait_for(lambda: hashes.append(evaluate(stub, by_name(MLP, SWIGLU, X)).layer_hash) or hashes[-1] == new)
            self.assertEqual(set(hashes), {old, new})
            self.assertEqual(evaluate(stub, by_name(MLP, SWIGLU, X)).output,
                             evaluate(stub, inline(SWIGLU, self.weights(self.new), X)).output)
            shutil.rmtree(self.models / 'm')
            wait_for(lambda: 'model_gone' in daemon.log())
            self.assertEqual(error_of(stub.FeedForward, by_name(MLP, SWIGLU, X)).code.name, 'NOT_FOUND')
            self.assertEqual(len(registry.ListLayers(registry_pb.ListLayersRequest()).layers), 0)

    def test_a_corrupt_replacement_leaves_the_old_one_answering(self):
        with Daemon(f'--models={self.models}') as daemon:
            stub, registry = daemon.stub(), resident.registry(daemon)
            wait_for(lambda: 'model_read' in daemon.log())
            want = evaluate(stub, by_name(MLP, SWIGLU, X))
            for bad in (b'\xff' * 100, safetensors(self.new)[:-4], b''):
                seen = daemon.log().count('model_unusable')
                write_model(self.models / 'm', bad)
                wait_for(lambda: daemon.log().count('model_unusable') > seen)
                # Of the layer that is in memory and of the one that is not read yet.
                self.assertEqual(evaluate(stub, by_name(MLP, SWIGLU, X)), want)
                evaluate(stub, by_name(NORM, RMS_NORM, X))
                self.assertEqual(health(daemon), SERVING)
                self.assertIn('model.safetensors', get(registry, MLP).warning)
            write_model(self.models / 'm', self.new)
            wait_for(lambda: evaluate(stub, by_name(MLP, SWIGLU, X)).layer_hash != want.layer_hash)
            self.assertEqual(get(registry, MLP).warning, '')

    def test_damage_spoils_only_the_layers_that_it_touches(self):
        named = tensors_of(1, layers=3)
        named['model.layers.1.mlp.up_proj.weight'] = tensor(np.ones((3, 3)))
        del named['model.layers.2.mlp.down_proj.weight']
        write_model(self.models / 'm', named)
        with Daemon(f'--models={self.models}') as daemon:
            stub, registry = daemon.stub(), resident.registry(daemon)
            wait_for(lambda: health(daemon) == SERVING)
            evaluate(stub, by_name(MLP, SWIGLU, X))
            evaluate(stub, by_name(NORM, RMS_NORM, X))
            for i in (1, 2):
                name = f'models/m/layers/model.layers.{i}.mlp'
                layer = get(registry, name)
                self.assertNotEqual(layer.problem.reason, '')
                error = error_of(stub.FeedForward, by_name(name, SWIGLU, X))
                self.assertEqual((error.code.name, error.reason), ('FAILED_PRECONDITION', layer.problem.reason), error)


class Memory(unittest.TestCase):
    def test_layers_that_do_not_fit_together_take_turns(self):
        models = harness.scratch_dir()
        # 8 layers of 3 MiB each in a budget of 10 MiB; one of them pinned.
        named = tensors_of(1, layers=8, dim=256, hidden=1024)
        write_model(models / 'm', named)
        pinned = 'models/m/layers/model.layers.3.mlp'
        x = tensor(np.linspace(-1, 1, 256).reshape(1, 256))
        with Daemon(f'--models={models}', '--layer_memory_mib=10', f'--pin={pinned}') as daemon:
            stub, registry = daemon.stub(), resident.registry(daemon)
            wait_for(lambda: 'model_read' in daemon.log())
            wait_for(lambda: get(registry, pinned).prepared)
            names = [f'models/m/layers/model.layers.{i}.mlp' for i in range(8)]
            hashes = [evaluate(stub, by_name(name, SWIGLU, x)).layer_hash for name in names]
            self.assertEqual(hashes, [evaluate(stub, by_name(name, SWIGLU, x)).layer_hash for name in names])
            self.assertEqual(len(set(hashes)), 8)
            layers = [get(registry, name) for name in names]
            prepared = [layer.name for layer in layers if layer.prepared]
            self.assertLessEqual(sum(layer.weight_bytes for layer in layers if layer.prepared), 10 << 20)
            self.assertIn(pinned, prepared)
            self.assertIn(names[7], prepared)
            self.assertTrue(get(registry, pinned).pinned)
            self.assertEqual([layer.content_hash for layer in layers], hashes)  # known, though not in memory any more

    def test_a_layer_over_the_budget_is_refused_by_name(self):
        models = harness.scratch_dir()
        write_model(models / 'm', tensors_of(1, dim=256, hidden=1024))
        with Daemon(f'--models={models}', '--layer_memory_mib=1') as daemon:
            wait_for(lambda: 'model_read' in daemon.log())
            error = error_of(daemon.stub().FeedForward, by_name(MLP, SWIGLU, tensor(np.ones((1, 256)))))
            self.assertEqual((error.code.name, error.reason, error.pushback),
                             ('RESOURCE_EXHAUSTED', 'LAYER_TOO_LARGE', '-1'), error)
            self.assertIn('--layer_memory_mib', error.text)

    def test_preloaded_layers_are_there_before_anyone_asks(self):
        models = harness.scratch_dir()
        write_model(models / 'm', tensors_of(1, layers=3))
        with Daemon(f'--models={models}', '--preload=models/m/layers/*.mlp') as daemon:
            registry = resident.registry(daemon)

            wait_for(lambda: 'model_read' in daemon.log())

            def prepared():
                page = registry.ListLayers(registry_pb.ListLayersRequest(filter='state:prepared'), timeout=60)
                return [layer.name for layer in page.layers]

            wait_for(lambda: prepared() == [f'models/m/layers/model.layers.{i}.mlp' for i in range(3)])


if __name__ == '__main__':
    unittest.main()
