"""Resident layers for the end-to-end tests: model folders, uploads, downloads, and the content hash as the docs define it.

Weights are Tensor messages by role (harness.tensor), options are messages too, so that the same things go inline and by
name.
"""
import hashlib
import json
import os
import pathlib
import shutil
import struct

import numpy as np

import harness
from harness import BFLOAT16, FLOAT16, FLOAT32, INT8, layer_pb, tensor

registry_pb = harness.import_stub('layerd.v1.layer_registry_pb2')
registry_grpc = harness.import_stub('layerd.v1.layer_registry_pb2_grpc')

SHARED = pathlib.Path(os.environ.get('LAYERD_TEST_DATA') or harness.SOURCE_DIR.parent / 'shared')
FORMAT_NAMES = {FLOAT32: 'F32', FLOAT16: 'F16', BFLOAT16: 'BF16', INT8: 'I8'}
NORMALIZE_ROLES = ['gamma', 'beta']
FEED_FORWARD_ROLES = ['gate', 'gate_scale', 'up', 'up_scale', 'gate_up', 'gate_up_scale', 'down', 'down_scale',
                      'gate_bias', 'up_bias', 'gate_up_bias', 'down_bias', 'inner_norm_gamma']
SWIGLU = layer_pb.FeedForwardSpec(
    form=layer_pb.FEED_FORWARD_FORM_GATED, activation=layer_pb.ACTIVATION_SILU,
    packing=layer_pb.GATE_UP_PACKING_SEPARATE, layout=layer_pb.WEIGHT_LAYOUT_OUT_IN)
RMS_NORM = layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_RMS_NORM, epsilon=1e-5,
                                  rounding=layer_pb.NORM_ROUNDING_BEFORE_GAMMA)


def registry(daemon):
    return registry_grpc.LayerRegistryStub(daemon.channel())


def safetensors(weights, pad=8):
    """The bytes of a safetensors file with these tensors; its header is padded to a multiple of `pad`."""
    header, offset = {}, 0
    for name, weight in weights.items():
        header[name] = {'dtype': FORMAT_NAMES[weight.dtype], 'shape': list(weight.shape),
                        'data_offsets': [offset, offset + len(weight.data)]}
        offset += len(weight.data)
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % pad)
    return struct.pack('<Q', len(text)) + text + b''.join(weight.data for weight in weights.values())


def read_safetensors(file):
    """The tensors of a file as messages by name, those that layers can use."""
    bytes_ = pathlib.Path(file).read_bytes()
    length = struct.unpack_from('<Q', bytes_)[0]
    dtypes = {name: dtype for dtype, name in FORMAT_NAMES.items()}
    return {name: harness.tensor_pb.Tensor(dtype=dtypes[entry['dtype']], shape=entry['shape'],
                                           data=bytes_[8 + length + entry['data_offsets'][0]:
                                                       8 + length + entry['data_offsets'][1]])
            for name, entry in json.loads(bytes_[8:8 + length]).items()
            if name != '__metadata__' and entry['dtype'] in dtypes}


def swiglu_weights(seed, dim=16, hidden=40, dtype=FLOAT32):
    random = np.random.default_rng(seed)
    return {role: tensor(random.standard_normal(shape) / 4, dtype)
            for role, shape in (('gate', (hidden, dim)), ('up', (hidden, dim)), ('down', (dim, hidden)))}


def _is_norm(spec):
    return isinstance(spec, layer_pb.NormalizeSpec)


def header(name, spec, body, **fields):
    """The first message of an upload of the bytes `body`; `fields` go over what fits them."""
    fields = {'name': name, 'size_bytes': len(body), 'sha256': hashlib.sha256(body).hexdigest(), **fields}
    fields['normalize' if _is_norm(spec) else 'feed_forward'] = spec
    return registry_pb.CreateLayerRequest(header=registry_pb.LayerHeader(**fields))


def messages(name, spec, body, chunk=1 << 20, **fields):
    """All messages of an upload."""
    yield header(name, spec, body, **fields)
    for start in range(0, len(body), chunk):
        yield registry_pb.CreateLayerRequest(chunk=body[start:start + chunk])


def upload(stub, name, spec, weights, chunk=1 << 20, timeout=120, **fields):
    return stub.CreateLayer(messages(name, spec, safetensors(weights), chunk, **fields), timeout=timeout)


def download(stub, name, timeout=120):
    """The header, the content hash and the bytes of a layer."""
    parts = list(stub.DownloadLayer(registry_pb.DownloadLayerRequest(name=name), timeout=timeout))
    return parts[0].header, parts[0].content_hash, b''.join(part.chunk for part in parts[1:])


def inline(spec, weights, x, **options):
    """The request that has the layer in it."""
    if _is_norm(spec):
        return layer_pb.NormalizeRequest(input=x, spec=spec, **weights, **options)
    return layer_pb.FeedForwardRequest(input=x, spec=spec, weights=layer_pb.FeedForwardWeights(**weights), **options)


def by_name(name, spec, x, **options):
    """The request that names the layer; `spec` tells only of which kind it is."""
    kind = layer_pb.NormalizeRequest if _is_norm(spec) else layer_pb.FeedForwardRequest
    return kind(input=x, layer=name, **options)


def evaluate(stub, request, timeout=60):
    method = stub.Normalize if isinstance(request, layer_pb.NormalizeRequest) else stub.FeedForward
    return method(request, timeout=timeout)


def content_hash(spec, weights):
    """docs/layers_on_the_server.md, "The content hash"."""
    def bits(value):
        return struct.pack('>d', value).hex()

    def name(enum, value, prefix):
        return enum.Name(value)[len(prefix):].lower()

    if _is_norm(spec):
        default = 1e-6 if spec.kind == layer_pb.NORM_KIND_RMS_NORM else 1e-5
        position = spec.gate_position if spec.HasField('gate_position') else layer_pb.GATE_POSITION_NONE
        line = (f'normalize kind={name(layer_pb.NormKind, spec.kind, "NORM_KIND_")}'
                f' epsilon={bits(spec.epsilon if spec.HasField("epsilon") else default)}'
                f' rounding={name(layer_pb.NormRounding, spec.rounding, "NORM_ROUNDING_")}'
                f' gamma_offset={bits(spec.gamma_offset)} group_size={spec.group_size}'
                f' gate_position={name(layer_pb.GatePosition, position, "GATE_POSITION_")}')
    else:
        packing = spec.packing or layer_pb.GATE_UP_PACKING_SEPARATE
        inner = spec.inner_norm.epsilon if spec.inner_norm.HasField('epsilon') else 1e-6
        line = (f'feed_forward form={name(layer_pb.FeedForwardForm, spec.form, "FEED_FORWARD_FORM_")}'
                f' activation={name(layer_pb.Activation, spec.activation, "ACTIVATION_")}'
                f' swish_beta={bits(spec.swish_beta if spec.HasField("swish_beta") else 1.0)}'
                f' packing={name(layer_pb.GateUpPacking, packing, "GATE_UP_PACKING_")}'
                f' layout={name(layer_pb.WeightLayout, spec.layout, "WEIGHT_LAYOUT_")}'
                f' gate_max={bits(spec.gate_max) if spec.HasField("gate_max") else "none"}'
                f' up_limit={bits(spec.up_limit) if spec.HasField("up_limit") else "none"}'
                f' up_offset={bits(spec.up_offset)}'
                f' inner_norm={bits(inner) if spec.HasField("inner_norm") else "none"}')
    lines = ['layerd layer 1', line]
    for role in NORMALIZE_ROLES if _is_norm(spec) else FEED_FORWARD_ROLES:
        if role in weights:
            weight = weights[role]
            shape = ', '.join(map(str, weight.shape))
            lines.append(f'{role} {FORMAT_NAMES[weight.dtype]} [{shape}] {hashlib.sha256(weight.data).hexdigest()}')
    return hashlib.sha256(('\n'.join(lines) + '\n').encode()).hexdigest()


def stories_models():
    """A new folder of models with stories260K in it."""
    models = harness.scratch_dir()
    (models / 'stories260k').mkdir()
    for source, target in (('config.json', 'config.json'), ('stories260k.f32.safetensors', 'model.safetensors')):
        shutil.copy(SHARED / 'data' / 'stories260k' / source, models / 'stories260k' / target)
    return models
