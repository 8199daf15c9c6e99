"""The daemon as a process: how it starts, what it logs, how it ends, and what it lives through."""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time
import unittest

import grpc
import numpy as np
from google.protobuf import descriptor_pb2

import harness
from harness import (BFLOAT16, LAYERCTL, Daemon, RichError, array_of, error_of, health_pb, layerctl, norm_request,
                     plain_request, run_layerd, scratch_dir, swiglu_request)

SERVICE = 'layerd.v1.LayerService'
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
FLAGS = ('grpc_listen', 'port_file', 'grace_s', 'max_message_mib', 'threads', 'simd', 'queue_calls',
         'batch_rows', 'batch_delay_us', 'max_verify_flops', 'log_level')
LOG_LINE = re.compile(r'ts=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=(debug|info|warning|error) event=[a-z_]+'
                      r'( [a-z_]+=("([^"\\]|\\.)*"|[^\s"=]+))*')


def slow_request(rows=500, seed=1):
    """A call of one to two seconds: small matrices, computed again in float64. Needs SLOW_ALLOWED."""
    rng = np.random.default_rng(seed)
    request = plain_request(rng.standard_normal((rows, 1024)), rng.standard_normal((1024, 1024)),
                            rng.standard_normal((1024, 1024)), dtype=BFLOAT16)
    request.verify = True
    return request


SLOW_ALLOWED = '--max_verify_flops=1e12'


def heavy_request(rows=2048, seed=1):
    """A call of some 4 GFLOP on 2 MiB of tensors."""
    rng = np.random.default_rng(seed)
    return plain_request(rng.standard_normal((rows, 64)), rng.standard_normal((8192, 64)),
                         rng.standard_normal((64, 8192)), dtype=BFLOAT16)


def until(condition, timeout_s=60):
    """Waits for the condition; False when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def wait_until_busy(daemon):
    """Returns once the daemon computes: it uses more than half of a CPU."""
    def busy():
        before = daemon.cpu_seconds()
        time.sleep(0.1)
        return daemon.cpu_seconds() - before >= 0.05
    assert until(busy), 'the daemon did not begin to compute'


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


class Addresses(unittest.TestCase):
    def one_line(self, result, *texts):
        """Asserts a failure of one line for people; what else there is, are lines of the log."""
        self.assertNotEqual(result.status, 0)
        self.assertGreater(result.status, 0, 'ended by a signal')
        lines = result.stderr.splitlines()
        plain = [line for line in lines if not LOG_LINE.fullmatch(line)]
        self.assertEqual(len(plain), 1, result.stderr)
        self.assertRegex(plain[0], r'^(layerd|ERROR): ')
        self.assertLess(len(plain[0]), 400)
        for text in texts:
            self.assertIn(text, plain[0])

    def test_port_0_is_told_in_the_port_file_and_on_standard_output(self):
        with Daemon() as daemon:
            self.assertEqual(daemon.port_file.read_text(), f'grpc {daemon.port}\n')
            self.assertEqual(daemon.stdout(), f'grpc 127.0.0.1:{daemon.port}\n')
            self.assertGreater(daemon.port, 1023)
            self.assertEqual(layerctl('health', server=daemon).stdout, 'SERVING\n')
            self.assertEqual([p.name for p in daemon.folder.iterdir() if 'partial' in p.name], [])

    def test_more_than_one_address(self):
        with Daemon(listen='127.0.0.1:0,127.0.0.1:0,localhost:0') as daemon:
            lines = daemon.port_file.read_text().splitlines()
            self.assertEqual(len(lines), 3)
            self.assertEqual(len(set(lines)), 3)
            for line in lines:
                self.assertRegex(line, r'^grpc \d+$')
                self.assertEqual(layerctl('health', server='127.0.0.1:' + line.split()[1]).status, 0)

    def test_ipv6_loopback(self):
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(('::1', 0))
        except OSError:
            self.skipTest('no IPv6 here')
        with Daemon(listen='[::1]:0') as daemon:
            self.assertEqual(daemon.stdout(), f'grpc [::1]:{daemon.port}\n')
            self.assertEqual(layerctl('health', server=f'[::1]:{daemon.port}').status, 0)

    def test_a_unix_socket(self):
        path = scratch_dir() / 'layerd.sock'
        with Daemon(listen=f'127.0.0.1:0,unix:{path}') as daemon:
            self.assertEqual(daemon.stdout().splitlines(), [f'grpc {daemon.address}', f'grpc unix:{path}'])
            self.assertEqual(daemon.port_file.read_text(), f'grpc {daemon.port}\n')
            for server in (daemon.address, f'unix:{path}'):
                result = layerctl('--json', 'normalize', '--kind', 'rms_norm', '--input', '[3,4]', '--eps', '0',
                                  server=server)
                self.assertEqual(result.status, 0, result)
                self.assertAlmostEqual(json.loads(result.stdout)['output']['values'][0], 3 / np.sqrt(12.5), 6)
            self.assertEqual(daemon.stop(), 0)

    def test_a_unix_socket_alone(self):
        path = scratch_dir() / 's'
        with Daemon(listen=f'unix:{path}') as daemon:
            self.assertEqual(daemon.port_file.read_text(), '')
            self.assertEqual(layerctl('health', server=f'unix:{path}').status, 0)
            self.assertEqual(daemon.stop(), 0)
        self.assertNotEqual(layerctl('health', '--timeout-s', '2', server=f'unix:{path}').status, 0)

    def test_a_busy_port_ends_it_with_a_line_that_names_the_address(self):
        with socket.socket() as other:
            other.bind(('127.0.0.1', 0))
            other.listen()
            address = f'127.0.0.1:{other.getsockname()[1]}'
            self.one_line(run_layerd(f'--grpc_listen={address}'), address)
            self.one_line(run_layerd(f'--grpc_listen=127.0.0.1:0,{address}'), address)
        with Daemon() as daemon:
            self.one_line(run_layerd(f'--grpc_listen={daemon.address}'), daemon.address)
            self.assertEqual(layerctl('health', server=daemon).status, 0)

    def test_an_address_of_another_machine(self):
        self.one_line(run_layerd('--grpc_listen=192.0.2.1:0'), '192.0.2.1:0')

    def test_a_second_server_on_a_socket_is_refused_and_the_first_serves_on(self):
        path = scratch_dir() / 's'
        with Daemon(listen=f'unix:{path}') as daemon:
            self.one_line(run_layerd(f'--grpc_listen=unix:{path}'), str(path))
            self.assertTrue(daemon.alive())
            self.assertEqual(layerctl('health', server=f'unix:{path}').status, 0)

    def test_a_socket_left_by_kill_9_is_taken_over(self):
        path = scratch_dir() / 's'
        for _ in range(2):
            with Daemon(listen=f'unix:{path}') as daemon:
                daemon.kill()
            self.assertTrue(path.is_socket())
        with Daemon(listen=f'unix:{path}') as daemon:
            self.assertEqual(layerctl('health', server=f'unix:{path}').status, 0)
            self.assertEqual(daemon.stop(), 0)

    def test_a_file_that_is_no_socket_is_left_alone(self):
        folder = scratch_dir()
        (folder / 'notes').write_text('mine')
        (folder / 'folder').mkdir()
        for name in ('notes', 'folder'):
            self.one_line(run_layerd(f'--grpc_listen=unix:{folder / name}'), str(folder / name))
        self.assertEqual((folder / 'notes').read_text(), 'mine')
        self.one_line(run_layerd(f'--grpc_listen=unix:{folder}/no/such/s'), f'{folder}/no/such/s')

    def test_a_port_file_that_cannot_be_written(self):
        self.one_line(run_layerd('--grpc_listen=127.0.0.1:0', '--port_file=/no/such/folder/port'), '--port_file',
                      '/no/such/folder/port')

    def test_bad_flags_name_the_flag(self):
        for flag, name in (('--no_such_flag=1', 'no_such_flag'), ('--threads=many', 'threads'),
                           ('--threads=-1', '--threads'), ('--threads=1025', '--threads'), ('--threads=', 'threads'),
                           ('--grace_s=-1', '--grace_s'), ('--grace_s=3601', '--grace_s'), ('--grace_s=x', 'grace_s'),
                           ('--grace_s=nan', '--grace_s'), ('--max_message_mib=0', '--max_message_mib'),
                           ('--max_message_mib=1024', '--max_message_mib'),
                           ('--max_message_mib=99999999999', 'max_message_mib'), ('--queue_calls=0', '--queue_calls'),
                           ('--queue_calls=1000001', '--queue_calls'), ('--batch_rows=0', '--batch_rows'),
                           ('--batch_rows=1000001', '--batch_rows'), ('--batch_delay_us=-1', '--batch_delay_us'),
                           ('--batch_delay_us=1000001', '--batch_delay_us'),
                           ('--max_verify_flops=-1', '--max_verify_flops'),
                           ('--max_verify_flops=nan', '--max_verify_flops'), ('--log_level=loud', '--log_level'),
                           ('--simd=sse9', '--simd'), ('--simd=', '--simd'), ('--grpc_listen=nowhere', '--grpc_listen'),
                           ('--grpc_listen=', '--grpc_listen'), ('--grpc_listen=127.0.0.1:65536', '--grpc_listen'),
                           ('--grpc_listen=127.0.0.1:-1', '--grpc_listen'), ('--grpc_listen=:5', '--grpc_listen'),
                           ('--grpc_listen=127.0.0.1:0,', '--grpc_listen'), ('--grpc_listen=unix:', '--grpc_listen'),
                           ('--grpc_listen=unix:/' + 'x' * 120, '--grpc_listen'), ('--flagfile=/no/such', 'flagfile'),
                           ('serve', 'serve')):
            with self.subTest(flag=flag):
                self.one_line(run_layerd(flag), name)

    def test_bad_values_of_the_environment_name_the_flag(self):
        self.one_line(run_layerd(env={'LAYERD_THREADS': 'many'}), 'threads')
        self.one_line(run_layerd(env={'LAYERD_QUEUE_CALLS': '0'}), '--queue_calls')


class Flags(unittest.TestCase):
    def threads_of(self, daemon):
        return re.search(r'event=listening .*threads=(\d+)', daemon.log()).group(1)

    def test_from_the_environment(self):
        with Daemon(env={'LAYERD_THREADS': '3', 'LAYERD_MAX_MESSAGE_MIB': '1'}) as daemon:
            self.assertEqual(self.threads_of(daemon), '3')
            error = error_of(daemon.stub().Normalize, norm_request(np.ones((1, 300_000))))
            self.assertEqual(error.reason, 'MESSAGE_TOO_LARGE')
        with Daemon(listen=None, env={'LAYERD_GRPC_LISTEN': '127.0.0.1:0', 'LAYERD_SIMD': 'scalar'}) as daemon:
            self.assertIn('simd=scalar', daemon.log())

    def test_from_a_file(self):
        flags = scratch_dir() / 'flags'
        flags.write_text('# three threads\n--threads=3\n--simd=scalar\n')
        for arguments in ([f'--flagfile={flags}'], ['--flagfile', str(flags)]):
            with Daemon(*arguments) as daemon:
                self.assertEqual(self.threads_of(daemon), '3')
                self.assertIn('simd=scalar', daemon.log())

    def test_command_line_over_environment_over_file(self):
        flags = scratch_dir() / 'flags'
        flags.write_text('--threads=3\n')
        with Daemon(f'--flagfile={flags}', env={'LAYERD_THREADS': '4'}) as daemon:
            self.assertEqual(self.threads_of(daemon), '4')
        with Daemon('--threads=5', f'--flagfile={flags}', env={'LAYERD_THREADS': '4'}) as daemon:
            self.assertEqual(self.threads_of(daemon), '5')
        with Daemon('--threads=5', f'--flagfile={flags}') as daemon:
            self.assertEqual(self.threads_of(daemon), '5')

    def test_help_lists_every_flag_with_default_and_meaning(self):
        text = run_layerd('--help').stdout
        for flag in FLAGS:
            entry = re.search(rf'^ +--{flag} +\(default: (\S+)\)\n +(.*)$', text, re.MULTILINE)
            self.assertIsNotNone(entry, f'--{flag} in {text}')
            self.assertGreater(len(entry.group(2)), 20)
        for unit in ('Seconds', 'MiB', 'floating-point', 'Calls', 'threads'):
            self.assertIn(unit, text)
        self.assertIn('LAYERD_<FLAG>', text)
        self.assertIn('--flagfile', text)

    def test_asking_for_help_is_no_failure(self):
        self.assertEqual(run_layerd('--help').status, 0)

    def test_help_shows_no_path_of_the_machine_that_built_it(self):
        self.assertNotIn(str(harness.SOURCE_DIR).lstrip('/'), run_layerd('--help').stdout)

    def test_version(self):
        result = run_layerd('--version')
        self.assertEqual(result.status, 0)
        self.assertRegex(result.stdout, r'^layerd \d+\.\d+\.\d+\n$')


class Logs(unittest.TestCase):
    def test_every_line_is_structured(self):
        with Daemon('--log_level=debug') as daemon:
            layerctl('health', server=daemon)
            layerctl('normalize', '--kind', 'rms_norm', '--input', '[1,2]', server=daemon)
            self.assertEqual(daemon.stop(), 0)
            lines = daemon.log().splitlines()
            for line in lines:
                self.assertRegex(line, LOG_LINE)
                self.assertTrue(LOG_LINE.fullmatch(line), line)
            events = [re.search(r'event=(\w+)', line).group(1) for line in lines]
            for event in ('openblas', 'listening', 'draining', 'stopped'):
                self.assertIn(event, events)
            self.assertIn(f'address=127.0.0.1:{daemon.port}', daemon.log())
            self.assertRegex(daemon.log(), r'event=openblas version="OpenBLAS.*" core=\w+ ')
            self.assertIn('signal=SIGTERM', daemon.log())

    def test_the_level_leaves_lines_out(self):
        with Daemon('--log_level=error') as daemon:
            self.assertEqual(daemon.stop(), 0)
            self.assertEqual(daemon.log(), '')


class SameBits(unittest.TestCase):
    CALLS = (('normalize', '--kind', 'rms_norm', '--seed', '3', '--rows', '5', '--dim', '1031'),
             ('normalize', '--kind', 'layer_norm', '--seed', '3', '--rows', '3', '--dim', '777', '--dtype', 'bfloat16',
              '--rounding', 'before_gamma'),
             ('feedforward', '--seed', '1', '--dim', '300', '--hidden', '517', '--rows', '5'),
             ('feedforward', '--seed', '2', '--dim', '512', '--hidden', '600', '--rows', '40'),
             ('feedforward', '--seed', '2', '--dim', '129', '--hidden', '65', '--rows', '9', '--dtype', 'float16',
              '--activation', 'gelu_tanh', '--form', 'plain', '--biases'))

    def answers(self, daemon):
        answers = []
        for call in self.CALLS:
            result = layerctl('--json', *call, '--intermediates', server=daemon)
            self.assertEqual(result.status, 0, result)
            answers.append(result.stdout)
        return answers

    def test_on_every_instruction_set(self):
        with Daemon() as daemon:
            expected = self.answers(daemon)
        ran = []
        for simd in ('scalar', 'avx2', 'avx512'):
            try:
                daemon = Daemon(f'--simd={simd}')
            except RuntimeError as error:
                self.assertIn(f'--simd: this CPU does not have {simd}', str(error))
                continue
            with daemon:
                self.assertIn(f'simd={simd}', daemon.log())
                self.assertEqual(self.answers(daemon), expected, simd)
                ran.append(simd)
        self.assertIn('scalar', ran)

    def test_with_an_openblas_that_does_not_follow_the_order(self):
        with Daemon() as daemon:
            expected = self.answers(daemon)
        with Daemon(env={'OPENBLAS_CORETYPE': 'Prescott'}) as daemon:
            self.assertIn('core=Prescott', daemon.log())
            self.assertIn('follows_order=no', daemon.log())
            self.assertIn('used=no', daemon.log())
            self.assertRegex(daemon.log(), 'level=warning event=openblas_not_used reason=')
            self.assertEqual(self.answers(daemon), expected)

    def test_with_any_number_of_threads(self):
        with Daemon('--threads=1') as one, Daemon('--threads=5') as five:
            self.assertEqual(self.answers(one), self.answers(five))


class Draining(unittest.TestCase):
    def expected_output(self, request):
        with Daemon(SLOW_ALLOWED) as other:
            return other.stub().FeedForward(request, timeout=120).output.data

    def drain(self, number):
        request = slow_request()
        expected = self.expected_output(request)
        with Daemon(SLOW_ALLOWED, '--grace_s=120') as daemon:
            stub, health = daemon.stub(), daemon.health()
            seen = []
            serving = threading.Event()

            def watch():
                try:
                    for answer in health.Watch(health_pb.HealthCheckRequest(service=SERVICE)):
                        seen.append((answer.status, time.monotonic()))
                        serving.set()
                except grpc.RpcError as error:
                    seen.append((error.code(), time.monotonic()))
            watcher = threading.Thread(target=watch)
            watcher.start()
            self.assertTrue(serving.wait(60))
            call = stub.FeedForward.future(request, timeout=120)
            answered_at = []
            call.add_done_callback(lambda _: answered_at.append(time.monotonic()))
            wait_until_busy(daemon)
            daemon.send_signal(number)
            self.assertTrue(until(lambda: len(seen) >= 2))
            self.assertFalse(call.done(), 'the call was too quick to tell anything')
            error = error_of(stub.Normalize, norm_request([[1, 2]]))
            self.assertEqual((error.code, error.reason, error.domain), (UNAVAILABLE, 'DRAINING', 'layerd'), error)
            self.assertEqual(call.result(timeout=120).output.data, expected)
            self.assertTrue(call.result().report.within_contract)
            self.assertEqual(daemon.wait(60), 0)
            watcher.join(60)
            self.assertFalse(watcher.is_alive(), 'the watch hangs')
            self.assertEqual([status for status, _ in seen[:2]],
                             [health_pb.HealthCheckResponse.SERVING, health_pb.HealthCheckResponse.NOT_SERVING])
            self.assertLess(seen[1][1], answered_at[0])
            self.assertIn('event=stopped', daemon.log())

    def test_sigterm_says_not_serving_answers_what_is_in_flight_and_ends_with_0(self):
        self.drain(signal.SIGTERM)

    def test_sigint_does_the_same(self):
        self.drain(signal.SIGINT)

    def test_new_calls_are_told_unavailable_in_layerctl_too(self):
        with Daemon(SLOW_ALLOWED, '--grace_s=120') as daemon:
            call = daemon.stub().FeedForward.future(slow_request(1000), timeout=120)
            wait_until_busy(daemon)
            daemon.send_signal(signal.SIGTERM)
            self.assertTrue(until(lambda: 'event=draining' in daemon.log()))
            result = layerctl('normalize', '--kind', 'rms_norm', '--input', '[1,2]', server=daemon)
            self.assertFalse(call.done(), 'the call was too quick to tell anything')
            self.assertIn(result.status, (3, 4), result)
            self.assertIn('UNAVAILABLE', result.stderr)
            health = layerctl('health', server=daemon)
            self.assertIn(health.status, (3, 4), health)
            call.result(timeout=120)
            self.assertEqual(daemon.wait(60), 0)

    def test_an_idle_daemon_with_an_open_watch_ends_at_once(self):
        with Daemon(SLOW_ALLOWED, '--grace_s=60') as daemon:
            watches = [daemon.health().Watch(health_pb.HealthCheckRequest(service=name))
                       for name in ('', SERVICE, 'no.such.Service')]
            for watch in watches:
                next(watch)
            started = time.monotonic()
            self.assertEqual(daemon.stop(timeout_s=50), 0)
            self.assertLess(time.monotonic() - started, 20)

    def test_calls_that_outlast_the_grace_are_cancelled(self):
        with Daemon(SLOW_ALLOWED, '--grace_s=1', '--threads=1') as daemon:
            stub = daemon.stub()
            calls = [stub.FeedForward.future(slow_request(3000), timeout=300) for _ in range(4)]
            wait_until_busy(daemon)
            started = time.monotonic()
            self.assertEqual(daemon.stop(timeout_s=60), 0)
            self.assertGreater(time.monotonic() - started, 0.9)
            self.assertLess(time.monotonic() - started, 20)
            for call in calls:
                self.assertIn(call.code(), (UNAVAILABLE, grpc.StatusCode.CANCELLED))
            self.assertRegex(daemon.log(), 'level=warning event=stopped')

    def test_calls_in_line_for_memory_are_told_at_once(self):
        with Daemon('--message_memory_mib=1', '--grace_s=2') as daemon:
            go_on = threading.Event()

            def messages():
                go_on.wait(60)
                yield norm_request([[1, 2]])
            # Its message does not come, and it has all of the memory.
            holder = daemon.channel().stream_unary('/layerd.v1.LayerService/Normalize').future(messages(), timeout=60)
            stub = daemon.stub()

            def taken():
                try:
                    stub.Normalize(norm_request([[1, 2]]), timeout=0.2)
                except grpc.RpcError as error:
                    return error.code() == DEADLINE_EXCEEDED
                return False
            self.assertTrue(until(taken))
            waiting = stub.Normalize.future(norm_request([[1, 2]]), timeout=60)
            time.sleep(1)
            self.assertFalse(waiting.done())
            daemon.send_signal(signal.SIGTERM)
            error = RichError(waiting)
            self.assertEqual((error.code, error.reason), (UNAVAILABLE, 'DRAINING'), error)
            self.assertEqual(daemon.wait(30), 0)
            go_on.set()
            self.assertNotEqual(holder.code(), grpc.StatusCode.OK)

    def test_a_second_signal_ends_it_without_waiting(self):
        with Daemon(SLOW_ALLOWED, '--grace_s=300', '--threads=1') as daemon:
            call = daemon.stub().FeedForward.future(slow_request(4000), timeout=300)
            wait_until_busy(daemon)
            daemon.send_signal(signal.SIGTERM)
            self.assertTrue(until(lambda: 'event=draining' in daemon.log()))
            time.sleep(0.2)
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)
            self.assertNotEqual(call.code(), grpc.StatusCode.OK)

    def test_it_ends_at_once_after_large_answers(self):
        # gRPC polls for up to 10 s for a connection that once could not be written to, and its shutdown waits for that.
        request = norm_request(np.ones((1000, 4096)))
        for _ in range(8):
            with Daemon() as daemon:
                stub = daemon.stub()
                for _ in range(2):
                    stub.Normalize(request, timeout=120)
                started = time.monotonic()
                self.assertEqual(daemon.stop(), 0)
                self.assertLess(time.monotonic() - started, 8)

    def test_grace_0(self):
        with Daemon(SLOW_ALLOWED, '--grace_s=0') as daemon:
            daemon.stub().Normalize(norm_request([[1, 2]]), timeout=60)
            self.assertEqual(daemon.stop(timeout_s=30), 0)

    def test_sigterm_at_any_moment_under_load_ends_it_with_0(self):
        rng = random.Random(3)
        request = norm_request(np.ones((64, 64)))
        layer = swiglu_request(np.ones((4, 64)), np.ones((96, 64)), np.ones((96, 64)), np.ones((64, 96)))
        for round_ in range(20):
            with Daemon() as daemon:
                ended = threading.Event()
                codes = []

                def load(stub):
                    while not ended.is_set():
                        for method, message in ((stub.Normalize, request), (stub.FeedForward, layer)):
                            try:
                                method(message, timeout=60)
                                codes.append(grpc.StatusCode.OK)
                            except grpc.RpcError as error:
                                codes.append(error.code())
                                time.sleep(0.005)
                clients = [threading.Thread(target=load, args=(daemon.stub(),)) for _ in range(2)]
                for client in clients:
                    client.start()
                time.sleep(rng.uniform(0, 0.15))
                try:
                    self.assertEqual(daemon.stop(timeout_s=40), 0, f'round {round_}: {daemon.log()}')
                finally:
                    ended.set()
                    for client in clients:
                        client.join()
                self.assertLessEqual(set(codes), {grpc.StatusCode.OK, UNAVAILABLE}, f'round {round_}')
                self.assertNotIn('cancelled_calls', daemon.log())


class Services(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.messages = harness.compile_messages(pathlib.Path(__file__).with_name('introspection.proto'))

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__()

    def test_health_check(self):
        health = self.daemon.health()
        for service in ('', SERVICE):
            answer = health.Check(health_pb.HealthCheckRequest(service=service), timeout=60)
            self.assertEqual(answer.status, health_pb.HealthCheckResponse.SERVING)
        error = error_of(health.Check, health_pb.HealthCheckRequest(service='no.such.Service'))
        self.assertEqual(error.code, grpc.StatusCode.NOT_FOUND)

    def test_health_watch(self):
        health = self.daemon.health()
        for service, status in (('', health_pb.HealthCheckResponse.SERVING),
                                (SERVICE, health_pb.HealthCheckResponse.SERVING),
                                ('no.such.Service', health_pb.HealthCheckResponse.SERVICE_UNKNOWN)):
            watch = health.Watch(health_pb.HealthCheckRequest(service=service), timeout=60)
            self.assertEqual(next(watch).status, status)
            self.assertTrue(watch.is_active())
            watch.cancel()

    def reflect(self, **request):
        call = self.daemon.channel().stream_stream(
            '/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo',
            self.messages.ReflectionRequest.SerializeToString, self.messages.ReflectionResponse.FromString)
        return next(call(iter([self.messages.ReflectionRequest(**request)]), timeout=60))

    def test_reflection_lists_the_services(self):
        names = {service.name for service in self.reflect(list_services='').list_services_response.service}
        self.assertLessEqual({SERVICE, 'grpc.reflection.v1alpha.ServerReflection', 'grpc.channelz.v1.Channelz'}, names)

    def test_reflection_gives_the_contract(self):
        answer = self.reflect(file_containing_symbol=SERVICE)
        files = [descriptor_pb2.FileDescriptorProto.FromString(data)
                 for data in answer.file_descriptor_response.file_descriptor_proto]
        by_name = {file.name: file for file in files}
        self.assertEqual([method.name for method in by_name['layerd/v1/layer_service.proto'].service[0].method],
                         ['Normalize', 'FeedForward', 'StreamNormalize', 'StreamFeedForward'])
        self.assertIn('layerd/v1/tensor.proto', by_name)
        self.assertEqual(self.reflect(file_containing_symbol='no.such.Symbol').error_response.error_code, 5)

    def test_channelz_counts_calls(self):
        self.daemon.stub().Normalize(norm_request([[1, 2]]), timeout=60)
        get_servers = self.daemon.channel().unary_unary(
            '/grpc.channelz.v1.Channelz/GetServers', self.messages.GetServersRequest.SerializeToString,
            self.messages.GetServersResponse.FromString)
        answer = get_servers(self.messages.GetServersRequest(), timeout=60)
        self.assertEqual(len(answer.server), 1)
        self.assertGreaterEqual(answer.server[0].data.calls_succeeded, 1)

    def test_unknown_methods_are_unimplemented(self):
        for method in ('/layerd.v1.LayerService/NoSuchMethod', '/layerd.v1.LayerService/-', '/no.such.Service/Method'):
            call = self.daemon.channel().unary_unary(method, lambda b: b, lambda b: b)
            self.assertEqual(error_of(call, b'').code, grpc.StatusCode.UNIMPLEMENTED, method)

    def test_proxies_of_the_environment_are_not_asked(self):
        proxy = f'http://127.0.0.1:{free_port()}'
        env = {name: proxy for name in ('http_proxy', 'https_proxy', 'grpc_proxy', 'HTTP_PROXY', 'HTTPS_PROXY')}
        for server in (self.daemon.address, f'localhost:{self.daemon.port}'):
            for call in (('health',), ('normalize', '--kind', 'rms_norm', '--input', '[1,2]')):
                result = layerctl(*call, server=server, env=env)
                self.assertEqual(result.status, 0, result)


class Load(unittest.TestCase):
    def test_health_is_answered_while_four_times_as_many_heavy_calls_as_cores_wait(self):
        with Daemon() as daemon:
            stub, health = daemon.stub(), daemon.health()
            request = heavy_request(8192)
            stub.FeedForward(heavy_request(8), timeout=120)
            calls = [stub.FeedForward.future(request, timeout=300) for _ in range(4 * os.cpu_count())]
            wait_until_busy(daemon)
            times = []
            while not all(call.done() for call in calls):
                started = time.monotonic()
                health.Check(health_pb.HealthCheckRequest(), timeout=60)
                times.append(time.monotonic() - started)
                time.sleep(0.02)
            outputs = {call.result().output.data for call in calls}
            self.assertEqual(len(outputs), 1)
            self.assertGreater(len(times), 5)
            self.assertLess(max(times), 1.0)

    def test_work_past_its_deadline_is_dropped(self):
        with Daemon('--queue_calls=1000') as daemon:
            stub = daemon.stub()
            request = heavy_request(8192)
            stub.FeedForward(heavy_request(8), timeout=120)
            calls = [stub.FeedForward.future(request, timeout=0.01) for _ in range(1000)]
            codes = {call.code() for call in calls}
            # Expired, or refused since they would.
            self.assertLessEqual(codes, {DEADLINE_EXCEEDED, EXHAUSTED})

            def idle():
                before = daemon.cpu_seconds()
                time.sleep(0.5)
                return daemon.cpu_seconds() - before < 0.05
            # Were all of them computed, it would take minutes.
            self.assertTrue(until(idle, 15), 'the CPU is not idle')
            self.assertEqual(stub.Normalize(norm_request([[1, 2]]), timeout=60).output.shape, [1, 2])

    def test_a_full_queue_is_refused_with_the_time_to_try_again(self):
        with Daemon('--queue_calls=1', '--threads=1') as daemon:
            stub = daemon.stub()
            request = heavy_request(4096)
            alone = stub.FeedForward(request, timeout=120).output.data
            calls = [stub.FeedForward.future(request, timeout=120) for _ in range(12)]
            refused = 0
            for call in calls:
                if call.code() == grpc.StatusCode.OK:
                    self.assertEqual(call.result().output.data, alone)
                    continue
                error = RichError(call)
                self.assertEqual((error.code, error.reason, error.domain), (EXHAUSTED, 'OVERLOADED', 'layerd'), error)
                self.assertIn('--queue_calls', error.text)
                self.assertGreater(error.retry_delay_s, 0)
                self.assertEqual(error.retry_delay_s, int(error.pushback) / 1000)
                self.assertLess(error.retry_delay_s, 60.001)
                refused += 1
            self.assertGreater(refused, 0)
            self.assertLessEqual(refused, 11)

    def test_64_callers_with_matrices_of_ones_get_exactly_k(self):
        def ask(stub, index):
            k, rows, hidden = ((1, 3, 17, 100, 257, 1000, 2049)[index % 7], index % 17 + 1, (1, 7, 64, 33)[index % 4])
            request = plain_request(np.ones((rows, k)), np.ones((hidden, k)), np.ones((5, hidden)))
            request.intermediates = True
            answer = stub.FeedForward(request, timeout=120)
            return (np.all(array_of(answer.intermediates.up) == k)
                    and np.all(array_of(answer.output) == k * hidden) and answer.output.shape == [rows, 5])
        with Daemon() as daemon:
            stubs = [daemon.stub() for _ in range(64)]
            with concurrent.futures.ThreadPoolExecutor(64) as pool:
                for _ in range(3):
                    self.assertEqual(list(pool.map(ask, stubs, range(64))), [True] * 64)

    def test_400_callers_at_once_get_the_right_bits(self):
        rng = np.random.default_rng(4)
        x = rng.standard_normal((400, 3, 96), np.float32)
        weights = [rng.standard_normal(shape, np.float32) for shape in ((160, 96), (160, 96), (96, 160))]
        with Daemon('--queue_calls=1000') as daemon:
            stubs = [daemon.stub() for _ in range(50)]
            expected = array_of(stubs[0].FeedForward(swiglu_request(x.reshape(1200, 96), *weights), timeout=120).output)
            calls = [stubs[i % 50].FeedForward.future(swiglu_request(x[i], *weights), timeout=120) for i in range(400)]
            for i, call in enumerate(calls):
                self.assertEqual(call.result().output.data, expected[3 * i:3 * i + 3].tobytes())
            self.assertEqual(daemon.stop(), 0)


class Http2(unittest.TestCase):
    def test_the_window_is_announced_at_once_and_not_left_to_estimates(self):
        with Daemon() as daemon, socket.create_connection(('127.0.0.1', daemon.port), timeout=10) as connection:
            connection.sendall(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            stream = connection.makefile('rb')
            header = stream.read(9)  # of the first frame, which is SETTINGS: its length, type 4, no flags
            self.assertEqual(header[3:5], bytes([4, 0]))
            settings = dict(struct.iter_unpack('>HI', stream.read(int.from_bytes(header[:3], 'big'))))
            initial_window_size, max_frame_size = 4, 5
            self.assertEqual((settings[initial_window_size], settings[max_frame_size]), (4 << 20, 1 << 20))


class Hostility(unittest.TestCase):
    def serves(self, daemon):
        self.assertTrue(daemon.alive(), daemon.log())
        output = array_of(daemon.stub().Normalize(norm_request([[3, 4]], epsilon=0), timeout=60).output)
        np.testing.assert_allclose(output, [[3 / np.sqrt(12.5), 4 / np.sqrt(12.5)]], rtol=1e-6)

    def test_what_is_no_grpc_is_turned_away(self):
        rng = random.Random(5)
        path = '/layerd.v1.LayerService/Normalize'
        web = (f'POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/grpc-web-text\r\n'
               'Content-Length: 8\r\n\r\nAAAAAAA=').encode()
        preface = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
        empty_settings = b'\0\0\0\4\0\0\0\0\0'
        probes = [web, b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n', b'\0' * 64, b'\x16\x03\x01\x02\x00\x01', preface,
                  preface + b'\xff' * 200, preface + empty_settings + b'\xff\xff\xff\1\5\0\0\0\1' + b'x' * 500,
                  preface + empty_settings + b'\0\0\4\10\0\0\0\0\0\0\0\0\0']
        probes += [bytes(rng.randrange(256) for _ in range(rng.randrange(1, 2000))) for _ in range(30)]
        probes += [preface + empty_settings + bytes(rng.randrange(256) for _ in range(200)) for _ in range(30)]
        with Daemon() as daemon:
            for probe in probes:
                with socket.create_connection(('127.0.0.1', daemon.port), timeout=10) as connection:
                    try:
                        connection.sendall(probe)
                        if probe is web:  # refused at once: closed, or a GOAWAY and closed
                            while connection.recv(4096):
                                pass
                        else:
                            connection.shutdown(socket.SHUT_WR)
                    except ConnectionError:
                        pass
            self.serves(daemon)
            self.assertEqual(daemon.stop(), 0)

    def test_clients_killed_amid_their_calls(self):
        with Daemon() as daemon:
            env = {name: value for name, value in os.environ.items() if not name.startswith('LAYERD_')}
            for moment in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8):
                client = subprocess.Popen([LAYERCTL, '--server', daemon.address, 'feedforward', '--seed', '1', '--rows',
                                           '1024', '--dim', '512', '--hidden', '2048'], stdout=subprocess.DEVNULL,
                                          stderr=subprocess.DEVNULL, env=env)
                time.sleep(moment)
                client.kill()
                client.wait()
            self.serves(daemon)
            self.assertEqual(daemon.stop(), 0)

    def test_a_gzip_bomb_is_refused_and_costs_no_memory(self):
        with Daemon() as daemon:
            call = daemon.channel().unary_unary(f'/{SERVICE}/Normalize', lambda b: b, lambda b: b)
            self.serves(daemon)
            # A NormalizeRequest whose input has 1 GiB of zeros as data: about 1 MiB on the wire.
            data = b'\x08\x01\x1a\x80\x80\x80\x80\x04' + bytes(1 << 30)
            bomb = b'\x0a\x88\x80\x80\x80\x04' + data
            del data
            error = error_of(call, bomb, compression=grpc.Compression.Gzip, timeout=120)
            del bomb
            self.assertEqual((error.code, error.pushback), (EXHAUSTED, '-1'), error)
            self.assertIn('--max_message_mib', error.text)
            self.serves(daemon)
            # Far less than it says it is: the limits of two messages and room beside.
            self.assertLess(daemon.peak_memory_bytes(), 900 << 20)

    def test_calls_in_gzip_are_answered_and_other_compression_is_refused(self):
        with Daemon() as daemon:
            request = norm_request(np.ones((100, 100)))
            plain = daemon.stub().Normalize(request, timeout=60).output.data
            answer = daemon.stub().Normalize(request, timeout=60, compression=grpc.Compression.Gzip)
            self.assertEqual(answer.output.data, plain)
            error = error_of(daemon.stub().Normalize, request, compression=grpc.Compression.Deflate)
            self.assertEqual(error.code, grpc.StatusCode.UNIMPLEMENTED)
            self.serves(daemon)

    def test_fields_of_20_kb_do_not_come_back_whole(self):
        with Daemon() as daemon:
            error = error_of(daemon.health().Check, health_pb.HealthCheckRequest(service='x' * 20000))
            # gRPC's own health service refuses a name of more than 200 bytes before it looks it up.
            self.assertIn(error.code, (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT))
            self.assertLess(len(error.text), 2000)
            result = layerctl('health', '--service', 'x' * 20000, server=daemon)
            self.assertEqual(result.status, 4, result.stderr[:200])
            self.assertLess(len(result.stderr), 4000)
            error = error_of(daemon.stub().Normalize, norm_request([[1, 2]]), metadata=(('x-note', 'y' * 20000),))
            self.assertIn(error.code, (EXHAUSTED, UNAVAILABLE))
            self.serves(daemon)


if __name__ == '__main__':
    unittest.main()
