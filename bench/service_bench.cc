// Measures calls of a layerd over loopback and unix sockets beside echoes of the same bytes; server and client share the
// process, and with it the CPUs. docs/performance.md tells how to run and read it.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "bench/cell.h"
#include "bench/echo_server.h"
#include "bench/feed_forward_layer.h"
#include "bench/norm_layer.h"
#include "bench/overload.h"
#include "bench/run_cells.h"
#include "client/remote_engine.h"
#include "client/shared_memory.h"
#include "lib/base/byte_budget.h"
#include "lib/base/parallel.h"
#include "lib/base/shared_regions.h"
#include "lib/engine/admission_engine.h"
#include "lib/engine/batching_engine.h"
#include "lib/engine/cpu_engine.h"
#include "lib/engine/resident_engine.h"
#include "lib/kernels/matmul.h"
#include "lib/resident/layer_source.h"
#include "server/resident_layers.h"
#include "server/server.h"

namespace layerd::bench {
namespace {

constexpr int64_t kRowBytes = kNormDim * static_cast<int64_t>(sizeof(float));
constexpr int64_t kMiB = int64_t{1} << 20;

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "service_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

// A folder for sockets, or for shared memory, that is removed at the end.
class Folder {
 public:
  explicit Folder(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "layerd_bench_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) Fail(absl::InternalError("no temporary folder can be made"));
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string Path(const char* name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// One layer, prepared already, by whatever name.
class OneLayer : public LayerSource {
 public:
  void Set(std::shared_ptr<const PackedFeedForward> packed, int64_t dim) {
    auto layer = std::make_shared<PreparedLayer>();
    layer->name = "models/bench/layers/mlp";
    layer->layer = FeedForwardLayer{.spec = packed->spec(), .weights = packed->outline()};
    layer->packed = std::move(packed);
    layer->extent.dim = dim;
    layer_ = std::move(layer);
  }
  void Acquire(std::string_view /*name*/, absl::Time /*deadline*/, PreparedLayerDone done) override { done(layer_); }

 private:
  std::shared_ptr<const PreparedLayer> layer_;
};

// The daemon as it is, but for its limits on sizes and for where its layer comes from, and its echoes.
class Servers {
 public:
  Servers(const Folder& folder, int threads)
      : engine_({.threads = threads, .max_answer_bytes = 1024 * kMiB, .at_once_work = kAtOnceWork}),
        batching_({.workers = threads, .sizes = {.limits = {.max_answer_bytes = 1024 * kMiB}}}, engine_),
        admission_({.workers = threads, .limits = {.max_answer_bytes = 1024 * kMiB}},
                   std::make_shared<ByteBudget>(4096 * kMiB, 0, "answers"), batching_),
        resident_(layer_, admission_),
        echo_(folder.Path("echo.sock")) {
    auto layers = ResidentLayers::Open({});
    if (!layers.ok()) Fail(layers.status());
    layers_ = *std::move(layers);
    ServerOptions options;
    options.grpc_listen = absl::StrCat("127.0.0.1:0,unix:", folder.Path("layerd.sock"));
    auto regions = SharedRegions::Open(memory_folder_.path());
    if (!regions.ok()) Fail(regions.status());
    regions_ = *std::move(regions);
    options.shared_memory = regions_.get();
    options.layer_service.max_message_bytes = 1024 * kMiB;
    options.admission.message_bytes = 4096 * kMiB;
    options.layer_service.decoding_threads = threads;
    auto server = Server::Start(options, resident_, layers_->registry());
    if (!server.ok()) Fail(server.status());
    server_ = *std::move(server);
  }
  ~Servers() { server_->Drain(absl::Seconds(1)); }

  std::string Target(bool tcp) const { return server_->addresses()[tcp ? 0 : 1]; }
  std::string EchoTarget(bool tcp) const { return tcp ? echo_.tcp_target() : echo_.unix_target(); }
  const Folder& memory_folder() const { return memory_folder_; }
  OneLayer& layer() { return layer_; }

 private:
  static constexpr double kAtOnceWork = 1 << 23;  // as in server/main.cc

  const Folder memory_folder_{"/dev/shm"};  // files elsewhere are written to disks
  std::unique_ptr<SharedRegions> regions_;
  OneLayer layer_;
  CpuEngine engine_;
  BatchingEngine batching_;
  AdmissionEngine admission_;
  ResidentEngine resident_;
  EchoServer echo_;
  std::unique_ptr<ResidentLayers> layers_;
  std::unique_ptr<Server> server_;
};

// How a call goes: in one message whatever its size, or as a stream of its rows.
enum class Sent : uint8_t { kWhole, kStreamed };

// A remote Normalize of so many rows.
struct RemoteNorm {
  RemoteNorm(const Arena& arena, const Servers& servers, bool tcp, int64_t rows, Sent sent = Sent::kWhole)
      : norm(NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, rows)),
        engine({.target = servers.Target(tcp),
                .stream_from_bytes = sent == Sent::kWhole ? std::numeric_limits<int64_t>::max() : 0}) {
    norm->inputs.gamma.reset();  // so that as many bytes go out as come back
  }

  void Run() {
    NormalizeCall call;
    call.spec = norm->spec;
    call.inputs = norm->inputs;
    auto result = Normalize(engine, std::move(call));
    if (!result.ok()) Fail(result.status());
    norm->output = result->outputs.output;
  }

  std::shared_ptr<NormUnderTest> norm;
  RemoteEngine engine;
};

Work WorkOf(const std::shared_ptr<RemoteNorm>& remote) {
  return NormWork(remote->norm, [remote] { remote->Run(); });
}

// As many bytes as the tensor has.
std::string SomeBytes(const RemoteNorm& remote) {
  const Tensor& input = remote.norm->inputs.input;
  return std::string(reinterpret_cast<const char*>(input.data()), input.num_bytes());
}

double ErrorOf(bool same) { return same ? 0.0 : std::numeric_limits<double>::quiet_NaN(); }

Cell NormCell(std::string variant, std::string baseline, int64_t rows, int threads, double goal) {
  const CellName name{"normalize", std::move(variant), "float32", kNormDim, 0, rows, threads};
  return {.name = name, .bound = Bound::kBaseline, .baseline = std::move(baseline), .goal = goal, .pinned = false};
}

// Beside an echo of the same bytes.
void AddOverEcho(const Servers& servers, bool tcp, int64_t rows, int threads, std::vector<Cell>& cells) {
  // Of a single row the call is what costs.
  const double goal = rows == 1 ? 1.25 : 1 / 0.8;
  Cell cell = NormCell(tcp ? "over_echo_tcp" : "over_echo_unix", "echo", rows, threads, goal);
  cell.prepare = [&servers, tcp, rows](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, servers, tcp, rows);
    const auto client = std::make_shared<EchoClient>(servers.EchoTarget(tcp));
    const grpc::Slice slice(SomeBytes(*remote));
    const auto bytes = std::make_shared<grpc::ByteBuffer>(&slice, 1);
    Work work = WorkOf(remote);
    work.baseline = [client, bytes] { client->EchoBytes(*bytes); };
    work.baseline_error = [client, bytes] {
      grpc::Slice sent, back;
      const bool whole =
          bytes->DumpToSingleSlice(&sent).ok() && client->EchoBytes(*bytes).DumpToSingleSlice(&back).ok();
      return ErrorOf(whole && sent.size() == back.size() && std::equal(sent.begin(), sent.end(), back.begin()));
    };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Beside a service of protobuf's that only sends the tensor back.
void AddOverProtobuf(const Servers& servers, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = NormCell("over_protobuf_tcp", "protobuf", rows, threads, 1.0 / 3);
  cell.prepare = [&servers, rows](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, servers, true, rows);
    const auto client = std::make_shared<EchoClient>(servers.EchoTarget(true));
    const auto data = std::make_shared<std::string>(SomeBytes(*remote));
    const auto response = std::make_shared<v1::NormalizeResponse>();
    Work work = WorkOf(remote);
    work.baseline = [client, data, response] {
      v1::NormalizeRequest request;
      request.mutable_input()->set_data(*data);  // a caller's tensor is somewhere else, too
      response->Clear();
      client->EchoMessage(request, *response);
    };
    work.baseline_error = [data, response] { return ErrorOf(response->output().data() == *data); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Through shared memory, beside the same layer in this process.
void AddOverInProcess(const Servers& servers, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = NormCell("shared_memory", "in process", rows, threads, 1 / 0.8);
  cell.prepare = [&servers, rows](const Arena& arena) {
    const auto inside = NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, rows);
    inside->inputs.gamma.reset();
    const auto norm = std::make_shared<NormUnderTest>(*inside);
    const Tensor& input = inside->inputs.input;
    const auto bytes = static_cast<int64_t>(input.num_bytes());
    auto memory = SharedMemory::Create(
        {.target = servers.Target(false), .folder = servers.memory_folder().path(), .bytes = 2 * bytes});
    if (!memory.ok()) Fail(memory.status());
    auto shared = (*memory)->TensorAt(0, input.dtype(), input.shape());
    if (!shared.ok()) Fail(shared.status());
    input.CopyTo(shared->mutable_data());
    norm->inputs.input = *std::move(shared);
    const auto engine = std::make_shared<RemoteEngine>(
        RemoteEngineOptions{.target = servers.Target(false), .shared_memory = {*memory}});
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
    work.baseline_error = [inside, norm] { return ErrorOf(SameBits(inside->output, norm->output)); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// One call of 64 MiB beside 64 calls of 1 MiB.
void AddGrowth(const Servers& servers, int threads, std::vector<Cell>& cells) {
  constexpr int kCalls = 64;
  Cell cell = NormCell("over_64_calls", "64 calls of 64 rows", 64 * kMiB / kRowBytes, threads, 1.3);
  cell.prepare = [&servers](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, servers, true, 64 * kMiB / kRowBytes);
    const auto small = std::make_shared<RemoteNorm>(arena, servers, true, kMiB / kRowBytes);
    Work work = WorkOf(remote);
    work.baseline = [small] {
      for (int i = 0; i < kCalls; ++i) small->Run();
    };
    work.baseline_error = [small] { return NormError(*small->norm); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// A call of so many rows as a stream of them, beside the same in one message. Both answers are read in one piece, as
// callers read them.
void AddStreamedCall(const Servers& servers, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = NormCell("streamed_call", "one message", rows, threads, 1.1);
  if (rows * kRowBytes < RemoteEngineOptions().stream_from_bytes) cell.goal.reset();  // no stream, but for this
  cell.prepare = [&servers, rows](const Arena& arena) {
    const auto streamed = std::make_shared<RemoteNorm>(arena, servers, true, rows, Sent::kStreamed);
    const auto whole = std::make_shared<RemoteNorm>(arena, servers, true, rows);
    Work work = NormWork(streamed->norm, [streamed] {
      streamed->Run();
      streamed->norm->output.data();
    });
    work.baseline = [whole] {
      whole->Run();
      whole->norm->output.data();
    };
    work.baseline_error = [whole] { return NormError(*whole->norm); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Sends the rows of `remote` `times` over in messages of `chunk_rows`; gives the answers to the last `rows` of them.
std::vector<Tensor> StreamRows(RemoteNorm& remote, int times, int64_t chunk_rows) {
  const Tensor& input = remote.norm->inputs.input;
  const int64_t chunks = input.dim(0) / chunk_rows;
  NormalizeCall call;
  call.spec = remote.norm->spec;
  call.inputs.input = input.Rows(0, 0);
  const auto stream = remote.engine.StreamNormalize(call);
  std::vector<Tensor> answers(chunks);
  for (int64_t sent = 0, got = -1; got < times * chunks; ++got) {  // the call itself is the first to be answered
    for (; sent < times * chunks && sent - got < kMostUnanswered; ++sent) {
      if (!stream->Write({.input = input.Rows(sent % chunks * chunk_rows, chunk_rows)})) break;
    }
    auto answer = stream->Read();
    if (!answer.ok()) Fail(answer.status());
    if (got >= 0) answers[got % chunks] = (*answer)->outputs.output;
  }
  if (auto status = stream->Finish(); !status.ok()) Fail(status);
  return answers;
}

// 256 MiB of rows as one stream, beside four calls of 64 MiB.
void AddStream(const Servers& servers, int threads, std::vector<Cell>& cells) {
  constexpr int kCalls = 4;
  static constexpr int64_t kRows = 64 * kMiB / kRowBytes, kChunkRows = kMostRowBytes / kRowBytes;
  Cell cell = NormCell("stream", "calls of 64 MiB", kCalls * kRows, threads, 1.0);
  cell.prepare = [&servers](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, servers, true, kRows);
    const auto answers = std::make_shared<std::vector<Tensor>>();
    Work work = NormWork(remote->norm, [remote, answers] { *answers = StreamRows(*remote, kCalls, kChunkRows); });
    work.bytes *= kCalls;
    work.baseline = [remote] {
      for (int i = 0; i < kCalls; ++i) remote->Run();
    };
    work.baseline_error = [remote] { return NormError(*remote->norm); };
    work.error = [remote, answers] {
      for (size_t i = 0; i < answers->size(); ++i) {
        const Tensor whole = remote->norm->output.Rows(static_cast<int64_t>(i) * kChunkRows, kChunkRows);
        if (!SameBits((*answers)[i], whole)) return ErrorOf(false);
      }
      return NormError(*remote->norm);
    };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Callers of one row each of a resident layer, who ask again as soon as they are answered.
class Callers {
 public:
  static constexpr int kCallsOfEach = 8;

  Callers(const std::string& target, const Tensor& input, int count) : engine_({.target = target}) {
    for (int i = 0; i < count; ++i) rows_.push_back(RowsOf(input, i, 1));
    output_ = Tensor::Allocate(DType::kFloat32, {count, input.dim(1)});
  }

  // Each makes its calls; the answers are kept.
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
    call.layer = "models/bench/layers/mlp";
    call.input = rows_[caller];
    const auto result = FeedForward(engine_, std::move(call));
    if (!result.ok()) Fail(result.status());
    const Tensor& answer = result->outputs.output;
    std::memcpy(output_.mutable_data() + caller * answer.num_bytes(), answer.data(), answer.num_bytes());
  }
  const Tensor& output() const { return output_; }

 private:
  RemoteEngine engine_;
  std::vector<Tensor> rows_;
  Tensor output_;
};

// Resident bfloat16 layers: 32 callers beside the product of 32 rows, one beside the product of its row and an echo. The
// bits must be those of the products.
void AddFeedForward(Servers& servers, int threads, std::vector<Cell>& cells) {
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
    cell.prepare = [&servers, count, kShape](const Arena& arena) {
      const auto layer = LayerOf(arena, kShape, DType::kBFloat16);
      const PackedFeedForward& packed = PackedOf(arena, *layer);
      servers.layer().Set({layer, &packed}, kShape.dim);
      const Tensor input = RowsOf(layer->input, 0, count);
      const auto callers = std::make_shared<Callers>(servers.Target(true), input, count);
      const auto client = std::make_shared<EchoClient>(servers.EchoTarget(true));
      const grpc::Slice slice(std::string(kShape.dim * sizeof(float), 'x'));
      const auto bytes = std::make_shared<grpc::ByteBuffer>(&slice, 1);
      const auto output = std::make_shared<Tensor>();
      Work work;
      if (count == 1) {
        work.run = [callers] { callers->Call(0); };
        work.baseline = [&arena, &packed, input, output, client, bytes] {
          *output = FeedForward(arena, packed, input, std::nullopt, false)->output;
          client->EchoBytes(*bytes);
        };
      } else {
        work.run = [callers] { callers->Run(); };
        work.baseline = [&arena, &packed, input, output] {
          for (int i = 0; i < Callers::kCallsOfEach; ++i) {
            *output = FeedForward(arena, packed, input, std::nullopt, false)->output;
          }
        };
      }
      work.error = [&arena, layer, callers, output] {
        return SameBits(callers->output(), *output) ? FeedForwardError(arena, *layer, callers->output())
                                                    : ErrorOf(false);
      };
      work.flops = FeedForwardFlops(layer->spec, {count, kShape.dim, kShape.hidden_dim, kShape.dim}) *
                   (count == 1 ? 1 : Callers::kCallsOfEach);
      work.bytes = WeightBytes(*layer);
      return work;
    };
    cells.push_back(std::move(cell));
  }
}

// Callers of one row at the same time beside as many of an echo.
void AddConcurrentRows(const Servers& servers, int threads, std::vector<Cell>& cells) {
  constexpr int kCallers = 64, kCallsOfEach = 16;
  Cell cell = NormCell("callers_64", "64 of an echo", 1, threads, 1 / 0.8);
  cell.prepare = [&servers](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, servers, true, 1);
    const auto client = std::make_shared<EchoClient>(servers.EchoTarget(true));
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
        NormalizeCall call;
        call.spec = remote->norm->spec;
        call.inputs = remote->norm->inputs;
        if (const auto result = Normalize(remote->engine, std::move(call)); !result.ok()) Fail(result.status());
      });
      remote->Run();
    });
    work.baseline = [client, bytes, together] { together([&] { client->EchoBytes(*bytes); }); };
    return work;
  };
  cells.push_back(std::move(cell));
}

// Ten times as many calls as can be served, with a deadline, beside callers who just keep the server busy: the time to the
// same number of answers. Wrong where an accepted call is late, or 1 in 100 refusals takes more than 10 ms.
void AddOverload(Servers& servers, int threads, std::vector<Cell>& cells) {
  constexpr FeedForwardShape kShape = {4096, 11008};
  constexpr int64_t kRows = 64, kAnswers = 60;
  constexpr int kCallers = 8;
  constexpr double kTimes = 10;
  Cell cell{.name = {"feed_forward", "overload", "bfloat16", kShape.dim, kShape.hidden_dim, kRows, threads},
            .bound = Bound::kBaseline,
            .baseline = "8 callers",
            .goal = 1 / 0.9,
            .pinned = false};
  cell.prepare = [&servers, kShape](const Arena& arena) {
    const auto layer = LayerOf(arena, kShape, DType::kBFloat16);
    const PackedFeedForward& packed = PackedOf(arena, *layer);
    servers.layer().Set({layer, &packed}, kShape.dim);
    FeedForwardCall call;
    call.layer = "models/bench/layers/mlp";
    call.input = RowsOf(layer->input, 0, kRows);
    const auto overload = std::make_shared<Overload>(servers.Target(true), call);
    const auto rate = std::make_shared<double>(0);  // of answers, as measured last
    Work work;
    work.baseline = [overload, rate] {
      const absl::Time begun = absl::Now();
      overload->Closed(kCallers, kAnswers);
      *rate = kAnswers / absl::ToDoubleSeconds(absl::Now() - begun);
    };
    work.run = [overload, rate, baseline = work.baseline] {
      if (*rate == 0) baseline();
      overload->Open(kTimes * *rate, absl::Seconds(1), kAnswers);
    };
    work.error = [&arena, layer, overload] {
      const OverloadCounts counts = overload->counts();
      std::printf(
          "overload: %ld answered (p99 %.0f ms), %ld late, %ld refused (p99 %.1f ms), memory grew by %.0f MiB\n",
          counts.answered, counts.answered_p99_seconds * 1e3, counts.late, counts.refused,
          counts.refused_p99_seconds * 1e3, counts.peak_resident_growth_bytes / kMiB);
      const bool kept = counts.late == 0 && counts.refused > 0 && counts.refused_p99_seconds <= 0.010;
      return kept ? FeedForwardError(arena, *layer, overload->answer()) : ErrorOf(false);
    };
    work.flops = FeedForwardFlops(layer->spec, {kRows, kShape.dim, kShape.hidden_dim, kShape.dim}) * kAnswers;
    work.bytes = WeightBytes(*layer);
    return work;
  };
  cells.push_back(std::move(cell));
}

int Main(RunOptions& options, int threads) {
  if (const auto matmul = InitMatMul(true); !matmul.ok()) Fail(matmul.status());
  const Folder folder;
  Servers servers(folder, threads);
  std::vector<Cell> cells;
  for (const bool tcp : {true, false}) {
    for (const int64_t rows : {int64_t{1}, kMiB / kRowBytes, 16 * kMiB / kRowBytes, 64 * kMiB / kRowBytes}) {
      AddOverEcho(servers, tcp, rows, threads, cells);
    }
  }
  AddOverProtobuf(servers, 64 * kMiB / kRowBytes, threads, cells);
  AddOverInProcess(servers, 64 * kMiB / kRowBytes, threads, cells);
  AddGrowth(servers, threads, cells);
  AddConcurrentRows(servers, threads, cells);
  for (const int64_t mib : {4, 16, 64}) AddStreamedCall(servers, mib * kMiB / kRowBytes, threads, cells);
  AddStream(servers, threads, cells);
  AddFeedForward(servers, threads, cells);
  AddOverload(servers, threads, cells);
  return RunCells(options, Chosen(options, std::move(cells)), DescribeMachine());
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  layerd::bench::RunOptions options;
  int threads = layerd::AvailableCpus();
  CLI::App app("Measures calls of a layerd beside echoes of the same bytes.");
  layerd::bench::AddRunOptions(app, options);
  app.add_option("--threads", threads, "Computing threads of the server")
      ->check(CLI::Range(1, layerd::AvailableCpus()))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return layerd::bench::Main(options, threads);
}
