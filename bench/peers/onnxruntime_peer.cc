// ONNX Runtime, by the few entries of its C interface that are needed: a table of functions that only ever grows at its
// end, so that its places can be counted on.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/peers/peer.h"
#include "bench/random_data.h"

namespace layerd::bench {
namespace {

enum Entry {
  kGetErrorMessage = 2,
  kCreateEnv = 3,
  kCreateSession = 7,
  kRun = 9,
  kCreateSessionOptions = 10,
  kSetGraphOptimizationLevel = 23,
  kSetIntraOpNumThreads = 24,
  kSetInterOpNumThreads = 25,
  kCreateTensorWithData = 49,
  kCreateCpuMemoryInfo = 69,
  kReleaseSession = 95,
  kReleaseValue = 96,
};
constexpr int kAllOptimizations = 99, kWarning = 2, kFloat = 1;

class Interface {
 public:
  Interface(const void* const* table, std::string version) : table_(table), version_(std::move(version)) {}
  const std::string& version() const { return version_; }

  // Throws std::runtime_error with the library's message where the call fails.
  template <typename... Args>
  void Call(Entry entry, Args... args) const {
    void* status = reinterpret_cast<void* (*)(Args...)>(const_cast<void*>(table_[entry]))(args...);
    if (status == nullptr) return;
    const auto message = reinterpret_cast<const char* (*)(void*)>(const_cast<void*>(table_[kGetErrorMessage]));
    throw std::runtime_error(absl::StrCat("ONNX Runtime: ", message(status)));
  }
  void Release(Entry entry, void* object) const {
    reinterpret_cast<void (*)(void*)>(const_cast<void*>(table_[entry]))(object);
  }

 private:
  const void* const* table_;
  std::string version_;
};

template <typename T>
void Write(std::ofstream& file, const std::vector<T>& values) {
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
}

void Close(std::ofstream& file, const std::string& path) {
  file.close();
  if (!file) throw std::runtime_error(absl::StrCat(path, ": cannot be written"));
}

// Weights as the models of make_models.py want them: float32 as [in, out].
void WriteTransposed(const Tensor& weights, const std::string& path) {
  const int64_t out = weights.dim(0), in = weights.dim(1);
  std::ofstream file(path, std::ios::binary);
  constexpr int64_t kLines = 64;
  std::vector<float> lines;
  for (int64_t first = 0; first < in; first += kLines) {
    const int64_t count = std::min(kLines, in - first);
    lines.resize(static_cast<size_t>(count * out));
    for (int64_t n = 0; n < out; ++n) {
      for (int64_t k = 0; k < count; ++k) lines[k * out + n] = weights.floats()[n * in + first + k];
    }
    Write(file, lines);
  }
  Close(file, path);
}

// Int8 with a zero point of 128, the last block of each output filled up with zeros; and the scales in float32.
void WriteInt8(const Tensor& weights, const Tensor& scale, const std::string& path) {
  const int64_t out = weights.dim(0), in = weights.dim(1), blocks = scale.dim(1);
  std::ofstream file(path, std::ios::binary);
  std::vector<uint8_t> line(static_cast<size_t>(blocks * kScaleBlock), 128);
  for (int64_t n = 0; n < out; ++n) {
    for (int64_t k = 0; k < in; ++k) line[k] = static_cast<uint8_t>(weights.At(n * in + k) + 128);
    Write(file, line);
  }
  Close(file, path);
  std::ofstream scales(absl::StrCat(path, "_scale"), std::ios::binary);
  Write(scales, scale.ToFloats());
  Close(scales, path);
}

class OnnxRuntime : public Peer {
 public:
  OnnxRuntime(Interface interface, int threads, std::string models)
      : interface_(std::move(interface)), models_(std::move(models)) {
    interface_.Call(kCreateEnv, kWarning, "bench", &env_);
    interface_.Call(kCreateSessionOptions, &options_);
    interface_.Call(kSetIntraOpNumThreads, options_, threads);
    interface_.Call(kSetInterOpNumThreads, options_, 1);
    interface_.Call(kSetGraphOptimizationLevel, options_, kAllOptimizations);
    interface_.Call(kCreateCpuMemoryInfo, 1, 0, &memory_);
  }

  std::string Name() const override { return "onnxruntime"; }
  std::string Description() const override {
    return absl::StrCat("ONNX Runtime ", interface_.version(), "; int8: MatMulNBits, accuracy level 4");
  }
  bool Has(DType dtype) const override { return dtype == DType::kFloat32 || dtype == DType::kInt8; }

  PeerWork Prepare(const Arena& arena, LayerUnderTest& layer, int64_t rows) override {
    const std::shared_ptr<void> session = SessionOf(layer);
    const auto output = std::make_shared<Tensor>(HugeTensor(DType::kFloat32, {rows, layer.shape.dim}));
    const std::shared_ptr<void> x = ValueOf(const_cast<float*>(layer.input.floats()), rows, layer.shape.dim);
    const std::shared_ptr<void> y = ValueOf(output->mutable_floats(), rows, layer.shape.dim);
    const auto run = [this, session, x, y] {
      const char* const input_names[] = {"x"};
      const char* const output_names[] = {"y"};
      const void* const inputs[] = {x.get()};
      void* outputs[] = {y.get()};
      interface_.Call(kRun, session.get(), static_cast<const void*>(nullptr), &input_names[0], &inputs[0], size_t{1},
                      &output_names[0], size_t{1}, &outputs[0]);
    };
    return {.run = run, .output = output};
  }

 private:
  // The session of the layer asked for last is kept, as the layer is.
  std::shared_ptr<void> SessionOf(const LayerUnderTest& layer) {
    const std::pair<int64_t, DType> key(layer.shape.dim, layer.dtype);
    if (session_ == nullptr || key != session_key_) {
      session_ = nullptr;
      const std::string model =
          absl::StrCat(models_, "/", layer.shape.dim, "_", std::string(layerd::Name(layer.dtype)));
      const FeedForwardWeights& w = layer.weights;
      for (const auto& [role, weights, scale] :
           {std::tuple("gate", &w.gate, &w.gate_scale), std::tuple("up", &w.up, &w.up_scale),
            std::tuple("down", &w.down, &w.down_scale)}) {
        const std::string path = absl::StrCat(model, ".", role);
        if (layer.dtype == DType::kInt8) {
          WriteInt8(**weights, **scale, path);
        } else {
          WriteTransposed(**weights, path);
        }
      }
      void* session = nullptr;
      interface_.Call(kCreateSession, env_, absl::StrCat(model, ".onnx").c_str(), options_, &session);
      session_ = std::shared_ptr<void>(session, [this](void* s) { interface_.Release(kReleaseSession, s); });
      session_key_ = key;
    }
    return session_;
  }

  std::shared_ptr<void> ValueOf(float* data, int64_t rows, int64_t dim) {
    const std::array<int64_t, 2> shape = {rows, dim};
    void* value = nullptr;
    interface_.Call(kCreateTensorWithData, memory_, static_cast<void*>(data),
                    static_cast<size_t>(rows * dim) * sizeof(float), shape.data(), shape.size(), kFloat, &value);
    return {value, [this](void* v) { interface_.Release(kReleaseValue, v); }};
  }

  const Interface interface_;
  const std::string models_;
  void* env_ = nullptr;
  void* options_ = nullptr;
  void* memory_ = nullptr;
  std::shared_ptr<void> session_;
  std::pair<int64_t, DType> session_key_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Peer>> OnnxRuntimePeer(int threads, const std::string& path, const std::string& models) {
  if (path.empty()) return absl::UnavailableError("no library was named (--onnxruntime)");
  if (!std::filesystem::exists(absl::StrCat(models, "/512_float32.onnx"))) {
    return absl::UnavailableError(absl::StrCat("no models in ", models, " (make_models.py)"));
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return absl::UnavailableError(dlerror());
  struct Base {
    const void* const* (*get_api)(uint32_t version);
    const char* (*get_version)();
  };
  const auto get_base = reinterpret_cast<const Base* (*)()>(dlsym(handle, "OrtGetApiBase"));
  const void* const* table = get_base == nullptr ? nullptr : get_base()->get_api(1);
  if (table == nullptr) return absl::UnavailableError(absl::StrCat(path, " has no interface of version 1"));
  try {
    return std::make_unique<OnnxRuntime>(Interface(table, get_base()->get_version()), threads, models);
  } catch (const std::runtime_error& error) {
    return absl::UnavailableError(error.what());
  }
}

}  // namespace layerd::bench
