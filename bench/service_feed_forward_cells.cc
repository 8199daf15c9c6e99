// Cells of a resident bfloat16 layer: one caller beside the product of its row and an echo, 32 beside the product of 32
// rows.
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/cell.h"
#include "bench/echo_client.h"
#include "bench/fail.h"
#include "bench/feed_forward_layer.h"
#include "bench/service_cells.h"
#include "bench/services.h"
#include "bench/shapes.h"
#include "client/remote_engine.h"
#include "lib/layers/feed_forward.h"

namespace layerd::bench {
namespace {

// Callers of one row each, who ask again as soon as they are answered.
class Callers {
 public:
  static constexpr int kCallsOfEach = 8;

  // `expected`: what must come back for each row of `input`, to the bit.
  Callers(const std::string& target, const Tensor& input, const Tensor& expected) : engine_({.target = target}) {
    for (int64_t i = 0; i < input.dim(0); ++i) {
      rows_.push_back(input.Rows(i, 1));
      expected_.push_back(expected.Rows(i, 1));
    }
  }

  // Each makes its calls.
  void Run() {
    std::vector<std::thread> callers;
    for (size_t i = 0; i < rows_.size(); ++i) {
      callers.emplace_back([this, i] {
        for (int call = 0; call < kCallsOfEach; ++call) Call(i);
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  void Call(size_t caller) {
    FeedForwardCall call;
    call.layer = Services::kLayer;
    call.input = rows_[caller];
    const auto result = FeedForward(engine_, std::move(call));
    if (!result.ok()) Fail(result.status());
    if (!SameBits(result->outputs.output, expected_[caller])) ++differing_;
  }
  // Of all answers so far, those that were not what must come back.
  int64_t differing() const { return differing_; }

 private:
  RemoteEngine engine_;
  std::vector<Tensor> rows_, expected_;
  std::atomic<int64_t> differing_ = 0;
};

}  // namespace

void AddServiceFeedForwardCells(const Services& services, int threads, std::vector<Cell>& cells) {
  constexpr FeedForwardShape kShape = {4096, 11008};
  for (const int count : {1, 32}) {
    const CellName name{
        "feed_forward", count == 1 ? "one_caller" : "callers", "bfloat16", kShape.dim, kShape.hidden_dim, count,
        threads};
    Cell cell{.name = name,
              .bound = Bound::kBaseline,
              .baseline = count == 1 ? "in process + echo" : "in process",
              .goal = count == 1 ? 1.05 : 1 / 0.8,
              .pinned = false};
    cell.prepare = [&services, count, kShape](const Arena& arena) {
      const auto layer = LayerOf(arena, kShape, DType::kBFloat16);
      services.Upload(*layer);
      const Tensor input = layer->input.Rows(0, count);
      const auto in_process = [&arena, &packed = PackedOf(arena, *layer), input] {
        return FeedForward(arena, packed, input, std::nullopt, false)->output;
      };
      const Tensor expected = in_process();
      const auto callers = std::make_shared<Callers>(services.Target(true), input, expected);
      Work work;
      if (count == 1) {
        const auto client = std::make_shared<EchoClient>(services.EchoTarget(true));
        const grpc::Slice slice(std::string(kShape.dim * sizeof(float), 'x'));
        const auto bytes = std::make_shared<grpc::ByteBuffer>(&slice, 1);
        work.run = [callers] { callers->Call(0); };
        work.baseline = [in_process, client, bytes] {
          in_process();
          client->EchoBytes(*bytes);
        };
      } else {
        work.run = [callers] { callers->Run(); };
        work.baseline = [in_process] {
          for (int i = 0; i < Callers::kCallsOfEach; ++i) in_process();
        };
      }
      work.error = [&arena, layer, callers, expected] {
        return callers->differing() == 0 ? FeedForwardError(arena, *layer, expected) : BitError(false);
      };
      work.flops = FeedForwardFlops(layer->spec, {count, kShape.dim, kShape.hidden_dim, kShape.dim}) *
                   (count == 1 ? 1 : Callers::kCallsOfEach);
      work.bytes = WeightBytes(*layer);
      return work;
    };
    cells.push_back(std::move(cell));
  }
}

}  // namespace layerd::bench
