"""A checkpoint of the width of Llama-7B: listed at once, prepared once, within the memory budget, uploaded in large chunks.

Times are printed, not judged; a slow machine fails nothing here.
"""
import hashlib
import pathlib
import shutil
import time
import unittest

import numpy as np

import harness
import large_model
import resident
from harness import BFLOAT16, Daemon, tensor
from models_test import wait_for
from resident import SWIGLU, by_name, content_hash, evaluate, inline, registry_pb

BUDGET_MIB = 300  # one layer, but not two
LAYER_BYTES = 3 * 2 * 4096 * 11008
# A prepared layer takes at most 1.02 of its weights' bytes. On its way come a piece of 1.4 MiB for each of 3 threads, and
# what the calls take: 16 MiB for all that.
LIMIT_BYTES = LAYER_BYTES * 102 // 100 + (16 << 20) + harness.SMALL_SANITIZER_BYTES


def resident_bytes(daemon):
    for line in pathlib.Path(f'/proc/{daemon.pid}/status').read_text().splitlines():
        if line.startswith('VmRSS:'):
            return int(line.split()[1]) * 1024
    raise RuntimeError('no VmRSS')


@unittest.skipIf(shutil.disk_usage(harness.scratch_dir()).free < 3 << 30, 'less than 3 GiB of disk are free')
class LargeModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = harness.scratch_dir()
        large_model.make_model(cls.models / 'wide')
        cls.addClassCleanup(shutil.rmtree, cls.models)

    def test_listed_called_evicted_and_uploaded(self):
        store = harness.scratch_dir()
        self.addCleanup(shutil.rmtree, store)
        start = time.monotonic()
        flags = [f'--models={self.models}', f'--layer_memory_mib={BUDGET_MIB}', f'--layer_store={store}']
        with Daemon(*flags, env=harness.KEEP_NOTHING_FREED).ready() as daemon:
            registry, stub = resident.registry(daemon), daemon.stub()
            wait_for(lambda: registry.ListLayers(registry_pb.ListLayersRequest(), timeout=60).layers)
            print(f'listed {time.monotonic() - start:.2f} s after the start')
            layers = registry.ListLayers(registry_pb.ListLayersRequest(), timeout=60).layers
            self.assertEqual([layer.name.rpartition('/')[2] for layer in layers], [
                'model.layers.0.input_layernorm', 'model.layers.0.mlp', 'model.layers.0.post_attention_layernorm',
                'model.layers.1.input_layernorm', 'model.layers.1.mlp', 'model.layers.1.post_attention_layernorm',
                'model.norm'])
            before = resident_bytes(daemon)
            x = tensor(np.linspace(-1, 1, 4096).reshape(1, 4096), BFLOAT16)
            mlps = [f'models/wide/layers/model.layers.{i}.mlp' for i in range(2)]
            answers = {}
            for i in (0, 0, 1, 1, 0):
                start = time.monotonic()
                answer = evaluate(stub, by_name(mlps[i], SWIGLU, x))
                print(f'layer {i}: {1000 * (time.monotonic() - start):.0f} ms')
                self.assertEqual(answers.setdefault(i, answer), answer)
                grown = resident_bytes(daemon) - before
                self.assertLess(grown, LIMIT_BYTES)
            # A download takes the weights out of their panels as it goes.
            named = resident.read_safetensors(self.models / 'wide' / 'model-00001-of-00002.safetensors')
            weights = {role: named[f'model.layers.0.mlp.{role}_proj.weight'] for role in ('gate', 'up', 'down')}
            start = time.monotonic()
            _, layer_hash, body = resident.download(registry, mlps[0])
            print(f'downloaded {len(body) >> 20} MiB in {time.monotonic() - start:.2f} s')
            self.assertEqual(layer_hash, answers[0].layer_hash)
            self.assertTrue(body.endswith(b''.join(weight.data for weight in weights.values())))
            grown = daemon.peak_memory_bytes() - before
            print(f'grown by {grown / 2**20:.0f} MiB at the most, of which one layer {LAYER_BYTES / 2**20:.0f}')
            self.assertLess(grown, LIMIT_BYTES)

            # The same layer, uploaded in chunks of 64 MiB, is the same layer.
            body = resident.safetensors(weights)
            start = time.monotonic()
            layer = registry.CreateLayer(resident.messages('models/up/layers/mlp', SWIGLU, body, chunk=64 << 20),
                                         timeout=300)
            print(f'uploaded {len(body) >> 20} MiB in {time.monotonic() - start:.2f} s')
            self.assertEqual(layer.content_hash, answers[0].layer_hash)
            self.assertEqual(content_hash(SWIGLU, weights), answers[0].layer_hash)
            self.assertEqual(evaluate(stub, by_name('models/up/layers/mlp', SWIGLU, x)), answers[0])
            grown = daemon.peak_memory_bytes() - before
            print(f'grown by {grown / 2**20:.0f} MiB at the most')
            # Chunks are at most 64 MiB and are had twice, as they arrive and as they are written.
            self.assertLess(grown, LIMIT_BYTES + (336 << 20))


if __name__ == '__main__':
    unittest.main()
