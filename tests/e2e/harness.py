"""Starts the real daemon and the real client for the end-to-end tests, and speaks to them by gRPC.

Everything is on loopback. Two variables of the environment say where things are:
  LAYERD_BIN_DIR     the folder of layerd and layerctl (build/release/bin of the source tree)
  LAYERD_SOURCE_DIR  the source tree (two folders above this file)
Stubs are generated from proto/ into a temporary folder when this is imported; protoc and its Python plugin for gRPC are
the distribution's, the ones that the build needs too (python3-grpc-tools is too old for `optional`).

    with Daemon('--queue_calls=1') as daemon:
        stub = daemon.stub()
        answer = stub.Normalize(layer_pb.NormalizeRequest(...), timeout=10)
        result = layerctl('normalize', '--kind', 'rms_norm', '--input', '[1,2]', server=daemon.address)
"""
import atexit
import collections
import importlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import google
import grpc
import numpy as np

SOURCE_DIR = pathlib.Path(os.environ.get('LAYERD_SOURCE_DIR') or pathlib.Path(__file__).resolve().parents[2])
BIN_DIR = pathlib.Path(os.environ.get('LAYERD_BIN_DIR') or SOURCE_DIR / 'build/release/bin')
LAYERD = str(BIN_DIR / 'layerd')
LAYERCTL = str(BIN_DIR / 'layerctl')
START_TIMEOUT_S = 60.0
# Memory that a sanitizer keeps back of what was freed, and its shadow: not the daemon's.
SANITIZER_BYTES = 400 << 20 if os.environ.get('LAYERD_CXX_FLAGS') else 0
# For a daemon whose memory is judged closely: the sanitizer keeps next to nothing back, and has its shadow, 1/8, only.
SMALL_SANITIZER_BYTES = 64 << 20 if os.environ.get('LAYERD_CXX_FLAGS') else 0
KEEP_NOTHING_FREED = {'ASAN_OPTIONS': ':'.join(filter(None, [
    os.environ.get('ASAN_OPTIONS'), 'quarantine_size_mb=8', 'thread_local_quarantine_size_kb=64']))}

_scratch = pathlib.Path(tempfile.mkdtemp(prefix='layerd-e2e-'))
atexit.register(shutil.rmtree, _scratch, ignore_errors=True)


def _generate_stubs():
    """Generates Python messages and stubs of every .proto file in proto/ and puts them where import finds them."""
    stubs = _scratch / 'stubs'
    stubs.mkdir()
    root = SOURCE_DIR / 'proto'
    files = sorted(str(path.relative_to(root)) for path in root.rglob('*.proto'))
    plugin = shutil.which('grpc_python_plugin')
    if plugin is None or shutil.which('protoc') is None:
        raise RuntimeError('protoc and grpc_python_plugin are needed (protobuf-compiler, protobuf-compiler-grpc)')
    subprocess.run(['protoc', f'-I{root}', f'--plugin=protoc-gen-grpc_python={plugin}', f'--python_out={stubs}',
                    f'--grpc_python_out={stubs}'] + files, check=True)
    sys.path.insert(0, str(stubs))
    # `google` and `grpc` are installed packages too: theirs stay, ours are found in them.
    for package in (google, grpc):
        package.__path__.append(str(stubs / package.__name__))
    return stubs


def import_stub(module):
    """A module generated from proto/."""
    return importlib.import_module(module)


def compile_messages(proto_file):
    """The module of Python messages of one more .proto file."""
    proto_file = pathlib.Path(proto_file)
    subprocess.run(['protoc', f'-I{proto_file.parent}', f'--python_out={_scratch / "stubs"}', proto_file.name],
                   check=True)
    return importlib.import_module(proto_file.stem + '_pb2')


_generate_stubs()
tensor_pb = importlib.import_module('layerd.v1.tensor_pb2')
layer_pb = importlib.import_module('layerd.v1.layer_service_pb2')
layer_grpc = importlib.import_module('layerd.v1.layer_service_pb2_grpc')
health_pb = importlib.import_module('grpc.health.v1.health_pb2')
health_grpc = importlib.import_module('grpc.health.v1.health_pb2_grpc')
status_pb = importlib.import_module('google.rpc.status_pb2')
details_pb = importlib.import_module('google.rpc.error_details_pb2')

FLOAT32, FLOAT16, BFLOAT16 = tensor_pb.DTYPE_FLOAT32, tensor_pb.DTYPE_FLOAT16, tensor_pb.DTYPE_BFLOAT16
INT8 = tensor_pb.DTYPE_INT8


def scratch_dir():
    """A new folder that goes when the process ends. Its path is short enough for a unix socket."""
    return pathlib.Path(tempfile.mkdtemp(dir=_scratch))


def _environment(extra):
    """This process's environment without flags of layerd and without proxies, then `extra` over it."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith('LAYERD_') and not name.lower().endswith('_proxy')}
    kept.update(extra or {})
    return kept


class Daemon:
    """A layerd on a free port of loopback. `address` is where it serves; the context ends it, by SIGKILL if need be."""

    def __init__(self, *flags, listen='127.0.0.1:0', env=None):
        self.folder = scratch_dir()
        self.port_file = self.folder / 'port'
        self.log_file = self.folder / 'log'
        self.stdout_file = self.folder / 'stdout'
        command = [LAYERD, f'--port_file={self.port_file}']
        if listen is not None:
            command.append(f'--grpc_listen={listen}')
        with open(self.log_file, 'wb') as log, open(self.stdout_file, 'wb') as out:
            self.process = subprocess.Popen(command + list(flags), stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                                            env=_environment(env))
        self.pid = self.process.pid
        self._channels = []
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f'layerd does not serve (exit status {self.process.returncode}): {self.log()}')
            time.sleep(0.005)
        lines = self.port_file.read_text().splitlines()
        self.port = int(lines[0].split()[1]) if lines else None
        self.address = f'127.0.0.1:{self.port}' if lines else None

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        for channel in self._channels:
            channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def ready(self):
        """Waits until health says SERVING: every model was read."""
        deadline = time.monotonic() + START_TIMEOUT_S
        health = self.health()
        while health.Check(health_pb.HealthCheckRequest(), timeout=60).status != health_pb.HealthCheckResponse.SERVING:
            if time.monotonic() > deadline:
                raise RuntimeError(f'not ready: {self.log()}')
            time.sleep(0.005)
        return self

    def log(self):
        return self.log_file.read_text(errors='replace')

    def stdout(self):
        return self.stdout_file.read_text(errors='replace')

    def channel(self):
        """A new connection, closed with the context."""
        channel = open_channel(self.address)
        self._channels.append(channel)
        return channel

    def stub(self):
        return layer_grpc.LayerServiceStub(self.channel())

    def health(self):
        return health_grpc.HealthStub(self.channel())

    def alive(self):
        return self.process.poll() is None

    def send_signal(self, number):
        self.process.send_signal(number)

    def wait(self, timeout_s):
        """The exit status; subprocess.TimeoutExpired when there is none in time."""
        return self.process.wait(timeout_s)

    def stop(self, number=signal.SIGTERM, timeout_s=60):
        """Sends the signal and gives the exit status."""
        self.send_signal(number)
        return self.wait(timeout_s)

    def kill(self):
        """SIGKILL, to this process alone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def peak_memory_bytes(self):
        """VmHWM: the most memory that was ever resident."""
        for line in pathlib.Path(f'/proc/{self.pid}/status').read_text().splitlines():
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) * 1024
        raise RuntimeError('no VmHWM')

    def cpu_seconds(self):
        """CPU time that the process has used so far."""
        after_name = pathlib.Path(f'/proc/{self.pid}/stat').read_text().rpartition(')')[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf('SC_CLK_TCK')


Result = collections.namedtuple('Result', 'status stdout stderr')


def _run(program, args, env, timeout_s):
    done = subprocess.run([program] + [str(arg) for arg in args], stdin=subprocess.DEVNULL, capture_output=True,
                          env=_environment(env), timeout=timeout_s)
    return Result(done.returncode, done.stdout.decode(errors='replace'), done.stderr.decode(errors='replace'))


def layerctl(*args, server=None, env=None, timeout_s=120):
    """Runs layerctl; `server` is an address (or a Daemon), passed in front as --server."""
    address = server.address if isinstance(server, Daemon) else server
    return _run(LAYERCTL, (['--server', address] if address else []) + list(args), env, timeout_s)


def run_layerd(*args, env=None, timeout_s=60):
    """Runs a layerd that is expected to end by itself."""
    return _run(LAYERD, args, env, timeout_s)


def open_channel(address, *options):
    """A connection of its own (not shared with other channels), with no limit on message sizes here."""
    return grpc.insecure_channel(address, options=[
        ('grpc.max_receive_message_length', -1), ('grpc.max_send_message_length', -1), ('grpc.enable_http_proxy', 0),
        ('grpc.use_local_subchannel_pool', 1)] + list(options))


class RichError:
    """What came with a failed call: code, text, the google.rpc details and the pushback trailer."""

    def __init__(self, error):
        self.code = error.code()
        self.text = error.details()
        self.reason = self.domain = self.retry_delay_s = self.pushback = self.resource = None
        self.fields = []  # (path, description, reason) of each violation
        for name, value in error.trailing_metadata() or ():
            if name == 'grpc-retry-pushback-ms':
                self.pushback = value
            if name == 'grpc-status-details-bin':
                self._read(status_pb.Status.FromString(value))

    def _read(self, status):
        if status.code != self.code.value[0] or status.message != self.text:
            raise AssertionError(f'the details say {status.code} {status.message!r}, '
                                 f'the call {self.code} {self.text!r}')
        for any_ in status.details:
            info, bad, retry, resource = (details_pb.ErrorInfo(), details_pb.BadRequest(), details_pb.RetryInfo(),
                                          details_pb.ResourceInfo())
            if any_.Unpack(info):
                self.reason, self.domain = info.reason, info.domain
            elif any_.Unpack(bad):
                self.fields += [(v.field, v.description, v.reason) for v in bad.field_violations]
            elif any_.Unpack(retry):
                self.retry_delay_s = retry.retry_delay.ToTimedelta().total_seconds()
            elif any_.Unpack(resource):
                self.resource = (resource.resource_type, resource.resource_name)

    def __repr__(self):
        return (f'{self.code} {self.text!r} reason={self.reason} domain={self.domain} fields={self.fields} '
                f'retry_delay_s={self.retry_delay_s} pushback={self.pushback}')


def error_of(call, *args, **kwargs):
    """The RichError of a call that must fail."""
    kwargs.setdefault('timeout', 60)
    try:
        answer = call(*args, **kwargs)
    except grpc.RpcError as error:
        return RichError(error)
    raise AssertionError(f'expected an error, got the answer {str(answer)[:200]}')


# Tensors. NumPy has no bfloat16: arrays are float32, and the dtype is said apart.

def to_bfloat16(array):
    """The nearest bfloat16 values, ties to even, as float32."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    nan = np.isnan(np.asarray(array, np.float32))
    return np.where(nan, np.float32(np.nan), rounded.view(np.float32)).astype(np.float32)


def round_to(dtype, array):
    """`array` rounded to the dtype once, as float32. Float64 goes straight to float16; bfloat16 by way of the bits."""
    array = np.asarray(array)
    if dtype == FLOAT32:
        return array.astype(np.float32)
    if dtype == FLOAT16:
        return array.astype(np.float16).astype(np.float32)
    return _bfloat16_of_float64(array.astype(np.float64))


def _bfloat16_of_float64(array):
    """Rounds to bfloat16 without the double rounding that a stop at float32 would bring: that stop rounds to odd."""
    near = array.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32).copy()
    inexact = (back != array) & np.isfinite(near) & ~np.isnan(array)
    away = inexact & (np.abs(back) > np.abs(array))
    bits[away] -= 1  # towards zero
    bits[inexact] |= 1
    return to_bfloat16(bits.view(np.float32))


def tensor(array, dtype=FLOAT32, shape=None):
    """A message with the array's values as bytes, rounded to the dtype."""
    array = np.asarray(array, np.float32)
    if dtype == FLOAT32:
        data = array.astype('<f4').tobytes()
    elif dtype == FLOAT16:
        data = array.astype('<f2').tobytes()
    elif dtype == INT8:
        data = array.astype(np.int8).tobytes()
    else:
        data = (np.ascontiguousarray(to_bfloat16(array)).view(np.uint32) >> 16).astype('<u2').tobytes()
    return tensor_pb.Tensor(dtype=dtype, shape=array.shape if shape is None else shape, data=data)


def array_of(message):
    """The values of a tensor message, as float32."""
    if message.dtype == FLOAT32:
        flat = np.frombuffer(message.data, '<f4')
    elif message.dtype == FLOAT16:
        flat = np.frombuffer(message.data, '<f2').astype(np.float32)
    elif message.dtype == INT8:
        flat = np.frombuffer(message.data, np.int8).astype(np.float32)
    else:
        flat = (np.frombuffer(message.data, '<u2').astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(tuple(message.shape))


def norm_request(x, kind=layer_pb.NORM_KIND_RMS_NORM, dtype=FLOAT32, **spec):
    """A NormalizeRequest for the array x."""
    return layer_pb.NormalizeRequest(input=tensor(x, dtype), spec=layer_pb.NormalizeSpec(kind=kind, **spec))


def swiglu_request(x, gate, up, down, dtype=FLOAT32):
    """A FeedForwardRequest: gated, SILU, separate weights in layout [out, in]."""
    return layer_pb.FeedForwardRequest(
        input=tensor(x, dtype),
        spec=layer_pb.FeedForwardSpec(form=layer_pb.FEED_FORWARD_FORM_GATED, activation=layer_pb.ACTIVATION_SILU,
                                      packing=layer_pb.GATE_UP_PACKING_SEPARATE,
                                      layout=layer_pb.WEIGHT_LAYOUT_OUT_IN),
        weights=layer_pb.FeedForwardWeights(gate=tensor(gate, dtype), up=tensor(up, dtype), down=tensor(down, dtype)))


def plain_request(x, up, down, activation=layer_pb.ACTIVATION_IDENTITY, layout=layer_pb.WEIGHT_LAYOUT_OUT_IN,
                  dtype=FLOAT32):
    """A FeedForwardRequest: plain, no biases."""
    return layer_pb.FeedForwardRequest(
        input=tensor(x, dtype),
        spec=layer_pb.FeedForwardSpec(form=layer_pb.FEED_FORWARD_FORM_PLAIN, activation=activation, layout=layout),
        weights=layer_pb.FeedForwardWeights(up=tensor(up, dtype), down=tensor(down, dtype)))
