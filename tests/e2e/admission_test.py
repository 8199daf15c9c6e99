"""Who is let in, who waits and who is turned away: memory for messages, deadlines, callers who stall, full queues."""
import concurrent.futures
import socket
import threading
import time
import unittest

import grpc
import numpy as np

import harness
from harness import (BFLOAT16, KEEP_NOTHING_FREED, SANITIZER_BYTES, Daemon, RichError, error_of, layer_pb, norm_request,
                     plain_request)

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
EXPIRED = grpc.StatusCode.DEADLINE_EXCEEDED
NORMALIZE = '/layerd.v1.LayerService/Normalize'


def slow_request(rows, seed=1):
    """A call that takes a thread long: a layer computed again in float64. Needs SLOW_ALLOWED."""
    rng = np.random.default_rng(seed)
    request = plain_request(rng.standard_normal((rows, 512)), rng.standard_normal((512, 512)),
                            rng.standard_normal((512, 512)), dtype=BFLOAT16)
    request.verify = True
    return request


SLOW_ALLOWED = '--max_verify_flops=1e12'


class Unread:
    """A call of Normalize whose caller sends no message, though the connection is well."""

    def __init__(self, channel, timeout=120):
        self.go_on = threading.Event()
        call = channel.stream_unary(NORMALIZE, request_serializer=layer_pb.NormalizeRequest.SerializeToString,
                                    response_deserializer=layer_pb.NormalizeResponse.FromString)
        self.future = call.future(self._messages(), timeout=timeout)

    def _messages(self):
        self.go_on.wait(120)
        yield norm_request([[3, 4]])


def call_by_hand(port, method, request, **more_headers):
    """A connection that has called `method`, and announces no more room for the answer than HTTP/2 begins with."""
    def frame(kind, flags, stream, payload):
        return len(payload).to_bytes(3, 'big') + bytes([kind, flags]) + stream.to_bytes(4, 'big') + payload
    headers = {':method': 'POST', ':scheme': 'http', ':path': method, ':authority': 'layerd', 'te': 'trailers',
               'content-type': 'application/grpc'}
    headers.update({name.replace('_', '-'): value for name, value in more_headers.items()})
    block = b''.join(bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
                     for name, value in headers.items())
    message = request.SerializeToString()
    message = bytes([0]) + len(message).to_bytes(4, 'big') + message
    assert len(message) < 65535, 'more than HTTP/2 lets send at once'
    data = [message[i:i + 16384] for i in range(0, len(message), 16384)]
    connection = socket.create_connection(('127.0.0.1', port), timeout=60)
    connection.sendall(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + frame(4, 0, 0, b'') + frame(1, 4, 1, block)
                       + b''.join(frame(0, int(part is data[-1]), 1, part) for part in data))
    return connection


def wait_until_memory_is_taken(stub):
    """Returns once a call has waited in line in vain."""
    while True:
        try:
            stub.Normalize(norm_request([[1, 2]]), timeout=0.2)
        except grpc.RpcError as error:
            if error.code() == EXPIRED:
                return


class Memory(unittest.TestCase):
    def test_twenty_requests_of_100_mib_wait_and_memory_is_flat(self):
        request = norm_request(np.ones((25, 1 << 20)))  # 100 MiB
        with Daemon('--max_message_mib=128', '--message_memory_mib=256', env=KEEP_NOTHING_FREED) as daemon:
            stubs = [daemon.stub() for _ in range(20)]
            for stub in stubs:
                stub.Normalize(norm_request([[1, 2]]), timeout=60)
            before = daemon.peak_memory_bytes()
            calls = [stub.Normalize.future(request, timeout=300) for stub in stubs]
            served = 0
            for call in calls:
                if call.code() == grpc.StatusCode.OK:
                    self.assertEqual(len(call.result().output.data), 100 << 20)
                    served += 1
                else:
                    error = RichError(call)
                    self.assertEqual((error.code, error.reason), (EXHAUSTED, 'OVERLOADED'), error)
                    self.assertGreater(error.retry_delay_s, 0)
            self.assertGreater(served, 0)
            self.assertLess(daemon.peak_memory_bytes() - before, (256 + 128 << 20) + SANITIZER_BYTES)

    def test_where_the_line_is_full_a_call_is_refused_before_it_is_read(self):
        with Daemon('--max_message_mib=64', '--message_memory_mib=128', '--queue_calls=1') as daemon:
            holder = Unread(daemon.channel())  # has the memory
            stub = daemon.stub()
            wait_until_memory_is_taken(stub)
            waiting = Unread(daemon.channel())
            while True:
                error = error_of(stub.Normalize, norm_request([[1, 2]]), timeout=0.2)
                if waiting.future.done():  # one of these calls was in the line before it
                    waiting = Unread(daemon.channel())
                elif error.code == EXHAUSTED:
                    break
            self.assertEqual((error.code, error.reason), (EXHAUSTED, 'OVERLOADED'), error)
            self.assertEqual(error.text, 'busy: 1 calls wait for memory already (--message_memory_mib)')
            self.assertEqual(error.retry_delay_s, int(error.pushback) / 1000)
            for call in (holder, waiting):
                call.go_on.set()
            for call in (holder, waiting):
                np.testing.assert_allclose(harness.array_of(call.future.result().output), [[0.848528, 1.131371]], 1e-6)
            stub.Normalize(norm_request([[1, 2]]), timeout=60)

    def test_who_goes_away_leaves_the_line(self):
        with Daemon('--message_memory_mib=1', '--stall_s=3600') as daemon:
            holder = Unread(daemon.channel())
            channel = daemon.channel()
            waiting = [Unread(channel) for _ in range(50)]
            expired = [Unread(channel, timeout=0.2) for _ in range(50)]
            for call in expired:
                self.assertEqual(call.future.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            for call in waiting:
                call.future.cancel()
            last = daemon.stub().Normalize.future(norm_request([[1, 2]]), timeout=60)
            holder.go_on.set()
            self.assertEqual(list(last.result().output.shape), [1, 2])
            holder.future.result()
            for call in waiting + expired:
                call.go_on.set()

    def test_small_calls_of_many_callers_are_all_served_where_one_message_fills_the_memory(self):
        with Daemon('--message_memory_mib=1') as daemon:
            stubs = [daemon.stub() for _ in range(16)]

            def ask(index):
                for i in range(40):
                    x = np.full((2, 8), index + i + 1.0)
                    answer = stubs[index].Normalize(norm_request(x, epsilon=0), timeout=60)
                    if not np.all(harness.array_of(answer.output) == 1):
                        return False
                return True
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                self.assertEqual(list(pool.map(ask, range(16))), [True] * 16)


class Stalls(unittest.TestCase):
    def test_a_request_that_does_not_come_gives_way_to_others_and_not_before(self):
        with Daemon('--message_memory_mib=1', '--stall_s=0.3') as daemon:
            stalled = Unread(daemon.channel())
            time.sleep(1)
            self.assertFalse(stalled.future.done())  # nobody else wants the memory
            daemon.stub().Normalize(norm_request([[1, 2]]), timeout=60)
            error = RichError(stalled.future)
            stalled.go_on.set()
            self.assertEqual((error.code, error.reason), (EXHAUSTED, 'OVERLOADED'), error)
            self.assertIn('--stall_s', error.text)

    def test_a_stream_that_is_idle_gives_way_to_others(self):
        with Daemon('--message_memory_mib=1', '--stall_s=0.3') as daemon:
            go_on = threading.Event()

            def messages():
                go_on.wait(120)
                return
                yield  # pylint: disable=unreachable
            stream = daemon.stub().StreamNormalize(messages(), timeout=120)
            time.sleep(0.5)
            daemon.stub().Normalize(norm_request([[1, 2]]), timeout=60)
            with self.assertRaises(grpc.RpcError) as raised:
                next(stream)
            go_on.set()
            error = RichError(raised.exception)
            self.assertEqual((error.code, error.reason), (EXHAUSTED, 'OVERLOADED'), error)

    def test_an_answer_that_is_not_taken_gives_way_to_others(self):
        # Small itself, and the values inside take 32 MiB: nearly all that there is for answers.
        request = plain_request(np.ones((4096, 1)), np.ones((512, 1)), np.ones((1, 512)))
        request.intermediates = True
        with Daemon('--message_memory_mib=80', '--stall_s=0.5') as daemon:
            stub = daemon.stub()
            stub.FeedForward(request, timeout=60)
            with call_by_hand(daemon.port, '/layerd.v1.LayerService/FeedForward', request) as connection:
                received = 0
                while received < 32768:  # the answer has begun, and more of it is not taken
                    received += len(connection.recv(65536))
                deadline = time.monotonic() + 60
                refused = False
                while True:
                    self.assertLess(time.monotonic(), deadline, 'refused' if refused else 'not refused')
                    try:
                        stub.FeedForward(request, timeout=60)
                        if refused:
                            break
                    except grpc.RpcError as error:
                        rich = RichError(error)
                        self.assertEqual((rich.code, rich.reason), (EXHAUSTED, 'OVERLOADED'), rich)
                        self.assertRegex(rich.text, r'busy: \d+ bytes of calls are in flight \(--message_memory_mib\)')
                        refused = True


class Time(unittest.TestCase):
    def test_a_deadline_in_the_far_future_is_none(self):
        with Daemon() as daemon:
            for timeout in ('1H', '2562000H', '3000000H', '9999999H', '99999999H'):
                with call_by_hand(daemon.port, NORMALIZE, norm_request([[1, 2]]), grpc_timeout=timeout) as connection:
                    received = b''
                    while b'grpc-status' not in received or len(received.partition(b'grpc-status')[2]) < 2:
                        part = connection.recv(65536)
                        self.assertTrue(part, received)
                        received += part
                    self.assertEqual(received.partition(b'grpc-status')[2][:2], b'\x010', timeout)

    def test_a_call_that_would_be_late_is_refused_at_once(self):
        with Daemon(SLOW_ALLOWED, '--threads=1') as daemon:
            stub, other = daemon.stub(), daemon.stub()
            for _ in range(3):
                stub.FeedForward(slow_request(100), timeout=120)  # so that its rate is known
            calls = [stub.FeedForward.future(slow_request(400), timeout=300) for _ in range(8)]
            deadline = time.monotonic() + 60
            while True:
                started = time.monotonic()
                try:
                    other.Normalize(norm_request([[1, 2]]), timeout=0.15)
                except grpc.RpcError as error:
                    rich = RichError(error)
                    if rich.code == EXHAUSTED:
                        break
                self.assertLess(time.monotonic(), deadline, 'nothing is refused')
            self.assertLess(time.monotonic() - started, 0.14)  # before its deadline
            self.assertEqual(rich.reason, 'OVERLOADED')
            self.assertIn('and the deadline is in', rich.text)
            self.assertGreater(rich.retry_delay_s, 0)
            self.assertEqual(rich.retry_delay_s, int(rich.pushback) / 1000)
            for call in calls:
                self.assertTrue(call.result().report.within_contract)
            other.Normalize(norm_request([[1, 2]]), timeout=60)

    def test_a_stream_waits_for_room_in_a_full_queue(self):
        with Daemon(SLOW_ALLOWED, '--threads=1', '--queue_calls=1') as daemon:
            stub = daemon.stub()
            x = np.random.default_rng(5).standard_normal((64, 4096))  # too large to be computed at once
            alone = stub.Normalize(norm_request(x), timeout=60).output.data
            done = threading.Event()

            def load(stub):
                while not done.is_set():
                    try:
                        stub.FeedForward(slow_request(100), timeout=120)
                    except grpc.RpcError as error:
                        if error.code() != EXHAUSTED:
                            raise
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                loads = [pool.submit(load, daemon.stub()) for _ in range(4)]
                try:
                    for _ in range(3):
                        messages = [layer_pb.StreamNormalizeRequest(call=norm_request(x))]
                        messages += [layer_pb.StreamNormalizeRequest(input=norm_request(x).input) for _ in range(9)]
                        answers = [answer.output.data for answer in stub.StreamNormalize(iter(messages), timeout=120)]
                        self.assertEqual(answers, [alone] * 10)
                finally:
                    done.set()
                for one in loads:
                    one.result()


if __name__ == '__main__':
    unittest.main()
