#include "wire/normalize_codec.h"

#include <string>
#include <utility>

#include "lib/base/errors.h"
#include "wire/report_codec.h"
#include "wire/shared_memory_codec.h"
#include "wire/spec_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
absl::StatusOr<NormalizeCall> DecodeCall(const v1::NormalizeRequest& request, const ReceivedStorage& storage) {
  if (!request.has_input()) return MissingField("input", "expected a tensor, got nothing");
  NormalizeCall call;
  if (auto status = DecodeLayer(request, call); !status.ok()) return status;
  auto input = DecodeTensor(request.input(), storage);
  if (!input.ok()) return Under("input", input.status());
  call.inputs.input = *std::move(input);
  for (const auto& status :
       {DecodeOptionalTensor("gamma", request.has_gamma(), request.gamma(), storage, call.inputs.gamma),
        DecodeOptionalTensor("beta", request.has_beta(), request.beta(), storage, call.inputs.beta),
        DecodeOptionalTensor("residual", request.has_residual(), request.residual(), storage, call.inputs.residual),
        DecodeOptionalTensor("gate", request.has_gate(), request.gate(), storage, call.inputs.gate)}) {
    if (!status.ok()) return status;
  }
  const auto output_dtype = DecodeOptionalDType("output_dtype", request.output_dtype());
  if (!output_dtype.ok()) return output_dtype.status();
  call.output_dtype = *output_dtype;
  if (auto status = DecodePlace("output_memory", request.has_output_memory(), request.output_memory(), storage,
                                call.output_memory);
      !status.ok()) {
    return status;
  }
  call.verify = request.verify();
  call.intermediates = request.intermediates();
  return call;
}

void EncodeCall(const NormalizeCall& call, v1::NormalizeRequest& request, SentStorage& storage) {
  EncodeTensor(call.inputs.input, *request.mutable_input(), storage);
  EncodeLayer(call, request);
  if (call.inputs.gamma) EncodeTensor(*call.inputs.gamma, *request.mutable_gamma(), storage);
  if (call.inputs.beta) EncodeTensor(*call.inputs.beta, *request.mutable_beta(), storage);
  if (call.inputs.residual) EncodeTensor(*call.inputs.residual, *request.mutable_residual(), storage);
  if (call.inputs.gate) EncodeTensor(*call.inputs.gate, *request.mutable_gate(), storage);
  if (call.output_dtype) request.set_output_dtype(EncodeDType(*call.output_dtype));
  if (call.output_memory) {
    if (auto place = EncodePlace(*call.output_memory, storage)) *request.mutable_output_memory() = *std::move(place);
  }
  request.set_verify(call.verify);
  request.set_intermediates(call.intermediates);
}

void EncodeResult(const NormalizeResult& result, v1::NormalizeResponse& response, SentStorage& storage) {
  const NormalizeOutputs& outputs = result.outputs;
  EncodeTensor(outputs.output, *response.mutable_output(), storage);
  if (outputs.residual_sum) EncodeTensor(*outputs.residual_sum, *response.mutable_residual_sum(), storage);
  if (outputs.inverse_rms) {
    EncodeTensor(*outputs.inverse_rms, *response.mutable_intermediates()->mutable_inverse_rms(), storage);
  }
  if (outputs.mean) EncodeTensor(*outputs.mean, *response.mutable_intermediates()->mutable_mean(), storage);
  if (result.report) EncodeReport(*result.report, *response.mutable_report());
  response.set_layer_hash(result.layer_hash);
}

absl::StatusOr<NormalizeResult> DecodeResult(const v1::NormalizeResponse& response, const ReceivedStorage& storage) {
  NormalizeResult result;
  auto output = DecodeTensor(response.output(), storage);
  if (!output.ok()) return Under("output", output.status());
  result.outputs.output = *std::move(output);
  const auto& inside = response.intermediates();
  for (const auto& status :
       {DecodeOptionalTensor("residual_sum", response.has_residual_sum(), response.residual_sum(), storage,
                             result.outputs.residual_sum),
        DecodeOptionalTensor("intermediates.inverse_rms", inside.has_inverse_rms(), inside.inverse_rms(), storage,
                             result.outputs.inverse_rms),
        DecodeOptionalTensor("intermediates.mean", inside.has_mean(), inside.mean(), storage, result.outputs.mean)}) {
    if (!status.ok()) return status;
  }
  if (response.has_report()) result.report = DecodeReport(response.report());
  result.layer_hash = response.layer_hash();
  return result;
}

}  // namespace layerd::wire
