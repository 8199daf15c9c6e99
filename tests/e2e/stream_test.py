"""StreamNormalize and StreamFeedForward: the bits of single calls, in order, in bounded memory, and errors that end them."""
import itertools
import os
import random
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np

import harness
import resident
from harness import BFLOAT16, FLOAT32, Daemon, RichError, layer_pb, tensor

INVALID = grpc.StatusCode.INVALID_ARGUMENT
# Streams that are cancelled; the patient, under AddressSanitizer, take 10000.
CANCELLED = int(os.environ.get('LAYERD_TEST_CANCELLED', '300'))
NORM = layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_LAYER_NORM, gate_position=layer_pb.GATE_POSITION_LAST,
                              rounding=layer_pb.NORM_ROUNDING_AFTER_GAMMA)
SWIGLU = layer_pb.FeedForwardSpec(form=layer_pb.FEED_FORWARD_FORM_GATED, activation=layer_pb.ACTIVATION_SILU,
                                  packing=layer_pb.GATE_UP_PACKING_SEPARATE, layout=layer_pb.WEIGHT_LAYOUT_OUT_IN)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def first_norm(rows, width=64, dtype=FLOAT32):
    call = layer_pb.NormalizeRequest(input=tensor(normal(1, rows, width), dtype), spec=NORM,
                                     gamma=tensor(normal(2, width), dtype), gate=tensor(normal(3, rows, width), dtype),
                                     residual=tensor(normal(4, rows, width), dtype))
    return layer_pb.StreamNormalizeRequest(call=call)


def more_norm(seed, rows, width=64, dtype=FLOAT32):
    return layer_pb.StreamNormalizeRequest(input=tensor(normal(seed, rows, width), dtype),
                                           gate=tensor(normal(seed + 1, rows, width), dtype),
                                           residual=tensor(normal(seed + 2, rows, width), dtype))


# Without gamma's rounding: inputs are float32.
RMS_NORM = layer_pb.NormalizeSpec(kind=layer_pb.NORM_KIND_RMS_NORM)


def plain_norm(rows, width):
    """A stream's first message with no gate, no residual and no gamma."""
    return layer_pb.StreamNormalizeRequest(call=layer_pb.NormalizeRequest(
        input=tensor(np.ones((rows, width))), spec=RMS_NORM))


class SameBits(unittest.TestCase):
    def test_each_message_has_the_answer_of_a_call(self):
        for dtype in (FLOAT32, BFLOAT16):
            with Daemon() as daemon:
                stub = daemon.stub()
                for first_rows in (0, 3):
                    first = first_norm(first_rows, dtype=dtype)
                    messages = [first] + [more_norm(10 * i, rows, dtype=dtype) for i, rows in enumerate((1, 70, 5, 0))]
                    answers = list(stub.StreamNormalize(iter(messages), timeout=60))
                    self.assertEqual(len(answers), len(messages))
                    for message, answer in zip(messages, answers):
                        call = layer_pb.NormalizeRequest()
                        call.CopyFrom(first.call)
                        if message is not first:
                            for name in ('input', 'gate', 'residual'):
                                getattr(call, name).CopyFrom(getattr(message, name))
                        self.assertEqual(answer, stub.Normalize(call, timeout=60))

    def test_feed_forward_inline(self):
        weights = layer_pb.FeedForwardWeights(gate=tensor(normal(1, 96, 64)), up=tensor(normal(2, 96, 64)),
                                              down=tensor(normal(3, 64, 96)))
        call = layer_pb.FeedForwardRequest(input=tensor(normal(4, 2, 64)), spec=SWIGLU, weights=weights,
                                           intermediates=True)
        chunks = [tensor(normal(i, rows, 64)) for i, rows in ((5, 1), (6, 33), (7, 2))]
        with Daemon() as daemon:
            stub = daemon.stub()
            messages = [layer_pb.StreamFeedForwardRequest(call=call)]
            messages += [layer_pb.StreamFeedForwardRequest(input=chunk) for chunk in chunks]
            answers = list(stub.StreamFeedForward(iter(messages), timeout=60))
            want = [stub.FeedForward(call, timeout=60)]
            for chunk in chunks:
                call.input.CopyFrom(chunk)
                want.append(stub.FeedForward(call, timeout=60))
            self.assertEqual(answers, want)

    def test_a_message_is_answered_before_the_next_one_is_sent(self):
        with Daemon() as daemon:
            answered = threading.Semaphore(0)

            def ask():
                for i in range(5):
                    yield first_norm(1) if i == 0 else more_norm(i, 2)
                    if not answered.acquire(timeout=30):
                        return
            count = 0
            for _ in daemon.stub().StreamNormalize(ask(), timeout=60):
                count += 1
                answered.release()
            self.assertEqual(count, 5)


class Memory(unittest.TestCase):
    def test_a_stream_larger_than_the_budget_takes_little(self):
        chunk = layer_pb.StreamNormalizeRequest(input=tensor(normal(1, 256, 4096)))  # 4 MiB
        with Daemon('--message_memory_mib=64') as daemon:
            stub = daemon.stub()
            list(stub.StreamNormalize(iter([plain_norm(0, 4096), chunk]), timeout=60))
            before = daemon.peak_memory_bytes()
            answers = stub.StreamNormalize(itertools.chain([plain_norm(0, 4096)], itertools.repeat(chunk, 100)),
                                           timeout=300)
            self.assertEqual(sum(answer.output.shape[0] for answer in answers), 25600)
            self.assertLess(daemon.peak_memory_bytes() - before, (100 << 20) + harness.SANITIZER_BYTES)

    def test_a_caller_who_does_not_read_is_made_to_wait(self):
        chunk = layer_pb.StreamNormalizeRequest(input=tensor(normal(1, 256, 4096)))
        with Daemon() as daemon:
            sent = [0]

            def ask():
                yield plain_norm(0, 4096)
                while sent[0] < 200:
                    sent[0] += 1
                    yield chunk
            before = daemon.peak_memory_bytes()
            answers = daemon.stub().StreamNormalize(ask(), timeout=120)
            last, still = -1, 0
            while still < 20:  # two seconds without another message
                time.sleep(0.1)
                still = still + 1 if sent[0] == last else 0
                last = sent[0]
            self.assertLess(last, 100)
            self.assertLess(daemon.peak_memory_bytes() - before, (200 << 20) + harness.SANITIZER_BYTES)
            self.assertEqual(daemon.stub().Normalize(plain_norm(1, 8).call, timeout=60).output.shape, [1, 8])
            self.assertEqual(sum(1 for _ in answers), 201)  # and goes on when they are read


class Errors(unittest.TestCase):
    def failure(self, stub, messages):
        """(answers before it, the error) of a stream."""
        answers = stub.StreamNormalize(iter(messages), timeout=20)
        count = 0
        with self.assertRaises(grpc.RpcError) as caught:
            for _ in answers:
                count += 1
        return count, RichError(caught.exception)

    def test_an_error_ends_the_stream_after_the_answers_before_it(self):
        bad = more_norm(1, 2)
        bad.input.shape[0] = 3
        first_in_the_middle = first_norm(1)
        rows_in_the_first = first_norm(1)
        rows_in_the_first.input.CopyFrom(tensor(normal(1, 1, 64)))
        empty = layer_pb.StreamNormalizeRequest()
        wide = more_norm(1, 2, width=65)
        unknown = first_norm(1)
        unknown.call.ClearField('spec')
        unknown.call.ClearField('gamma')
        unknown.call.layer = 'models/m/layers/l'
        with Daemon() as daemon:
            stub = daemon.stub()
            for messages, count, code, field in (
                    ([first_norm(1), more_norm(5, 1), bad, more_norm(6, 1)], 2, INVALID, 'input.data'),
                    ([first_norm(1), first_in_the_middle], 1, INVALID, 'call'),
                    ([rows_in_the_first], 0, INVALID, 'input'),
                    ([empty], 0, INVALID, 'call'),
                    ([first_norm(1), empty], 1, INVALID, 'input'),
                    ([first_norm(1), wide], 1, INVALID, 'input.shape'),
                    ([unknown], 0, grpc.StatusCode.NOT_FOUND, None)):
                got, error = self.failure(stub, messages)
                self.assertEqual((got, error.code), (count, code), error)
                if field:
                    self.assertEqual([path for path, _, _ in error.fields], [field])
            self.assertEqual(list(stub.StreamNormalize(iter([]), timeout=60)), [])

    def test_an_error_reaches_a_caller_who_waits_for_it(self):
        # The stream is still being read then: the caller has not said that this was all.
        with Daemon() as daemon:
            stub, over = daemon.stub(), threading.Event()
            for messages, count, field in (([first_norm(1), more_norm(1, 2, width=65)], 1, 'input.shape'),
                                           ([first_norm(1), layer_pb.StreamNormalizeRequest()], 1, 'input'),
                                           ([layer_pb.StreamNormalizeRequest()], 0, 'call')):
                def ask(messages=messages):
                    yield from messages
                    over.wait(60)
                got, error = self.failure(stub, ask())
                self.assertEqual((got, error.code, [path for path, _, _ in error.fields]), (count, INVALID, [field]))
            over.set()

    def test_rows_of_another_kind_than_the_first_are_refused(self):
        with Daemon() as daemon:
            for rows, field in ((tensor(np.ones((2, 8)), BFLOAT16), 'input.dtype'), (tensor(np.ones((2, 9))), 'input.shape')):
                messages = [plain_norm(1, 8), layer_pb.StreamNormalizeRequest(input=rows)]
                answers = daemon.stub().StreamNormalize(iter(messages), timeout=60)
                next(answers)
                with self.assertRaises(grpc.RpcError) as raised:
                    next(answers)
                error = RichError(raised.exception)
                self.assertEqual((error.code, error.fields[0][0]), (INVALID, field), error)

    def test_rows_have_a_residual_where_the_first_had_one(self):
        def failure(stub, with_residual):
            first, then = plain_norm(1, 8), layer_pb.StreamNormalizeRequest(input=tensor(np.ones((2, 8))))
            (first.call if with_residual else then).residual.CopyFrom(tensor(np.ones((1 if with_residual else 2, 8))))
            answers = stub.StreamNormalize(iter([first, then]), timeout=60)
            next(answers)
            with self.assertRaises(grpc.RpcError) as raised:
                next(answers)
            error = RichError(raised.exception)
            return error.code, error.fields[0][0], error.reason
        with Daemon() as daemon:
            self.assertEqual(failure(daemon.stub(), True), (INVALID, 'residual', 'MISSING'))
            self.assertEqual(failure(daemon.stub(), False), (INVALID, 'residual', 'UNEXPECTED_FIELD'))

    def test_a_chunk_that_is_too_large_is_refused_by_name(self):
        chunk = layer_pb.StreamNormalizeRequest(input=tensor(np.ones((300, 4096))))
        with Daemon() as daemon:
            count, error = self.failure(daemon.stub(), [plain_norm(1, 4096), chunk])
            self.assertEqual((count, error.code.name, error.reason), (1, 'RESOURCE_EXHAUSTED', 'MESSAGE_TOO_LARGE'))

    def test_a_deadline_ends_it(self):
        with Daemon() as daemon:
            stop = threading.Event()

            def ask():
                yield plain_norm(1, 64)
                stop.wait(30)
            answers = daemon.stub().StreamNormalize(ask(), timeout=1)
            self.assertEqual(next(answers).output.shape, [1, 64])
            with self.assertRaises(grpc.RpcError) as caught:
                next(answers)
            self.assertEqual(caught.exception.code().name, 'DEADLINE_EXCEEDED')
            stop.set()

    def test_cancelled_at_random_moments_and_nothing_is_left(self):
        rng = random.Random(1)
        chunk = layer_pb.StreamNormalizeRequest(input=tensor(normal(1, 16, 1024)))
        with Daemon() as daemon:
            stub = daemon.stub()
            for _ in range(CANCELLED):
                answers = stub.StreamNormalize(itertools.chain([plain_norm(1, 1024)], itertools.repeat(chunk, 20)),
                                               timeout=60)
                try:
                    for _ in range(rng.randrange(4)):
                        next(answers)
                    time.sleep(rng.random() * 0.003)
                except (StopIteration, grpc.RpcError):
                    pass
                answers.cancel()
            self.assertEqual(len(list(stub.StreamNormalize(iter([plain_norm(1, 8)]), timeout=60))), 1)
            self.assertEqual(daemon.stop(), 0)  # no call is waited for

    def test_pings_during_a_stream_that_stands_still_are_no_reason_to_end_it(self):
        with Daemon() as daemon:
            channel = harness.open_channel(daemon.address, ('grpc.keepalive_time_ms', 1500),
                                           ('grpc.http2.max_pings_without_data', 0))
            go_on = threading.Event()

            def messages():
                yield plain_norm(1, 8)
                go_on.wait(60)
                yield layer_pb.StreamNormalizeRequest(input=tensor(np.ones((2, 8))))
            answers = harness.layer_grpc.LayerServiceStub(channel).StreamNormalize(messages(), timeout=60)
            next(answers)
            time.sleep(9)  # gRPC ends a connection at the third ping that it finds superfluous
            go_on.set()
            self.assertEqual([list(answer.output.shape) for answer in answers], [[2, 8]])
            channel.close()

    def test_sigterm_lets_streams_finish(self):
        with Daemon('--grace_s=30') as daemon:
            go_on = threading.Event()

            def ask():
                yield plain_norm(1, 64)
                go_on.wait(30)
                yield layer_pb.StreamNormalizeRequest(input=tensor(np.ones((2, 64))))
            answers = daemon.stub().StreamNormalize(ask(), timeout=60)
            next(answers)
            daemon.send_signal(15)
            while 'draining' not in daemon.log():
                time.sleep(0.01)
            go_on.set()
            self.assertEqual([answer.output.shape[0] for answer in answers], [2])
            self.assertEqual(daemon.wait(30), 0)


class ByName(unittest.TestCase):
    def test_a_layer_that_changes_meanwhile_ends_it(self):
        # The rows are many enough that a worker computes them, and so the stream is being read again when the error comes;
        # the caller waits for it and has not said that this was all.
        rows = tensor(normal(1, 100, 4096))
        with tempfile.TemporaryDirectory() as store, Daemon(f'--layer_store={store}').ready() as daemon:
            name, registry = 'models/m/layers/norm', resident.registry(daemon)
            old = resident.upload(registry, name, resident.RMS_NORM, {'gamma': tensor(np.ones(4096))})
            go_on, over = threading.Event(), threading.Event()

            def ask():
                yield layer_pb.StreamNormalizeRequest(call=layer_pb.NormalizeRequest(input=rows, layer=name))
                go_on.wait(30)
                yield layer_pb.StreamNormalizeRequest(input=rows)
                over.wait(60)
            answers = daemon.stub().StreamNormalize(ask(), timeout=20)
            self.assertEqual(next(answers).layer_hash, old.content_hash)
            resident.upload(registry, name, resident.RMS_NORM, {'gamma': tensor(np.full(4096, 2.0))}, etag=old.etag)
            go_on.set()
            with self.assertRaises(grpc.RpcError) as caught:
                next(answers)
            over.set()
            error = RichError(caught.exception)
            self.assertEqual((error.code.name, error.reason), ('ABORTED', 'LAYER_CHANGED'))


if __name__ == '__main__':
    unittest.main()
