// Cells of norms whose rows go as a stream.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/cell.h"
#include "bench/fail.h"
#include "bench/norm_layer.h"
#include "bench/remote_norm.h"
#include "bench/service_cells.h"
#include "bench/services.h"
#include "client/remote_engine.h"
#include "client/row_stream.h"

namespace layerd::bench {
namespace {

// A call of so many rows as a stream of them, beside the same in one message. Both answers are read in one piece, as
// callers read them.
void AddStreamedCall(const Services& services, int64_t rows, int threads, std::vector<Cell>& cells) {
  Cell cell = RemoteNormCell("streamed_call", "one message", rows, threads, 1.1);
  if (rows * kNormRowBytes < RemoteEngineOptions().stream_from_bytes) cell.goal.reset();  // no stream, but for this
  cell.prepare = [&services, rows](const Arena& arena) {
    const auto streamed = std::make_shared<RemoteNorm>(arena, services.Target(true), rows, Sent::kStreamed);
    const auto whole = std::make_shared<RemoteNorm>(arena, services.Target(true), rows);
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
  NormalizeCall call = remote.Call();
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
void AddStream(const Services& services, int threads, std::vector<Cell>& cells) {
  constexpr int kCalls = 4;
  static constexpr int64_t kRows = 64 * kMiB / kNormRowBytes, kChunkRows = kMostRowBytes / kNormRowBytes;
  Cell cell = RemoteNormCell("stream", "calls of 64 MiB", kCalls * kRows, threads, 1.0);
  cell.prepare = [&services](const Arena& arena) {
    const auto remote = std::make_shared<RemoteNorm>(arena, services.Target(true), kRows);
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
        if (!SameBits((*answers)[i], whole)) return BitError(false);
      }
      return NormError(*remote->norm);
    };
    return work;
  };
  cells.push_back(std::move(cell));
}

}  // namespace

void AddServiceStreamCells(const Services& services, int threads, std::vector<Cell>& cells) {
  for (const int64_t mib : {4, 16, 64}) AddStreamedCall(services, mib * kMiB / kNormRowBytes, threads, cells);
  AddStream(services, threads, cells);
}

}  // namespace layerd::bench
