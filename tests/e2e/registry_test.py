"""LayerRegistry over the wire: uploads, downloads, lists, deletions, and what is refused."""
import base64
import hashlib
import itertools
import pathlib
import struct
import threading
import time
import unittest

import numpy as np

import harness
import resident
from harness import BFLOAT16, FLOAT16, Daemon, array_of, error_of, layer_pb, tensor
from resident import RMS_NORM, SWIGLU, content_hash, registry_pb, safetensors

NAME = 'models/m/layers/mlp'


class RegistryTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.store = harness.scratch_dir()
        cls.daemon = Daemon(f'--layer_store={cls.store}', '--layer_store_mib=64')
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.registry = resident.registry(cls.daemon)
        cls.weights = resident.swiglu_weights(1)
        cls.body = safetensors(cls.weights)

    def tearDown(self):
        for layer in self.layers():
            self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=layer.name), timeout=60)
        self.assertEqual(self.files(), [])

    def layers(self, **query):
        return list(self.registry.ListLayers(registry_pb.ListLayersRequest(**query), timeout=60).layers)

    def files(self):
        """Everything in the store but its lock."""
        return sorted(str(path.relative_to(self.store)) for path in self.store.rglob('*')
                      if path.is_file() and path.name != 'lock')

    def refused(self, messages, code, reason, field):
        error = error_of(self.registry.CreateLayer, iter(messages))
        self.assertEqual((error.code.name, error.reason), (code, reason), error)
        self.assertEqual([violation[0] for violation in error.fields], [field] if field else [], error)
        return error


class Uploads(RegistryTest):
    def test_what_is_uploaded_is_what_is_got_listed_and_downloaded(self):
        layer = resident.upload(self.registry, NAME, SWIGLU, self.weights)
        self.assertEqual(layer.name, NAME)
        self.assertEqual(layer.source, registry_pb.LAYER_SOURCE_UPLOAD)
        self.assertEqual((layer.dim, layer.hidden_dim, layer.out_dim), (16, 40, 16))
        self.assertEqual((layer.parameters, layer.weight_bytes), (3 * 16 * 40, 4 * 3 * 16 * 40))
        self.assertEqual([(w.role, list(w.shape)) for w in layer.weights],
                         [('gate', [40, 16]), ('up', [40, 16]), ('down', [16, 40])])
        self.assertEqual(layer.sha256, hashlib.sha256(self.body).hexdigest())
        self.assertEqual(layer.content_hash, content_hash(SWIGLU, self.weights))
        self.assertEqual(layer.etag, layer.content_hash)
        self.assertLess(abs(layer.create_time.ToSeconds() - time.time()), 600)
        got = self.registry.GetLayer(registry_pb.GetLayerRequest(name=NAME), timeout=60)
        self.assertEqual(got, layer)
        self.assertEqual(self.layers(), [layer])
        header, hash_, body = resident.download(self.registry, NAME)
        self.assertEqual((header.name, header.size_bytes, hash_), (NAME, len(body), layer.content_hash))
        file = harness.scratch_dir() / 'layer.safetensors'
        file.write_bytes(body)
        self.assertEqual(resident.read_safetensors(file), self.weights)
        self.assertEqual(content_hash(header.feed_forward, self.weights), hash_)

    def test_chunks_of_any_size_and_headers_of_any_length_give_the_same_layer(self):
        want = content_hash(SWIGLU, self.weights)
        for chunk in (1, 7, 8, 9, 1000, len(self.body)):
            layer = resident.upload(self.registry, NAME, SWIGLU, self.weights, chunk)
            self.assertEqual((layer.content_hash, layer.sha256),
                             (want, hashlib.sha256(self.body).hexdigest()), chunk)
            self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=NAME), timeout=60)
        for length in (99993, 100000, 100008):
            body = safetensors(self.weights, pad=length)
            self.assertEqual(struct.unpack('<Q', body[:8])[0], length)
            for chunk in (7, 65536) if length == 99993 else (65536,):
                layer = self.registry.CreateLayer(resident.messages(NAME, SWIGLU, body, chunk), timeout=120)
                self.assertEqual(layer.content_hash, want)
                self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=NAME), timeout=60)

    def test_chunks_of_64_mib(self):
        weights = {'gamma': tensor(np.ones(15 << 20))}  # 60 MiB
        layer = resident.upload(self.registry, 'models/m/layers/wide', RMS_NORM, weights, chunk=64 << 20)
        self.assertEqual(layer.content_hash, content_hash(RMS_NORM, weights))

    def test_the_same_content_is_stored_once(self):
        names = [f'models/m{i}/layers/mlp' for i in range(3)]
        for name in names:
            resident.upload(self.registry, name, SWIGLU, self.weights)
        self.assertEqual(len([file for file in self.files() if file.endswith('.safetensors')]), 1, self.files())
        for name in names[:2]:
            self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=name), timeout=60)
        self.assertEqual(resident.download(self.registry, names[2])[2][-100:], self.body[-100:])

    def test_the_same_layer_again_is_no_error_and_another_one_needs_the_etag(self):
        first = resident.upload(self.registry, NAME, SWIGLU, self.weights)
        again = resident.upload(self.registry, NAME, SWIGLU, self.weights)
        self.assertEqual(again.content_hash, first.content_hash)
        other = resident.swiglu_weights(2)
        self.refused(resident.messages(NAME, SWIGLU, safetensors(other)), 'ALREADY_EXISTS', 'LAYER_EXISTS',
                     'header.name')
        self.refused(resident.messages(NAME, SWIGLU, safetensors(other), etag='0' * 64), 'ABORTED', 'ETAG_MISMATCH',
                     'header.etag')
        second = resident.upload(self.registry, NAME, SWIGLU, other, etag=first.etag)
        self.assertNotEqual(second.etag, first.etag)
        error = error_of(self.registry.DeleteLayer, registry_pb.DeleteLayerRequest(name=NAME, etag=first.etag))
        self.assertEqual((error.code.name, error.reason), ('ABORTED', 'ETAG_MISMATCH'))
        self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=NAME, etag=second.etag), timeout=60)

    def test_the_first_message_says_what_is_wrong(self):
        body = self.body
        good = resident.header(NAME, SWIGLU, body).header
        cases = [
            (dict(name=''), 'header.name'), (dict(name='m/mlp'), 'header.name'),
            (dict(name='models/../layers/x'), 'header.name'), (dict(name='models/m/layers/.hidden'), 'header.name'),
            (dict(name='models/m/layers/a%2eb'), 'header.name'), (dict(size_bytes=0), 'header.size_bytes'),
            (dict(size_bytes=-1), 'header.size_bytes'), (dict(sha256=''), 'header.sha256'),
            (dict(sha256='0' * 63 + 'G'), 'header.sha256')]
        for change, field in cases:
            bad = registry_pb.LayerHeader()
            bad.CopyFrom(good)
            for name, value in change.items():
                setattr(bad, name, value)
            error = error_of(self.registry.CreateLayer, iter([registry_pb.CreateLayerRequest(header=bad)]))
            self.assertEqual((error.code.name, error.fields[0][0]), ('INVALID_ARGUMENT', field), error)
        bad = registry_pb.LayerHeader()
        bad.CopyFrom(good)
        bad.ClearField('feed_forward')
        self.refused([registry_pb.CreateLayerRequest(header=bad)], 'INVALID_ARGUMENT', 'MISSING', 'header.normalize')
        bad.feed_forward.CopyFrom(SWIGLU)
        bad.feed_forward.activation = 0
        self.refused([registry_pb.CreateLayerRequest(header=bad)], 'INVALID_ARGUMENT', 'MISSING',
                     'header.feed_forward.activation')
        bad.normalize.kind = layer_pb.NORM_KIND_RMS_NORM
        self.refused([registry_pb.CreateLayerRequest(header=bad)], 'INVALID_ARGUMENT', 'MISSING',
                     'header.normalize.rounding')
        self.refused([registry_pb.CreateLayerRequest(header=registry_pb.LayerHeader(
            name=NAME, feed_forward=SWIGLU, size_bytes=65 << 20, sha256='0' * 64))], 'RESOURCE_EXHAUSTED', 'STORE_FULL',
                     'header.size_bytes')

    def test_messages_in_the_wrong_order(self):
        header = resident.header(NAME, SWIGLU, self.body)
        chunk = registry_pb.CreateLayerRequest(chunk=self.body)
        self.refused([], 'INVALID_ARGUMENT', 'MISSING', 'header')
        self.refused([chunk], 'INVALID_ARGUMENT', 'MISSING', 'header')
        self.refused([registry_pb.CreateLayerRequest()], 'INVALID_ARGUMENT', 'MISSING', 'header')
        self.refused([header, header], 'INVALID_ARGUMENT', 'UNEXPECTED_FIELD', 'header')
        self.refused([header, registry_pb.CreateLayerRequest()], 'INVALID_ARGUMENT', 'MISSING', 'chunk')

    def test_bytes_that_are_not_what_was_announced(self):
        header = resident.header(NAME, SWIGLU, self.body)
        wrong = bytearray(self.body)
        wrong[-1] ^= 1
        for chunks in ([self.body[:-1]], [self.body, b'x'], [bytes(wrong)], []):
            error = error_of(self.registry.CreateLayer, iter(
                [header] + [registry_pb.CreateLayerRequest(chunk=chunk) for chunk in chunks]))
            self.assertEqual(error.code.name, 'INVALID_ARGUMENT', error)
            self.assertTrue(error.text.startswith(('chunk: ', 'header.s')), error)

    def test_hostile_bytes(self):
        def with_header(text, data=b''):
            return struct.pack('<Q', len(text)) + text.encode() + data

        huge = 2**63 - 1
        bodies = [
            b'\xff' * 64, with_header('{}' + 'x' * 8), with_header('[]'), with_header('{},"__metadata__":{}'),
            with_header('{"gate":{"dtype":"ZZ","shape":[1],"data_offsets":[9223372036854775808,16]}}', b'\0' * 16),
            with_header('{"__metadata__":7}'), with_header('{"__metadata__":{"a":7}}'),
            with_header(f'{{"gate":{{"dtype":"F32","shape":[{huge},{huge}],"data_offsets":[0,4]}}}}', b'\0' * 4),
            with_header('{"gate":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                        '"gate":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b'\0' * 4),
            with_header('{"other":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b'\0' * 4),
            with_header('{"gate":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', b'\0' * 4),
            with_header('[' * 100000), with_header('{}'), struct.pack('<Q', 2**63) + b'{}' * 8,
            struct.pack('<Q', 99) + b'{}' * 8]
        for body in bodies:
            error = error_of(self.registry.CreateLayer, resident.messages(NAME, SWIGLU, body, chunk=13))
            self.assertEqual(error.code.name, 'INVALID_ARGUMENT', (body[:80], error))
            self.assertTrue(error.fields, (body[:80], error))
        self.assertTrue(self.daemon.alive())

    def test_a_refusal_comes_at_once_and_memory_stays_flat(self):
        """The client goes on sending a gigabyte; the server has refused it at the first chunk."""
        chunk = b'\xff' * (4 << 20)
        sent = []

        def messages():
            yield resident.header(NAME, SWIGLU, self.body, size_bytes=60 << 20)
            for _ in range(256):
                sent.append(len(chunk))
                yield registry_pb.CreateLayerRequest(chunk=chunk)

        before = self.daemon.peak_memory_bytes()
        error = error_of(self.registry.CreateLayer, messages())
        self.assertEqual(error.code.name, 'INVALID_ARGUMENT', error)
        self.assertLess(sum(sent), 512 << 20)
        self.assertLess(self.daemon.peak_memory_bytes() - before, (100 << 20) + harness.SANITIZER_BYTES)

    def test_an_upload_that_breaks_off_leaves_nothing(self):
        def messages():
            yield resident.header(NAME, SWIGLU, self.body)
            yield registry_pb.CreateLayerRequest(chunk=self.body[:-4])
            started.append(True)
            while not call.done():
                time.sleep(0.01)

        started, call = [], None
        call = self.registry.CreateLayer.future(messages(), timeout=60)
        while not started:
            time.sleep(0.01)
        call.cancel()
        deadline = time.monotonic() + 30
        while self.files() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual((self.files(), self.layers()), ([], []))

    def test_an_upload_that_sends_nothing_more_is_ended(self):
        store = harness.scratch_dir()
        with Daemon(f'--layer_store={store}', '--upload_idle_s=0.5') as daemon:
            for sent in ([], [resident.header(NAME, SWIGLU, self.body)],
                         [resident.header(NAME, SWIGLU, self.body), registry_pb.CreateLayerRequest(chunk=self.body[:9])]):
                ended = threading.Event()

                def messages():
                    yield from sent
                    ended.wait(60)

                try:
                    error = error_of(resident.registry(daemon).CreateLayer, messages())
                finally:
                    ended.set()
                self.assertEqual((error.code.name, error.reason), ('DEADLINE_EXCEEDED', 'EXPIRED_WHILE_WAITING'), error)
                self.assertIn('--upload_idle_s', error.text)
            deadline = time.monotonic() + 30
            while any((store / 'uploads').iterdir()) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertEqual(list((store / 'uploads').iterdir()), [])

    def test_no_stray_bytes_of_a_message_kill_the_server(self):
        channel = self.daemon.channel()
        raw = channel.stream_unary('/layerd.v1.LayerRegistry/CreateLayer')
        error = error_of(raw, iter([b'\xff\xff\xff\xff']))
        self.assertEqual((error.code.name, error.reason), ('INVALID_ARGUMENT', 'MALFORMED_MESSAGE'))
        for method in ('GetLayer', 'ListLayers', 'DeleteLayer'):
            error = error_of(channel.unary_unary(f'/layerd.v1.LayerRegistry/{method}'), b'\xff\xff\xff\xff')
            self.assertEqual((error.code.name, error.reason), ('INVALID_ARGUMENT', 'MALFORMED_MESSAGE'))


class Lists(RegistryTest):
    def test_pages_filters_and_parents(self):
        norm = {'gamma': tensor(np.ones(4))}
        names = [f'models/{model}/layers/model.layers.{i}.{kind}' for model in 'ab' for i in range(4)
                 for kind in ('mlp', 'norm')]
        for name in names:
            resident.upload(self.registry, name, SWIGLU if name.endswith('mlp') else RMS_NORM,
                            resident.swiglu_weights(3, 4, 6) if name.endswith('mlp') else norm)
        listed, token = [], ''
        for page in itertools.count(1):
            answer = self.registry.ListLayers(registry_pb.ListLayersRequest(page_size=3, page_token=token), timeout=60)
            listed += [layer.name for layer in answer.layers]
            self.assertLessEqual(len(answer.layers), 3)
            token = answer.next_page_token
            if page == 2:  # what comes and goes does not move a page
                self.registry.DeleteLayer(registry_pb.DeleteLayerRequest(name=names[0]), timeout=60)
            if not token:
                break
        self.assertEqual(listed, sorted(names))
        names.remove(names[0])

        def got(**query):
            return {layer.name for layer in self.layers(page_size=1000, **query)}

        self.assertEqual(got(parent='models/a'), {name for name in names if name.startswith('models/a/')})
        self.assertEqual(got(parent='models/-'), set(names))
        self.assertEqual(got(parent='models/none'), set())
        self.assertEqual(got(filter='*.mlp'), {name for name in names if name.endswith('mlp')})
        self.assertEqual(got(filter='kind:normalize model.layers.1*'),
                         {name for name in names if name.endswith('layers.1.norm')})
        self.assertEqual(got(filter='source:checkpoint'), set())
        self.assertEqual(got(filter='state:prepared'), set())
        self.assertEqual(got(filter='state:usable source:upload'), set(names))
        self.assertEqual(got(filter=names[1].rpartition('/')[2], parent='models/b'),
                         {names[1].replace('models/a', 'models/b')})
        for query, field in ((dict(filter='kind:other'), 'filter'), (dict(filter='colour:red'), 'filter'),
                             (dict(page_size=-1), 'page_size'), (dict(page_token='rubbish'), 'page_token'),
                             (dict(parent='a'), 'parent'), (dict(parent='models/a/layers'), 'parent'),
                             (dict(page_token=base64.b64encode(b'models/a').decode()), 'page_token')):
            error = error_of(self.registry.ListLayers, registry_pb.ListLayersRequest(**query))
            self.assertEqual((error.code.name, [v[0] for v in error.fields]), ('INVALID_ARGUMENT', [field]), query)

    def test_what_is_not_there(self):
        for call, request in ((self.registry.GetLayer, registry_pb.GetLayerRequest),
                              (self.registry.DeleteLayer, registry_pb.DeleteLayerRequest)):
            for name in (NAME, 'models/../layers/x', 'x' * 20000):
                error = error_of(call, request(name=name))
                self.assertEqual((error.code.name, error.reason), ('NOT_FOUND', 'LAYER_NOT_FOUND'), name[:50])
            error = error_of(call, request())
            self.assertEqual((error.code.name, error.reason), ('INVALID_ARGUMENT', 'MISSING'))
        stream = self.registry.DownloadLayer(registry_pb.DownloadLayerRequest(name=NAME), timeout=60)
        error = error_of(lambda timeout: list(stream))
        self.assertEqual((error.code.name, error.reason, error.fields[0][0]), ('NOT_FOUND', 'LAYER_NOT_FOUND', 'name'))


@unittest.skipUnless((resident.SHARED / 'data').is_dir(), f'no data in {resident.SHARED} (LAYERD_TEST_DATA)')
class Checkpoints(unittest.TestCase):
    def test_a_checkpoint_is_listed_with_what_was_inferred_and_cannot_be_changed(self):
        with Daemon(f'--models={resident.stories_models()}', f'--layer_store={harness.scratch_dir()}').ready() as daemon:
            registry = resident.registry(daemon)
            name = 'models/stories260k/layers/model.layers.0.mlp'
            layer = registry.GetLayer(registry_pb.GetLayerRequest(name=name), timeout=60)
            self.assertEqual((layer.source, layer.etag, layer.content_hash, layer.prepared),
                             (registry_pb.LAYER_SOURCE_CHECKPOINT, '', '', False))
            said = {inference.option: (inference.value, inference.source) for inference in layer.inferences}
            self.assertEqual(said['activation'], ('silu', 'config.json: hidden_act'))
            self.assertEqual([w.tensor for w in layer.weights],
                             [f'model.layers.0.mlp.{part}_proj.weight' for part in ('gate', 'up', 'down')])
            x = tensor(np.ones((1, 64)))
            hash_ = daemon.stub().FeedForward(layer_pb.FeedForwardRequest(input=x, layer=name), timeout=60).layer_hash
            layer = registry.GetLayer(registry_pb.GetLayerRequest(name=name), timeout=60)
            self.assertEqual((layer.content_hash, layer.prepared), (hash_, True))
            for error in (error_of(registry.DeleteLayer, registry_pb.DeleteLayerRequest(name=name)),
                          error_of(registry.CreateLayer, resident.messages(
                              'models/stories260k/layers/mine', RMS_NORM, safetensors({'gamma': tensor([1.0])})))):
                self.assertEqual((error.code.name, error.reason), ('FAILED_PRECONDITION', 'READ_ONLY'), error)
            header, got, body = resident.download(registry, name)
            self.assertEqual(got, hash_)
            file = harness.scratch_dir() / 'layer.safetensors'
            file.write_bytes(body)
            self.assertEqual(content_hash(header.feed_forward, resident.read_safetensors(file)), hash_)


if __name__ == '__main__':
    unittest.main()
