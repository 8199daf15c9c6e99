"""A daemon with a small Llama in --models and with a --layer_store, for the tests of layerctl layers."""
import json
import unittest

import resident
from harness import Daemon, layerctl, scratch_dir
from models_test import tensors_of, wait_for, write_model
from resident import SWIGLU, content_hash, registry_pb

MLP, NORM = 'models/m/layers/model.layers.0.mlp', 'models/m/layers/model.norm'


def role_weights(named, layer=0):
    return {role: named[f'model.layers.{layer}.mlp.{role}_proj.weight'] for role in ('gate', 'up', 'down')}


class LayersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = scratch_dir()
        cls.tensors = tensors_of(1, layers=2)
        write_model(cls.models / 'm', cls.tensors)
        cls.daemon = Daemon(f'--models={cls.models}', f'--layer_store={scratch_dir()}', '--layer_store_mib=16').ready()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.registry = resident.registry(cls.daemon)
        wait_for(lambda: 'model_read' in cls.daemon.log())
        cls.checkpoint = cls.models / 'm' / 'model.safetensors'
        cls.hash = content_hash(SWIGLU, role_weights(cls.tensors))

    def setUp(self):
        self.folder = scratch_dir()

    def tearDown(self):
        for layer in self.registry.ListLayers(registry_pb.ListLayersRequest(filter='source:upload')).layers:
            self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=layer.name))

    def run_ok(self, *args, **kwargs):
        kwargs.setdefault('server', self.daemon)
        result = layerctl(*args, **kwargs)
        self.assertEqual((result.status, result.stderr), (0, ''), result)
        return result.stdout

    def ask(self, *args, **kwargs):
        return json.loads(self.run_ok('--json', *args, **kwargs))

    def failed(self, status, *args, texts=(), server=None, **kwargs):
        """Asserts the exit status, one line on standard error, and nothing on standard output."""
        result = layerctl(*args, server=server or self.daemon, **kwargs)
        self.assertEqual((result.status, result.stdout, result.stderr.count('\n')), (status, '', 1), result)
        for text in texts:
            self.assertIn(text, result.stderr)

    def get(self, name):
        return self.registry.GetLayer(registry_pb.GetLayerRequest(name=name), timeout=60)
