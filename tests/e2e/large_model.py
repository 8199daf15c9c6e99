#!/usr/bin/env python3
"""Makes a checkpoint of the width of Llama-7B (d 4096, h 11008), bfloat16, from a seed: two layers in shards, 541 MB.

    tests/e2e/large_model.py FOLDER [--layers N] [--dim D] [--hidden H] [--seed S]

The values are of the order of a trained model's: uniform in ±2⁻⁵. The same arguments give the same bytes.
"""
import argparse
import json
import pathlib
import struct

import numpy as np


def random_bfloat16(generator, count):
    """`count` values, uniform in ±2⁻⁵, cut to bfloat16, as bytes."""
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    value = (bits.view(np.int32).astype(np.float32) * np.float32(2.0 ** -36)).view(np.uint32)
    return (value >> 16).astype('<u2').tobytes()


def write_shard(path, shapes, generator):
    """A safetensors file with tensors of these shapes, written one after the other."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {'dtype': 'BF16', 'shape': list(shape), 'data_offsets': [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text)
        for shape in shapes.values():
            file.write(random_bfloat16(generator, int(np.prod(shape))))
    return offset


def make_model(folder, layers=2, dim=4096, hidden=11008, seed=1):
    """Writes the model into `folder`, a shard a layer."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.Generator(np.random.PCG64(seed))
    weight_map, total = {}, 0
    for i in range(layers):
        block, file = f'model.layers.{i}', f'model-{i + 1:05}-of-{layers:05}.safetensors'
        shapes = {f'{block}.input_layernorm.weight': (dim,), f'{block}.post_attention_layernorm.weight': (dim,),
                  f'{block}.mlp.gate_proj.weight': (hidden, dim), f'{block}.mlp.up_proj.weight': (hidden, dim),
                  f'{block}.mlp.down_proj.weight': (dim, hidden)}
        if i == layers - 1:
            shapes['model.norm.weight'] = (dim,)
        total += write_shard(folder / file, shapes, generator)
        weight_map.update(dict.fromkeys(shapes, file))
    (folder / 'model.safetensors.index.json').write_text(
        json.dumps({'metadata': {'total_size': total}, 'weight_map': weight_map}))
    (folder / 'config.json').write_text(json.dumps(
        {'model_type': 'llama', 'hidden_act': 'silu', 'hidden_size': dim, 'intermediate_size': hidden,
         'num_hidden_layers': layers, 'rms_norm_eps': 1e-5, 'torch_dtype': 'bfloat16'}))
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path)
    for name, default in (('layers', 2), ('dim', 4096), ('hidden', 11008), ('seed', 1)):
        parser.add_argument(f'--{name}', type=int, default=default, help='(%(default)s)')
    args = parser.parse_args()
    print(make_model(args.folder, args.layers, args.dim, args.hidden, args.seed), 'bytes')


if __name__ == '__main__':
    main()
