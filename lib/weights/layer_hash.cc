#include "lib/weights/layer_hash.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lib/base/shape.h"
#include "lib/weights/safetensors.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

constexpr size_t kHashCharacters = 64;

std::string Bits(double value) { return absl::StrFormat("%016x", std::bit_cast<uint64_t>(value)); }
std::string Bits(std::optional<double> value) { return value ? Bits(*value) : "none"; }

std::string SpecLine(const NormalizeSpec& spec) {
  return absl::StrCat("normalize kind=", NameIn(kNormKindNames, spec.kind), " epsilon=", Bits(EpsilonOf(spec)),
                      " rounding=", NameIn(kNormRoundingNames, spec.rounding),
                      " gamma_offset=", Bits(spec.gamma_offset), " group_size=", spec.group_size,
                      " gate_position=", NameIn(kGatePositionNames, spec.gate_position), "\n");
}

std::string SpecLine(const FeedForwardSpec& spec) {
  return absl::StrCat(
      "feed_forward form=", NameIn(kFeedForwardFormNames, spec.form),
      " activation=", NameIn(kActivationNames, spec.activation.kind), " swish_beta=", Bits(spec.activation.beta),
      " packing=", NameIn(kGateUpPackingNames, spec.packing), " layout=", NameIn(kWeightLayoutNames, spec.layout),
      " gate_max=", Bits(spec.gate_max), " up_limit=", Bits(spec.up_limit), " up_offset=", Bits(spec.up_offset),
      " inner_norm=", spec.inner_norm ? Bits(spec.inner_norm->epsilon.value_or(kDefaultInnerNormEpsilon)) : "none",
      "\n");
}

}  // namespace

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  Context() {
    if (evp == nullptr || EVP_DigestInit_ex(evp, EVP_sha256(), nullptr) != 1) throw std::bad_alloc();
  }
  ~Context() { EVP_MD_CTX_free(evp); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::Update(absl::Span<const std::byte> bytes) { EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size()); }

std::string Sha256::Finish() {
  std::array<unsigned char, 32> digest;
  EVP_DigestFinal_ex(context_->evp, digest.data(), nullptr);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

std::string Sha256Of(absl::Span<const std::byte> bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Finish();
}

bool IsSha256(std::string_view text) {
  return text.size() == kHashCharacters &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string CanonicalText(const Layer& layer, absl::FunctionRef<std::string(std::string_view role)> tensor_hash) {
  std::string text = "layerd layer 1\n";
  text += std::visit([](const auto& one) { return SpecLine(one.spec); }, layer);
  for (const auto& [role, tensor] : WeightsOf(layer)) {
    absl::StrAppend(&text, std::string(role), " ", SafetensorsName(tensor.dtype()), " ", ToString(tensor.shape()), " ",
                    tensor_hash(role), "\n");
  }
  return text;
}

std::string ContentHash(const Layer& layer, const std::map<std::string, std::string, std::less<>>& tensor_hashes) {
  const std::string text = CanonicalText(layer, [&](std::string_view role) {
    const auto found = tensor_hashes.find(role);
    return found == tensor_hashes.end() ? std::string() : found->second;
  });
  return Sha256Of(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size()));
}

std::string ContentHash(const Layer& layer) {
  std::map<std::string, std::string, std::less<>> hashes;
  for (const auto& [role, tensor] : WeightsOf(layer)) hashes.emplace(role, Sha256Of(tensor.bytes()));
  return ContentHash(layer, hashes);
}

}  // namespace layerd
