"""What the daemon refuses, and how: by code, field path, reason and text; and what it must survive."""
import random
import unittest

import grpc
import numpy as np

from harness import (BFLOAT16, FLOAT16, FLOAT32, INT8, Daemon, RichError, array_of, error_of, layer_pb, norm_request,
                     plain_request, swiglu_request, tensor, tensor_pb)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
NAN, INF = float('nan'), float('inf')
ROW = [0.5, -1.5, 2.0, 1.0]


def norm(**spec):
    return norm_request(np.array([ROW, ROW], np.float32), **spec)


def swiglu(d=4, h=6, out=4, rows=2):
    return swiglu_request(np.ones((rows, d)), np.ones((h, d)), np.ones((h, d)), np.ones((out, h)))


def plain(d=4, h=6, out=4, rows=2):
    return plain_request(np.ones((rows, d)), np.ones((h, d)), np.ones((out, h)))


def packed(d=4, h2=12, out=4, packing=layer_pb.GATE_UP_PACKING_HALVES):
    request = swiglu(d, h2 // 2, out)
    request.spec.packing = packing
    request.weights.ClearField('gate')
    request.weights.ClearField('up')
    request.weights.gate_up.CopyFrom(tensor(np.ones((h2, d))))
    return request


class Refusals(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.stub = cls.daemon.stub()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__()

    def tearDown(self):
        self.assertTrue(self.daemon.alive(), self.daemon.log())

    def refused(self, request, field, reason, *texts, code=INVALID):
        """Asserts that the request is refused for the field, with the texts in the message."""
        method = self.stub.Normalize if isinstance(request, layer_pb.NormalizeRequest) else self.stub.FeedForward
        error = error_of(method, request)
        self.assertEqual(error.code, code, error)
        self.assertEqual((error.reason, error.domain), (reason, 'layerd'), error)
        self.assertEqual([(path, why) for path, _, why in error.fields], [(field, reason)], error)
        self.assertTrue(error.text.startswith(field + ': '), error)
        self.assertEqual(error.text, f'{field}: {error.fields[0][1]}', error)
        self.assertIn('expected', error.text)
        self.assertLess(len(error.text.encode()), 1100)
        self.assertIsNone(error.retry_delay_s, error)
        self.assertEqual(error.pushback, None if code == INVALID else '-1', error)
        for text in texts:
            self.assertIn(text, error.text)
        return error


class TensorRefusals(Refusals):
    """One tensor, as the input of both methods and as every other tensor of theirs."""

    def with_input(self, message):
        request = norm()
        request.input.CopyFrom(message)
        return request

    def test_byte_counts_that_do_not_fit_the_shape(self):
        for dtype, size in ((FLOAT32, 4), (FLOAT16, 2), (BFLOAT16, 2), (INT8, 1)):
            for count in (0, 1, 4 * size - 1, 4 * size + 1, 8 * size):
                with self.subTest(dtype=dtype, count=count):
                    message = tensor_pb.Tensor(dtype=dtype, shape=[4], data=bytes(count))
                    self.refused(self.with_input(message), 'input.data', 'BYTE_COUNT_MISMATCH', str(4 * size),
                                 f'got {count}')

    def test_data_and_values_both(self):
        message = tensor(ROW)
        message.values.extend(ROW)
        self.refused(self.with_input(message), 'input.values', 'TWO_SOURCES', '16', '4', 'got')

    def test_more_values_than_people_type(self):
        message = tensor_pb.Tensor(dtype=FLOAT32, shape=[65537], values=[1.0] * 65537)
        self.refused(self.with_input(message), 'input.values', 'TOO_MANY_VALUES', '65536', 'got 65537')
        message = tensor_pb.Tensor(dtype=FLOAT32, shape=[65536], values=[1.0] * 65536)
        self.assertEqual(self.stub.Normalize(self.with_input(message), timeout=60).output.shape, [65536])

    def test_value_counts_that_do_not_fit_the_shape(self):
        message = tensor_pb.Tensor(dtype=FLOAT32, shape=[2, 2], values=[1, 2, 3])
        self.refused(self.with_input(message), 'input.values', 'VALUE_COUNT_MISMATCH', 'expected 4', 'got 3', '[2, 2]')
        # A bogus count of a shape that is legal by itself: nothing is allocated by it.
        message = tensor_pb.Tensor(dtype=FLOAT32, shape=[2147483647, 100], values=[1, 2, 3])
        self.refused(self.with_input(message), 'input.values', 'VALUE_COUNT_MISMATCH', 'got 3')

    def test_shapes_that_overflow_or_are_none(self):
        for shape, reason in (([16, 2**60 + 2], 'DIMENSION_TOO_LARGE'), ([4611686018427387906], 'DIMENSION_TOO_LARGE'),
                              ([2147483648], 'DIMENSION_TOO_LARGE'), ([-1], 'NEGATIVE_DIMENSION'),
                              ([0, -1], 'NEGATIVE_DIMENSION'), ([-2**63, 2], 'NEGATIVE_DIMENSION'),
                              ([2**63 - 1, 2**63 - 1], 'DIMENSION_TOO_LARGE'), ([0, 2**63 - 1], 'DIMENSION_TOO_LARGE'),
                              ([2147483647] * 3, 'SHAPE_OVERFLOW'), ([65536, 65536, 65536], 'SHAPE_OVERFLOW'),
                              ([0, 2147483647, 2147483647], 'SHAPE_OVERFLOW'),
                              ([1] * 9, 'RANK_TOO_LARGE'), ([1] * 100000, 'RANK_TOO_LARGE')):
            with self.subTest(shape=shape[:9]):
                message = tensor_pb.Tensor(dtype=FLOAT32, shape=shape, data=bytes(16))
                got = str(len(shape)) if reason == 'RANK_TOO_LARGE' else str(shape[0])
                self.refused(self.with_input(message), 'input.shape', reason, 'got', got)

    def test_a_large_legal_shape_without_data(self):
        message = tensor_pb.Tensor(dtype=FLOAT32, shape=[2147483647])
        self.refused(self.with_input(message), 'input.data', 'BYTE_COUNT_MISMATCH', '8589934588', 'got 0')

    def test_rows_of_nothing_are_refused_and_no_rows_are_not(self):
        for shape in ([0], [3, 0], [2, 3, 0]):
            message = tensor_pb.Tensor(dtype=FLOAT32, shape=shape)
            self.refused(self.with_input(message), 'input.shape', 'EMPTY_ROW', 'got [')
            request = swiglu()
            request.input.CopyFrom(message)
            self.refused(request, 'input.shape', 'EMPTY_ROW', 'got [')
        for shape in ([0, 4], [3, 0, 4], [0, 0, 4]):
            message = tensor_pb.Tensor(dtype=FLOAT32, shape=shape)
            answer = self.stub.Normalize(self.with_input(message), timeout=60)
            self.assertEqual((list(answer.output.shape), answer.output.data), (shape, b''))
            request = swiglu()
            request.input.CopyFrom(message)
            answer = self.stub.FeedForward(request, timeout=60)
            self.assertEqual((list(answer.output.shape), answer.output.data), (shape, b''))

    def test_no_rows_with_everything_asked(self):
        request = norm()
        request.input.CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[0, 4]))
        request.verify = request.intermediates = True
        answer = self.stub.Normalize(request, timeout=60)
        self.assertTrue(answer.report.within_contract)
        self.assertEqual(list(answer.intermediates.inverse_rms.shape), [0, 1])
        request = swiglu()
        request.input.CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[0, 4]))
        request.verify = request.intermediates = True
        answer = self.stub.FeedForward(request, timeout=60)
        self.assertTrue(answer.report.within_contract)
        self.assertEqual(list(answer.intermediates.hidden.shape), [0, 6])

    def test_a_scalar(self):
        message = tensor_pb.Tensor(dtype=FLOAT32, data=bytes(4))
        self.refused(self.with_input(message), 'input.shape', 'RANK_TOO_SMALL', 'got []')
        request = swiglu()
        request.input.CopyFrom(message)
        error = error_of(self.stub.FeedForward, request)
        self.assertEqual((error.code, [path for path, _, _ in error.fields]), (INVALID, ['input.shape']), error)
        self.assertIn('got []', error.text)

    def test_dtypes_left_out_and_unknown(self):
        for dtype, reason, got in ((0, 'MISSING', 'got nothing'), (5, 'UNKNOWN_ENUM_VALUE', '5'),
                                   (-7, 'UNKNOWN_ENUM_VALUE', '-7'), (2147483647, 'UNKNOWN_ENUM_VALUE', '2147483647')):
            message = tensor(ROW)
            message.dtype = dtype
            self.refused(self.with_input(message), 'input.dtype', reason, 'DTYPE_BFLOAT16', got)

    def test_every_tensor_of_a_norm_is_named(self):
        for field in ('gamma', 'beta', 'residual', 'gate'):
            with self.subTest(field=field):
                request = norm()
                getattr(request, field).CopyFrom(tensor_pb.Tensor(shape=[4], data=bytes(16)))
                self.refused(request, f'{field}.dtype', 'MISSING')
                getattr(request, field).CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[4], data=bytes(15)))
                self.refused(request, f'{field}.data', 'BYTE_COUNT_MISMATCH')
                getattr(request, field).CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[-4]))
                self.refused(request, f'{field}.shape', 'NEGATIVE_DIMENSION')

    def test_every_weight_is_named(self):
        for field in ('gate', 'up', 'gate_up', 'down', 'gate_scale', 'up_scale', 'gate_up_scale', 'down_scale',
                      'gate_bias', 'up_bias', 'gate_up_bias', 'down_bias', 'inner_norm_gamma'):
            with self.subTest(field=field):
                request = swiglu()
                getattr(request.weights, field).CopyFrom(tensor_pb.Tensor(shape=[4], data=bytes(16)))
                self.refused(request, f'weights.{field}.dtype', 'MISSING')
                getattr(request.weights, field).CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[4], data=bytes(17)))
                self.refused(request, f'weights.{field}.data', 'BYTE_COUNT_MISMATCH')
                getattr(request.weights, field).CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[2**62 + 2]))
                self.refused(request, f'weights.{field}.shape', 'DIMENSION_TOO_LARGE')


class NormRefusals(Refusals):
    def test_missing_messages(self):
        request = norm()
        request.ClearField('input')
        self.refused(request, 'input', 'MISSING', 'got nothing')
        request = norm()
        request.ClearField('spec')
        self.refused(request, 'spec', 'MISSING', 'got nothing')

    def test_enums_left_out_and_unknown(self):
        self.refused(norm(kind=0), 'spec.kind', 'MISSING', 'NORM_KIND_RMS_NORM', 'NORM_KIND_LAYER_NORM', 'got nothing')
        self.refused(norm(kind=3), 'spec.kind', 'UNKNOWN_ENUM_VALUE', 'NORM_KIND_RMS_NORM', '3')
        self.refused(norm(rounding=9), 'spec.rounding', 'UNKNOWN_ENUM_VALUE', 'NORM_ROUNDING_AFTER_GAMMA', '9')
        self.refused(norm(gate_position=0), 'spec.gate_position', 'MISSING', 'GATE_POSITION_NONE', 'got nothing')
        self.refused(norm(gate_position=-1), 'spec.gate_position', 'UNKNOWN_ENUM_VALUE', 'GATE_POSITION_FIRST', '-1')
        request = norm()
        request.output_dtype = 77
        self.refused(request, 'output_dtype', 'UNKNOWN_ENUM_VALUE', 'DTYPE_FLOAT16', '77')

    def test_rounding_left_out_where_gamma_meets_16_bits(self):
        for dtype in (FLOAT16, BFLOAT16):
            request = norm(dtype=dtype)
            request.gamma.CopyFrom(tensor([1, 1, 1, 1]))
            self.refused(request, 'spec.rounding', 'MISSING', 'BEFORE_GAMMA', 'AFTER_GAMMA', '16', 'got nothing')
        request = norm()
        request.gamma.CopyFrom(tensor([1, 1, 1, 1], BFLOAT16))
        self.stub.Normalize(request, timeout=60)  # the input is float32: it makes no difference
        request = norm(dtype=FLOAT16)
        request.beta.CopyFrom(tensor([1, 1, 1, 1], FLOAT16))
        self.stub.Normalize(request, timeout=60)  # no gamma

    def test_epsilon(self):
        for epsilon in (-1e-6, -5e-324, NAN, INF, -INF):
            for kind in (layer_pb.NORM_KIND_RMS_NORM, layer_pb.NORM_KIND_LAYER_NORM):
                self.refused(norm(kind=kind, epsilon=epsilon), 'spec.epsilon', 'EPSILON_OUT_OF_RANGE', 'got')
        for epsilon in (0.0, -0.0, 5e-324, 1e300):
            self.stub.Normalize(norm(epsilon=epsilon), timeout=60)

    def test_gamma_offset(self):
        for offset in (NAN, INF, -INF):
            request = norm(gamma_offset=offset)
            request.gamma.CopyFrom(tensor([1, 1, 1, 1]))
            self.refused(request, 'spec.gamma_offset', 'OUT_OF_RANGE', 'got')
        self.refused(norm(gamma_offset=1), 'gamma', 'MISSING', 'gamma_offset')

    def test_group_size(self):
        for size in (3, 5, 8, -1, -4, 2**62, -2**63):
            self.refused(norm(group_size=size), 'spec.group_size', 'OUT_OF_RANGE', 'divisor of 4', f'got {size}')

    def test_normalized_axes(self):
        for axes in (0, -1, 3, 2147483647, -2147483648):
            self.refused(norm(normalized_axes=axes), 'spec.normalized_axes', 'OUT_OF_RANGE', 'expected 1 to 2',
                         '[2, 4]', f'got {axes}')
        request = norm(normalized_axes=2)
        request.input.shape[:] = [0, 4]
        request.input.data = b''
        self.refused(request, 'input.shape', 'EMPTY_ROW', 'got [0, 4]')

    def test_gamma_and_beta_of_another_shape(self):
        for field in ('gamma', 'beta'):
            for shape in ((3,), (2, 4), (1, 4), (4, 1), ()):
                request = norm()
                getattr(request, field).CopyFrom(tensor(np.ones(shape)))
                self.refused(request, f'{field}.shape', 'SHAPE_MISMATCH', '[4]', f'got {list(shape)}')
            request = norm(normalized_axes=2)
            getattr(request, field).CopyFrom(tensor(np.ones(4)))
            self.refused(request, f'{field}.shape', 'SHAPE_MISMATCH', '[2, 4]', '[8]', 'got [4]')

    def test_residual_and_gate_unlike_the_input(self):
        for field in ('residual', 'gate'):
            request = norm(gate_position=layer_pb.GATE_POSITION_LAST)
            request.gate.CopyFrom(request.input)
            getattr(request, field).CopyFrom(tensor(np.ones((2, 4)), FLOAT16))
            self.refused(request, f'{field}.dtype', 'DTYPE_MISMATCH', 'float32', 'got float16')
            getattr(request, field).CopyFrom(tensor(np.ones((4, 2))))
            self.refused(request, f'{field}.shape', 'SHAPE_MISMATCH', '[2, 4]', 'got [4, 2]')

    def test_gate_without_position_and_position_without_gate(self):
        for spec in ({}, {'gate_position': layer_pb.GATE_POSITION_NONE}):
            request = norm(**spec)
            request.gate.CopyFrom(request.input)
            self.refused(request, 'gate', 'UNEXPECTED_FIELD', 'gate_position')
        for position in (layer_pb.GATE_POSITION_FIRST, layer_pb.GATE_POSITION_LAST):
            self.refused(norm(gate_position=position), 'gate', 'MISSING', 'gate_position')


class FeedForwardRefusals(Refusals):
    def test_missing_messages(self):
        for field in ('input', 'spec', 'weights'):
            request = swiglu()
            request.ClearField(field)
            self.refused(request, field, 'MISSING', 'got nothing')

    def test_enums_left_out_and_unknown(self):
        for field, known in (('form', 'FEED_FORWARD_FORM_GATED'), ('activation', 'ACTIVATION_GELU_TANH'),
                             ('packing', 'GATE_UP_PACKING_HALVES'), ('layout', 'WEIGHT_LAYOUT_OUT_IN')):
            request = swiglu()
            setattr(request.spec, field, 0)
            self.refused(request, f'spec.{field}', 'MISSING', known, 'got nothing')
            for value in (99, -3):
                setattr(request.spec, field, value)
                self.refused(request, f'spec.{field}', 'UNKNOWN_ENUM_VALUE', known, str(value))
        request = swiglu()
        request.output_dtype = 5
        self.refused(request, 'output_dtype', 'UNKNOWN_ENUM_VALUE', 'DTYPE_FLOAT16', '5')
        request.output_dtype = INT8
        self.refused(request, 'output_dtype', 'DTYPE_MISMATCH', 'float32, float16 or bfloat16', 'int8')

    def test_packing_with_the_plain_form(self):
        for packing in (layer_pb.GATE_UP_PACKING_SEPARATE, layer_pb.GATE_UP_PACKING_HALVES, 99):
            request = plain()
            request.spec.packing = packing
            self.refused(request, 'spec.packing', 'UNEXPECTED_FIELD', 'plain')

    def test_swish_beta(self):
        for value in (1, 0.5, NAN):
            request = swiglu()
            request.spec.activation = layer_pb.ACTIVATION_RELU
            request.spec.swish_beta = value
            self.refused(request, 'spec.swish_beta', 'UNEXPECTED_FIELD', 'ACTIVATION_RELU')
        for value in (NAN, INF, -INF):
            request = swiglu()
            request.spec.swish_beta = value
            self.refused(request, 'spec.swish_beta', 'OUT_OF_RANGE', 'got')

    def test_limits_and_offset(self):
        for field in ('gate_max', 'up_limit'):
            for value in (0.0, -7.0, NAN, INF, -INF):
                request = swiglu()
                setattr(request.spec, field, value)
                self.refused(request, f'spec.{field}', 'OUT_OF_RANGE', 'got')
        for value in (NAN, INF, -INF):
            request = swiglu()
            request.spec.up_offset = value
            self.refused(request, 'spec.up_offset', 'OUT_OF_RANGE', 'got')
        for field in ('gate_max', 'up_limit', 'up_offset'):
            request = plain()
            setattr(request.spec, field, 7)
            self.refused(request, f'spec.{field}', 'UNEXPECTED_FIELD', 'plain')

    def test_limits_that_are_zero_or_infinite_in_float32(self):
        for field, values in (('gate_max', (1e300, 1e-300)), ('up_limit', (1e300, 1e-300)),
                              ('up_offset', (1e300, -1e300))):
            for value in values:
                with self.subTest(field=field, value=value):
                    request = swiglu()
                    setattr(request.spec, field, value)
                    try:
                        output = array_of(self.stub.FeedForward(request, timeout=60).output)
                        self.assertTrue(np.isfinite(output).all(), 'a finite option made a value that is not finite')
                    except grpc.RpcError as error:
                        self.assertEqual(RichError(error).fields[0][0], f'spec.{field}')

    def test_epsilon_of_the_inner_norm(self):
        for epsilon in (-1e-6, NAN, INF):
            request = swiglu()
            request.spec.inner_norm.epsilon = epsilon
            self.refused(request, 'spec.inner_norm.epsilon', 'EPSILON_OUT_OF_RANGE', 'got')

    def test_each_weight_missing(self):
        for field in ('gate', 'up', 'down'):
            request = swiglu()
            request.weights.ClearField(field)
            self.refused(request, f'weights.{field}', 'MISSING')
        for field in ('up', 'down'):
            request = plain()
            request.weights.ClearField(field)
            self.refused(request, f'weights.{field}', 'MISSING')
        for packing in (layer_pb.GATE_UP_PACKING_HALVES, layer_pb.GATE_UP_PACKING_INTERLEAVED):
            for field in ('gate_up', 'down'):
                request = packed(packing=packing)
                request.weights.ClearField(field)
                self.refused(request, f'weights.{field}', 'MISSING')

    def test_weights_that_nothing_uses(self):
        matrix, vector = tensor(np.ones((6, 4))), tensor(np.ones(6))
        for request, field, value in ((swiglu(), 'gate_up', matrix), (plain(), 'gate', matrix),
                                      (plain(), 'gate_up', matrix), (packed(), 'gate', matrix),
                                      (packed(), 'up', matrix), (packed(), 'gate_bias', vector),
                                      (packed(), 'up_bias', vector), (swiglu(), 'gate_up_bias', vector),
                                      (plain(), 'gate_bias', vector), (plain(), 'gate_up_bias', vector),
                                      (swiglu(), 'inner_norm_gamma', vector), (plain(), 'inner_norm_gamma', vector)):
            with self.subTest(field=field):
                getattr(request.weights, field).CopyFrom(value)
                self.refused(request, f'weights.{field}', 'UNEXPECTED_FIELD', 'since')

    def test_matrices_that_do_not_fit_name_both_sizes(self):
        request = swiglu(d=4)
        request.weights.gate.CopyFrom(tensor(np.ones((6, 5))))
        self.refused(request, 'weights.gate.shape', 'SHAPE_MISMATCH', 'd = 4', 'OUT_IN', 'got [6, 5]')
        request = swiglu()
        request.weights.up.CopyFrom(tensor(np.ones((7, 4))))
        self.refused(request, 'weights.up.shape', 'SHAPE_MISMATCH', '6', 'got [7, 4]')
        request = swiglu()
        request.weights.down.CopyFrom(tensor(np.ones((4, 7))))
        self.refused(request, 'weights.down.shape', 'SHAPE_MISMATCH', '6', 'got [4, 7]')
        request = plain()
        request.weights.up.CopyFrom(tensor(np.ones((6, 3))))
        self.refused(request, 'weights.up.shape', 'SHAPE_MISMATCH', 'd = 4', 'got [6, 3]')
        request = packed()
        request.weights.gate_up.CopyFrom(tensor(np.ones((12, 3))))
        self.refused(request, 'weights.gate_up.shape', 'SHAPE_MISMATCH', 'd = 4', 'got [12, 3]')
        request = swiglu()
        request.spec.layout = layer_pb.WEIGHT_LAYOUT_IN_OUT
        self.refused(request, 'weights.gate.shape', 'SHAPE_MISMATCH', 'd = 4', 'IN_OUT', 'got [6, 4]')

    def test_matrices_that_are_none(self):
        for shape in ((24,), (1, 6, 4), (), (0, 4), (6, 0)):
            request = swiglu()
            request.weights.gate.CopyFrom(tensor(np.ones(shape)))
            self.refused(request, 'weights.gate.shape', 'SHAPE_MISMATCH', f'got {list(shape)}')
        for shape in ((24,), (0, 6), (4, 0)):
            request = swiglu()
            request.weights.down.CopyFrom(tensor(np.ones(shape)))
            self.refused(request, 'weights.down.shape', 'SHAPE_MISMATCH', f'got {list(shape)}')

    def test_gate_up_with_an_odd_number_of_outputs(self):
        for packing in (layer_pb.GATE_UP_PACKING_HALVES, layer_pb.GATE_UP_PACKING_INTERLEAVED):
            request = packed(h2=12, packing=packing)
            request.weights.gate_up.CopyFrom(tensor(np.ones((13, 4))))
            self.refused(request, 'weights.gate_up.shape', 'SHAPE_MISMATCH', 'even', 'got [13, 4]')

    def test_biases_of_another_length(self):
        for field, request, size in (('gate_bias', swiglu(), 6), ('up_bias', swiglu(), 6), ('up_bias', plain(), 6),
                                     ('gate_up_bias', packed(), 12), ('down_bias', swiglu(out=5), 5)):
            for shape in ((size + 1,), (size, 1), (1, size), ()):
                with self.subTest(field=field, shape=shape):
                    getattr(request.weights, field).CopyFrom(tensor(np.ones(shape)))
                    self.refused(request, f'weights.{field}.shape', 'SHAPE_MISMATCH', f'= {size}',
                                 f'got {list(shape)}')
        request = swiglu()
        request.spec.inner_norm.SetInParent()
        request.weights.inner_norm_gamma.CopyFrom(tensor(np.ones(4)))
        self.refused(request, 'weights.inner_norm_gamma.shape', 'SHAPE_MISMATCH', '6', 'got [4]')

    def test_an_answer_that_has_no_legal_shape(self):
        request = plain(d=1, h=1, out=70000, rows=0)
        request.input.CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[0, 2147483647, 2147483647, 1]))
        error = error_of(self.stub.FeedForward, request)
        self.assertEqual((error.code, [path for path, _, _ in error.fields]), (INVALID, ['input.shape']), error)


class LimitRefusals(Refusals):
    """Calls that can never fit: RESOURCE_EXHAUSTED that names limit and flag, and no retry."""

    def test_an_answer_over_the_limit(self):
        request = plain(d=1, h=1, out=65536, rows=300)
        self.refused(request, 'input.shape', 'ANSWER_TOO_LARGE', '--max_message_mib', str(64 << 20),
                     f'got {300 * 65536 * 4}', code=EXHAUSTED)
        request = plain(d=1, h=65536, out=1, rows=300)
        request.intermediates = True
        self.refused(request, 'input.shape', 'ANSWER_TOO_LARGE', '--max_message_mib', code=EXHAUSTED)

    def test_verify_over_the_limit(self):
        request = plain(d=1024, h=1024, out=1024, rows=1000)
        request.verify = True
        self.refused(request, 'verify', 'VERIFY_TOO_LARGE', '--max_verify_flops', '1e+09', 'got 4.194', code=EXHAUSTED)

    def test_messages_over_the_limit_and_far_over(self):
        with Daemon('--max_message_mib=1') as daemon:
            stub = daemon.stub()
            mebi = 1 << 20
            for values in (mebi // 4, 400_000, 500_000):  # from just over 1 MiB to just under 2 MiB
                error = error_of(stub.Normalize, norm_request(np.ones((1, values))))
                self.assertEqual((error.code, error.reason, error.pushback),
                                 (EXHAUSTED, 'MESSAGE_TOO_LARGE', '-1'), error)
                self.assertEqual(error.domain, 'layerd')
                self.assertIsNone(error.retry_delay_s)
                self.assertIn('--max_message_mib', error.text)
                self.assertIn(str(mebi), error.text)
            for values in (600_000, 5_000_000):  # refused by gRPC before it is read
                error = error_of(stub.Normalize, norm_request(np.ones((1, values))))
                self.assertEqual((error.code, error.reason), (EXHAUSTED, None), error)
            # A tensor under the limit that is answered in twice the width.
            request = norm_request(np.ones((1, 300_000)), dtype=FLOAT16)
            request.output_dtype = FLOAT32
            error = error_of(stub.Normalize, request)
            self.assertEqual((error.code, error.reason, error.pushback), (EXHAUSTED, 'ANSWER_TOO_LARGE', '-1'), error)
            answer = stub.Normalize(norm_request(np.ones((1, 250_000))), timeout=60)
            self.assertEqual(answer.output.shape, [1, 250_000])

    def test_verify_limit_is_the_flag(self):
        with Daemon('--max_verify_flops=1000') as daemon:
            stub = daemon.stub()
            request = norm_request(np.ones((1, 300)))
            self.assertEqual(stub.Normalize(request, timeout=60).output.shape, [1, 300])
            request.verify = True
            error = error_of(stub.Normalize, request)
            self.assertEqual((error.code, error.reason), (EXHAUSTED, 'VERIFY_TOO_LARGE'), error)
            self.assertIn('--max_verify_flops', error.text)

    def test_a_tensor_of_4_3_mib_passes_both_ways(self):
        x = np.random.default_rng(1).standard_normal((1100, 1024), np.float32)
        output = array_of(self.stub.Normalize(norm_request(x), timeout=60).output)
        exact = x / np.sqrt(np.mean(x.astype(np.float64)**2, axis=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(output, exact, rtol=1e-6)


class Hostility(unittest.TestCase):
    def test_memory_stays_flat_over_hostile_requests_and_a_clean_call_is_answered(self):
        shapes = ([16, 2**60 + 2], [2**62 + 2], [-1], [2147483647], [2147483647, 100], [65536, 65536, 64],
                  [1] * 200000, [2147483647, 0, 1], [0, 2147483647])
        with Daemon() as daemon:
            stub = daemon.stub()
            clean = swiglu()
            before = stub.FeedForward(clean, timeout=60).output.data
            self.assertRaises(grpc.RpcError, stub.Normalize, norm(kind=0), timeout=60)
            peak = daemon.peak_memory_bytes()
            for _ in range(3):
                for shape in shapes:
                    message = tensor_pb.Tensor(dtype=FLOAT32, shape=shape, data=b'1234')
                    request = norm()
                    request.input.CopyFrom(message)
                    error_of(stub.Normalize, request)
                    for field in ('gate', 'up', 'down', 'gate_bias'):
                        request = swiglu()
                        getattr(request.weights, field).CopyFrom(message)
                        error_of(stub.FeedForward, request)
                request = norm()
                request.input.CopyFrom(tensor_pb.Tensor(dtype=BFLOAT16, shape=[2**31 - 1], values=[1, 2]))
                error_of(stub.Normalize, request)
                request = plain(d=1, h=1, out=60000, rows=100000)  # 24 GB if it were believed
                error_of(stub.FeedForward, request)
            self.assertLess(daemon.peak_memory_bytes() - peak, 128 << 20)
            self.assertEqual(stub.FeedForward(clean, timeout=60).output.data, before)

    def test_a_packed_length_that_is_bogus_is_no_allocation(self):
        # Tensor.values says that 2 GiB follow.
        with Daemon() as daemon:
            call = daemon.channel().unary_unary('/layerd.v1.LayerService/Normalize', lambda b: b, lambda b: b)
            tensor_bytes = b'\x08\x01\x12\x01\x04\x22\xff\xff\xff\xff\x07'
            error = error_of(call, b'\x0a' + bytes([len(tensor_bytes)]) + tensor_bytes)
            self.assertEqual((error.code, error.reason), (INVALID, 'MALFORMED_MESSAGE'), error)

    def test_a_name_that_is_no_text_is_refused_and_not_logged(self):
        with Daemon() as daemon:
            call = daemon.channel().unary_unary('/layerd.v1.LayerService/Normalize', lambda b: b, lambda b: b)
            error = error_of(call, b'\x52\x01\xff')  # field 10, layer
            self.assertEqual((error.code, error.reason), (INVALID, 'MALFORMED_MESSAGE'), error)
            self.assertNotIn('UTF-8', daemon.log())
            self.assertLess(daemon.peak_memory_bytes(), 500 << 20)
            self.assertEqual(daemon.stub().Normalize(norm(), timeout=60).output.shape, [2, 4])

    def test_long_texts_from_callers_do_not_come_back_whole(self):
        with Daemon() as daemon:
            request = norm()
            request.gamma.CopyFrom(tensor_pb.Tensor(dtype=FLOAT32, shape=[2147483647] * 8))
            error = error_of(daemon.stub().Normalize, request)
            self.assertLess(len(error.text), 1100)

    def test_three_thousand_mutated_requests_are_answered_or_refused(self):
        rng = random.Random(20)
        full = packed()
        full.spec.inner_norm.epsilon = 1e-5
        full.spec.gate_max = full.spec.up_limit = 7
        full.weights.gate_up_bias.CopyFrom(tensor(np.ones(12)))
        full.weights.down_bias.CopyFrom(tensor(np.ones(4), FLOAT16))
        full.weights.inner_norm_gamma.CopyFrom(tensor(np.ones(6), BFLOAT16))
        full.verify = full.intermediates = True
        gated = norm(gate_position=layer_pb.GATE_POSITION_FIRST, group_size=2, gamma_offset=1, epsilon=0,
                     dtype=BFLOAT16, rounding=layer_pb.NORM_ROUNDING_BEFORE_GAMMA)
        gated.gate.CopyFrom(gated.input)
        gated.residual.CopyFrom(gated.input)
        gated.gamma.CopyFrom(tensor([1, 2, 3, 4]))
        gated.verify = gated.intermediates = True
        typed = norm()
        typed.input.CopyFrom(tensor_pb.Tensor(dtype=FLOAT16, shape=[2, 2], values=[1, 2, 3, 4]))
        seeds = [('Normalize', gated), ('Normalize', typed), ('FeedForward', swiglu()), ('FeedForward', plain()),
                 ('FeedForward', full)]
        with Daemon() as daemon:
            channel = daemon.channel()
            calls = {name: channel.unary_unary(f'/layerd.v1.LayerService/{name}', lambda b: b, lambda b: b)
                     for name in ('Normalize', 'FeedForward')}
            for name, request in seeds:
                calls[name](request.SerializeToString(), timeout=60)  # all of them are legal to begin with
            outcomes = {}
            for _ in range(60):
                futures = []
                for _ in range(50):
                    name, request = rng.choice(seeds)
                    if rng.random() < 0.7:
                        request = self.changed(rng, request)
                    data = request.SerializeToString()
                    if rng.random() < 0.5:
                        data = self.mutated(rng, data)
                    futures.append(calls[name].future(data, timeout=60))
                for future in futures:
                    code = future.code()
                    outcomes[code] = outcomes.get(code, 0) + 1
                    if code in (INVALID, EXHAUSTED, NOT_FOUND):
                        error = RichError(future)
                        self.assertTrue(error.reason == 'MALFORMED_MESSAGE' or error.reason and error.fields, error)
                    if code == PRECONDITION:  # a reference to shared memory
                        self.assertEqual(RichError(future).reason, 'SHARED_MEMORY_OFF')
            self.assertTrue(daemon.alive(), daemon.log())
            self.assertLessEqual(set(outcomes), {grpc.StatusCode.OK, INVALID, EXHAUSTED, NOT_FOUND, PRECONDITION},
                                 outcomes)
            self.assertGreater(outcomes[INVALID], 800, outcomes)
            self.assertEqual(daemon.stub().Normalize(norm(), timeout=60).output.shape, [2, 4])
            self.assertLess(daemon.peak_memory_bytes(), 900 << 20)
            self.assertEqual(daemon.stop(), 0)

    @staticmethod
    def fields_of(message):
        """Every field of the message and of the messages in it, as (message, descriptor)."""
        found = []
        for field in message.DESCRIPTOR.fields:
            found.append((message, field))
            if field.message_type and message.HasField(field.name):
                found += Hostility.fields_of(getattr(message, field.name))
        return found

    @classmethod
    def changed(cls, rng, request):
        """A legal message with values that nobody means."""
        changed = type(request).FromString(request.SerializeToString())
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            message, field = rng.choice(cls.fields_of(changed))
            integer = rng.choice((0, 1, 2, 3, 4, 5, 6, 12, -1, 2**31 - 1, -2**31, rng.randrange(100)))
            number = rng.choice((0.0, -0.0, 1.0, -1.0, 0.5, NAN, INF, -INF, 1e300, -1e300, 1e-320, 65536.0))
            if field.name == 'shape':
                dimension = rng.choice((integer, 2**31, 2**60 + 2, 2**62 + 2, -2**63, 2**63 - 1))
                if rng.random() < 0.5 and message.shape:
                    message.shape[rng.randrange(len(message.shape))] = dimension
                else:
                    message.shape.append(dimension)
            elif field.name == 'values':
                if rng.random() < 0.5:
                    message.ClearField('data')
                message.values.extend(min(max(number, -3e38), 3e38) for _ in range(rng.randrange(1, 30)))
            elif field.type == field.TYPE_BYTES:
                size = rng.choice((len(message.data), rng.randrange(200)))
                message.data = bytes(rng.randrange(256) for _ in range(size))
            elif field.message_type:
                if message.HasField(field.name):
                    message.ClearField(field.name)
                else:
                    getattr(message, field.name).SetInParent()
            elif field.type == field.TYPE_STRING:
                setattr(message, field.name, rng.choice(('', 'models/m/layers/l', '../x', '%00', 'é' * 99)))
            elif field.type == field.TYPE_BOOL:
                setattr(message, field.name, not getattr(message, field.name))
            elif field.type == field.TYPE_DOUBLE:
                setattr(message, field.name, number)
            else:
                setattr(message, field.name, integer)
        return changed

    @staticmethod
    def mutated(rng, data):
        data = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = rng.randrange(len(data)) if data else 0
            kind = rng.randrange(5)
            if kind == 0 and data:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1 and data:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif kind == 2:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
            elif kind == 3:
                del data[at:at + rng.randrange(1, 9)]
            else:
                data[at:at] = data[rng.randrange(len(data) or 1):][:rng.randrange(1, 64)]
        return bytes(data)


class NumericsThroughTheService(unittest.TestCase):
    def test_row_0_has_the_same_bits_alone_and_in_every_batch_at_one_and_more_threads(self):
        rng = np.random.default_rng(7)
        x = rng.standard_normal((64, 4096), np.float32)
        up = rng.standard_normal((1024, 4096), np.float32)
        rows = set()
        for threads in (1, 2, 3):
            with Daemon(f'--threads={threads}') as daemon:
                stub = daemon.stub()
                for batch in ([1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64] if threads == 2
                              else [1, 2, 7, 64]):
                    request = plain_request(x[:batch], up, np.ones((1, 1024)))
                    request.intermediates = True
                    answer = stub.FeedForward(request, timeout=120)
                    rows.add(answer.intermediates.up.data[:4096])
        self.assertEqual(len(rows), 1)
        product = np.frombuffer(rows.pop(), '<f4')
        bound = (256 + 16) * 2.0**-24 * (np.abs(up).astype(np.float64) @ np.abs(x[0]).astype(np.float64))
        self.assertTrue((np.abs(product - up.astype(np.float64) @ x[0].astype(np.float64)) <= bound).all())

    def test_a_clean_request_after_one_with_nan_has_the_bits_it_always_has(self):
        rng = np.random.default_rng(8)
        gate, up, down = (rng.standard_normal(shape, np.float32) for shape in ((96, 64), (96, 64), (64, 96)))
        x = rng.standard_normal((3, 64), np.float32)
        bad = x.copy()
        bad[1, 5], bad[1, 6] = NAN, INF
        with Daemon('--threads=1') as daemon:
            stub = daemon.stub()
            clean = stub.FeedForward(swiglu_request(x, gate, up, down), timeout=60).output.data
            clean_norm = stub.Normalize(norm_request(x), timeout=60).output.data
            for _ in range(3):
                output = array_of(stub.FeedForward(swiglu_request(bad, gate, up, down), timeout=60).output)
                self.assertTrue(np.isnan(output[1]).all())
                self.assertEqual(output[[0, 2]].tobytes(), np.frombuffer(clean, '<f4').reshape(3, 64)[[0, 2]].tobytes())
                output = array_of(stub.Normalize(norm_request(bad), timeout=60).output)
                self.assertTrue(np.isnan(output[1]).all())
                self.assertEqual(output[[0, 2]].tobytes(),
                                 np.frombuffer(clean_norm, '<f4').reshape(3, 64)[[0, 2]].tobytes())
                self.assertEqual(stub.FeedForward(swiglu_request(x, gate, up, down), timeout=60).output.data, clean)
                self.assertEqual(stub.Normalize(norm_request(x), timeout=60).output.data, clean_norm)

    def test_zero_times_infinity_is_nan_at_every_batch_size(self):
        with Daemon() as daemon:
            stub = daemon.stub()
            for dtype in (FLOAT32, FLOAT16, BFLOAT16):
                for batch in list(range(1, 10)) + [16, 33]:
                    request = plain_request([[0, 1]] * batch, [[INF, 2]], [[1]], dtype=dtype)
                    output = array_of(stub.FeedForward(request, timeout=60).output)
                    self.assertEqual(output.shape, (batch, 1))
                    self.assertTrue(np.isnan(output).all(), (dtype, batch, output))

    def test_epsilon_left_out_is_the_default_and_0_is_0(self):
        with Daemon() as daemon:
            stub = daemon.stub()
            for kind, default in ((layer_pb.NORM_KIND_RMS_NORM, 1e-6), (layer_pb.NORM_KIND_LAYER_NORM, 1e-5)):
                x = np.array([[1e-3, -1e-3, 2e-3, 0]])
                left_out = stub.Normalize(norm_request(x, kind=kind), timeout=60).output.data
                given = stub.Normalize(norm_request(x, kind=kind, epsilon=default), timeout=60).output.data
                zero = stub.Normalize(norm_request(x, kind=kind, epsilon=0), timeout=60).output.data
                self.assertEqual(left_out, given)
                self.assertNotEqual(left_out, zero)
                output = array_of(stub.Normalize(norm_request(np.zeros((2, 4)), kind=kind, epsilon=0)).output)
                np.testing.assert_array_equal(output, np.zeros((2, 4)))


if __name__ == '__main__':
    unittest.main()
