// Asks a layerd for an RMSNorm and a SwiGLU layer: `ask [HOST:PORT]`.
#include <layerd/client/remote_engine.h>
#include <layerd/lib/base/errors.h>
#include <layerd/lib/layers/seeded.h>

#include <iostream>

namespace {

int Fail(const absl::Status& status) {
  const layerd::ErrorDetails details = layerd::DetailsOf(status);
  std::cerr << absl::StatusCodeToString(status.code()) << " (" << details.reason << "): " << status.message() << "\n";
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  layerd::RemoteEngineOptions options;
  if (argc > 1) options.target = argv[1];
  layerd::RemoteEngine engine(options);

  // y = x / √(mean(x²) + ε), one row of four values.
  layerd::NormalizeCall norm;
  norm.spec.kind = layerd::NormKind::kRmsNorm;
  norm.inputs.input = layerd::Tensor::FromFloats(layerd::DType::kFloat32, {1, 4}, {0.5f, -1.5f, 2.0f, 1.0f});
  norm.context.deadline = absl::Now() + absl::Seconds(10);
  const auto normed = layerd::Normalize(engine, norm);
  if (!normed.ok()) return Fail(normed.status());
  for (const float y : normed->outputs.output.ToFloats()) std::cout << y << " ";
  std::cout << "\n";

  // A SwiGLU layer, 64 → 172 → 64, with weights made from a seed, on two rows; the server reports its own error.
  layerd::FeedForwardCall layer;
  layer.spec = layerd::SwiGluSpec();
  layer.weights = layerd::SeededFeedForwardWeights(1, layer.spec, layerd::DType::kFloat32, 64, 172, /*biases=*/false);
  layer.input = layerd::SeededInput(1, layerd::DType::kFloat32, {2, 64});
  layer.verify = true;
  layer.context.deadline = absl::Now() + absl::Seconds(10);
  const auto fed = layerd::FeedForward(engine, layer);
  if (!fed.ok()) return Fail(fed.status());
  std::cout << "output " << layerd::ToString(fed->outputs.output.shape()) << ", largest error "
            << fed->report->max_abs_error << (fed->report->within_contract ? ", within the contract\n" : "\n");

  // What the server refuses comes back with its reason and the path of the field.
  layer.weights.down.reset();
  const absl::Status refused = layerd::FeedForward(engine, layer).status();
  std::cout << layerd::DetailsOf(refused).field << ": " << layerd::DetailsOf(refused).reason << "\n";
  return refused.ok() ? 1 : 0;
}
