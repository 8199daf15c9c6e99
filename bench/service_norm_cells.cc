// Cells of norms that go as one message each: beside echoes of the same bytes, and beside the layer in this process where
// memory is shared.
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/cell.h"
#include "bench/echo_client.h"
#include "bench/fail.h"
#include "bench/norm_layer.h"
#include "bench/remote_norm.h"
#include "bench/service_cells.h"
#include "bench/services.h"
#include "client/remote_engine.h"
#include "client/shared_memory.h"
#include "layerd/v1/layer_service.pb.h"

namespace layerd::bench {
namespace {

// As many bytes as the tensor has.
std::string SomeBytes(const RemoteNorm& remote) {
  const Tensor& input = remote.norm->inputs.input;
  return std::string(reinterpret_cast<const char*>(input.data()), input.num_bytes());
}

// Beside an echo of the same bytes.
void AddOverEcho(const Services& services, bool tcp, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = RemoteNormCell(tcp ? "over_echo_tcp" : "over_echo_unix", "echo", rows, threads, 1 / 0.8);
  cell.prepare = [&services, tcp, rows](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, services.Target(tcp), rows);
    const auto client = std::make_shared<EchoClient>(services.EchoTarget(tcp));
    const grpc::Slice slice(SomeBytes(*remote));
    const auto bytes = std::make_shared<grpc::ByteBuffer>(&slice, 1);
    Work work = WorkOf(remote);
    work.baseline = [client, bytes] { client->EchoBytes(*bytes); };
    work.baseline_error = [client, bytes] {
      grpc::Slice sent, back;
      const bool whole =
          bytes->DumpToSingleSlice(&sent).ok() && client->EchoBytes(*bytes).DumpToSingleSlice(&back).ok();
      return BitError(whole && sent.size() == back.size() && std::equal(sent.begin(), sent.end(), back.begin()));
    };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Beside a service of protobuf's that only sends the tensor back.
void AddOverProtobuf(const Services& services, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = RemoteNormCell("over_protobuf_tcp", "protobuf", rows, threads, 1.0 / 3);
  cell.prepare = [&services, rows](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, services.Target(true), rows);
    const auto client = std::make_shared<EchoClient>(services.EchoTarget(true));
    const auto data = std::make_shared<std::string>(SomeBytes(*remote));
    const auto response = std::make_shared<v1::NormalizeResponse>();
    Work work = WorkOf(remote);
    work.baseline = [client, data, response] {
      v1::NormalizeRequest request;
      request.mutable_input()->set_data(*data);  // a caller's tensor is somewhere else, too
      response->Clear();
      client->EchoMessage(request, *response);
    };
    work.baseline_error = [data, response] { return BitError(response->output().data() == *data); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Through shared memory, beside the same layer in this process.
void AddOverInProcess(const Services& services, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = RemoteNormCell("shared_memory", "in process", rows, threads, 1 / 0.8);
  cell.prepare = [&services, rows](const Arena& arena) {
    const auto inside = NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, rows);
    inside->inputs.gamma.reset();
    const auto norm = std::make_shared<NormUnderTest>(*inside);
    const Tensor& input = inside->inputs.input;
    const auto bytes = static_cast<int64_t>(input.num_bytes());
    auto memory = SharedMemory::Create(
        {.target = services.Target(false), .folder = services.memory_folder(), .bytes = 2 * bytes});
    if (!memory.ok()) Fail(memory.status());
    auto shared = (*memory)->TensorAt(0, input.dtype(), input.shape());
    if (!shared.ok()) Fail(shared.status());
    input.CopyTo(shared->mutable_data());
    norm->inputs.input = *std::move(shared);
    const auto engine = std::make_shared<RemoteEngine>(
        RemoteEngineOptions{.target = services.Target(false), .shared_memory = {*memory}});
    Work work = NormWork(norm, [norm, engine, memory = *memory, bytes] {
      NormalizeCall call;
      call.spec = norm->spec;
      call.inputs = norm->inputs;
      call.output_memory = memory->PlaceAt(bytes);
      auto result = Normalize(*engine, std::move(call));
      if (!result.ok()) Fail(result.status());
      norm->output = result->outputs.output;
    });
    work.baseline = NormLayerOf(arena, inside);
    work.baseline_error = [inside, norm] { return BitError(SameBits(inside->output, norm->output)); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// One call of 64 MiB beside 64 calls of 1 MiB.
void AddGrowth(const Services& services, int threads, std::vector<Cell>& cells) {
  constexpr int kCalls = 64;
  Cell cell = RemoteNormCell("over_64_calls", "64 calls of 64 rows", 64 * kMiB / kNormRowBytes, threads, 1.3);
  cell.prepare = [&services](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, services.Target(true), 64 * kMiB / kNormRowBytes);
    const auto small = std::make_shared<RemoteNorm>(arena, services.Target(true), kMiB / kNormRowBytes);
    Work work = WorkOf(remote);
    work.baseline = [small] {
      for (int i = 0; i < kCalls; ++i) small->Run();
    };
    work.baseline_error = [small] { return NormError(*small->norm); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Callers of one row at the same time beside as many of an echo.
void AddConcurrentRows(const Services& services, int threads, std::vector<Cell>& cells) {
  constexpr int kCallers = 64, kCallsOfEach = 16;
  Cell cell = RemoteNormCell("callers_64", "64 of an echo", 1, threads, 1 / 0.8);
  cell.prepare = [&services](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, services.Target(true), 1);
    const auto client = std::make_shared<EchoClient>(services.EchoTarget(true));
    const grpc::Slice slice(SomeBytes(*remote));
    const auto bytes = std::make_shared<grpc::ByteBuffer>(&slice, 1);
    const auto together = [](const std::function<void()>& call) {
      std::vector<std::thread> callers;
      for (int i = 0; i < kCallers; ++i) {
        callers.emplace_back([&call] {
          for (int n = 0; n < kCallsOfEach; ++n) call();
        });
      }
      for (std::thread& caller : callers) caller.join();
    };
    Work work = NormWork(remote->norm, [remote, together] {
      together([&remote] {
        if (const auto result = Normalize(remote->engine, remote->Call()); !result.ok()) Fail(result.status());
      });
      remote->Run();
    });
    work.baseline = [client, bytes, together] { together([&] { client->EchoBytes(*bytes); }); };
    return work;
  };
  cells.push_back(std::move(cell));
}

}  // namespace

void AddServiceNormCells(const Services& services, int threads, std::vector<Cell>& cells) {
  for (const bool tcp : {true, false}) {
    for (const int64_t rows :
         {int64_t{1}, kMiB / kNormRowBytes, 16 * kMiB / kNormRowBytes, 64 * kMiB / kNormRowBytes}) {
      AddOverEcho(services, tcp, rows, threads, cells);
    }
  }
  AddOverProtobuf(services, 64 * kMiB / kNormRowBytes, threads, cells);
  AddOverInProcess(services, 64 * kMiB / kNormRowBytes, threads, cells);
  AddGrowth(services, threads, cells);
  AddConcurrentRows(services, threads, cells);
}

}  // namespace layerd::bench
