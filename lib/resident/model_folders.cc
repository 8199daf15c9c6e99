#include "lib/resident/model_folders.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/resident/model_sighting.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

namespace fs = std::filesystem;

// Longer ones may overflow inside the standard library.
constexpr absl::Duration kLongestWait = absl::Hours(24);

// A model as it answers now. Only its warning ever changes.
struct Model {
  std::vector<std::shared_ptr<const LayerRecord>> layers;  // ordered by name
  std::string family;
  std::string warning;
  bool read = false;  // once, so that it has what layers there are

  int64_t UsableLayers() const {
    return std::count_if(layers.begin(), layers.end(), [](const auto& layer) { return layer->info().status.ok(); });
  }
  bool IsUsable() const { return read && (layers.empty() || UsableLayers() > 0); }

  std::shared_ptr<const LayerRecord> Find(std::string_view name) const {
    const auto place = std::lower_bound(layers.begin(), layers.end(), name,
                                        [](const auto& layer, std::string_view n) { return layer->info().name < n; });
    return place == layers.end() || (*place)->info().name != name ? nullptr : *place;
  }
};

// Why `next` may not take the place of `now`; OK where it may.
absl::Status CheckNoLayerIsSpoilt(const Model& now, const Model& next) {
  int64_t spoilt = 0;
  std::string first;
  for (const auto& layer : now.layers) {
    const auto after = next.Find(layer->info().name);
    if (!layer->info().status.ok() || after == nullptr || after->info().status.ok()) continue;
    if (++spoilt == 1) first = absl::StrCat(after->info().name, ": ", after->info().status.message());
  }
  if (spoilt == 0) return absl::OkStatus();
  ErrorDetails details;
  details.reason = "LAYER_DAMAGED";
  return WithDetails(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("layers that could be used no longer can: ", spoilt, ", the first is ", first),
                     details);
}

// Whether that is how these files are; otherwise they may well be readable at the next look.
bool IsOfTheFiles(const absl::Status& status) {
  return status.ok() || status.code() == absl::StatusCode::kInvalidArgument ||
         status.code() == absl::StatusCode::kFailedPrecondition || status.code() == absl::StatusCode::kNotFound;
}

}  // namespace

struct ModelFolders::Impl {
  Impl(std::string models_folder, const ModelFoldersOptions& its_options)
      : folder(std::move(models_folder)), options(its_options) {}

  // What the thread remembers of a name.
  struct Remembered {
    Sighting last;                  // at the look before
    std::optional<Sighting> acted;  // what the model, as it is now, comes of
  };

  void Run();
  void Look(bool first_look);
  bool IsStopping();
  bool AllAreUsable();
  bool Act(const std::string& name, Remembered& remembered, const Sighting& now, bool first_look);
  bool Read(const std::string& name, Remembered& remembered, const Sighting& now, ModelEvent event);
  bool Refuse(const std::string& name, const absl::Status& status, ModelEvent event);
  void Replace(const std::string& name, std::shared_ptr<const Model> model);
  void Tell(ModelEvent event, const Model* model) const;
  std::shared_ptr<const Model> ModelOf(const std::string& name);

  const std::string folder;
  const ModelFoldersOptions options;

  // The thread's own.
  std::map<std::string, Remembered> remembered;
  absl::Status folder_status;  // at the look before
  bool checked = false;        // whether on_checked() was called

  std::mutex mutex;
  std::condition_variable wake, looked;
  std::map<std::string, std::shared_ptr<const Model>, std::less<>> models;  // guarded by mutex, and so is all below
  uint64_t looks_asked = 1, looks_done = 0;
  bool stopping = false;

  std::thread thread;
};

void ModelFolders::Impl::Run() {
  const auto pause = absl::ToChronoNanoseconds(std::clamp(options.look_every, absl::ZeroDuration(), kLongestWait));
  std::unique_lock<std::mutex> lock(mutex);
  while (!stopping) {
    const uint64_t asked = looks_asked;
    const bool first = looks_done == 0;
    lock.unlock();
    try {
      Look(first);
    } catch (const std::bad_alloc&) {
      // What was not looked at is at the next look.
    }
    lock.lock();
    looks_done = asked;
    looked.notify_all();
    wake.wait_for(lock, pause, [this] { return stopping || looks_asked != looks_done; });
  }
}

void ModelFolders::Impl::Look(bool first_look) {
  const auto seen = SeeModels(folder);
  bool changed = !checked;
  if (seen.status() != folder_status) {
    folder_status = seen.status();
    changed = true;
    if (!seen.ok()) Tell({.status = seen.status(), .first = first_look}, nullptr);
  }
  if (seen.ok()) {
    for (const auto& [name, sighting] : *seen) remembered.try_emplace(name);
    for (auto entry = remembered.begin(); entry != remembered.end();) {
      if (IsStopping()) return;
      auto& [name, of_name] = *entry;
      const auto found = seen->find(name);
      changed |= Act(name, of_name, found == seen->end() ? Sighting() : found->second, first_look);
      const bool forget = of_name.acted && of_name.acted->kind == Sighting::kGone;
      entry = forget ? remembered.erase(entry) : std::next(entry);
    }
  }
  if (!changed || !options.on_checked) return;
  checked = true;
  options.on_checked(seen.ok() && AllAreUsable());
}

bool ModelFolders::Impl::IsStopping() {
  std::lock_guard<std::mutex> lock(mutex);
  return stopping;
}

bool ModelFolders::Impl::AllAreUsable() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::all_of(models.begin(), models.end(), [](const auto& entry) { return entry.second->IsUsable(); });
}

// Takes up what is seen now, if it is new and has stopped changing; whether anything came of it.
bool ModelFolders::Impl::Act(const std::string& name, Remembered& of_name, const Sighting& now, bool first_look) {
  const bool stable = first_look || of_name.last == now;
  of_name.last = now;
  if (!stable || of_name.acted == now) return false;
  ModelEvent event{.model = name, .first = !of_name.acted};
  if (now.kind == Sighting::kFiles) return Read(name, of_name, now, std::move(event));
  of_name.acted = now;
  const auto model = ModelOf(name);
  if (now.kind == Sighting::kUnreadable) return Refuse(name, now.status, std::move(event));
  if (now.kind == Sighting::kForbidden) {
    if (model != nullptr) return Refuse(name, now.status, std::move(event));
    event.status = now.status;
    Tell(std::move(event), nullptr);
    return false;
  }
  if (model == nullptr) return false;
  if (now.kind == Sighting::kNoModel && model->read) {
    return Refuse(name, NoModel("its files are gone, but not its folder"), std::move(event));
  }
  Replace(name, nullptr);
  event.gone = true;
  Tell(std::move(event), nullptr);
  return true;
}

bool ModelFolders::Impl::Read(const std::string& name, Remembered& of_name, const Sighting& now, ModelEvent event) {
  const auto old = ModelOf(name);
  const auto checkpoint = Checkpoint::Open(now.path, name);
  const auto after = CheckpointFingerprint(now.path);
  if (!after.ok() || *after != now.fingerprint) {
    // What was read may be a mixture; the next looks will see what becomes of it.
    return old == nullptr && Refuse(name, absl::UnavailableError("its files changed while they were read"), event);
  }
  absl::Status status = WithoutPath(checkpoint.status(), now.path, name);
  auto model = std::make_shared<Model>();
  if (status.ok()) {
    model->layers = checkpoint->layers();
    model->family = checkpoint->family();
    model->read = true;
    if (old != nullptr) status = CheckNoLayerIsSpoilt(*old, *model);
  }
  if (IsOfTheFiles(status)) of_name.acted = now;
  if (!status.ok()) return Refuse(name, status, std::move(event));
  Replace(name, model);
  Tell(std::move(event), model.get());
  return true;
}

// Keeps the model as it is, or gives it a place without layers, and says why; whether that is new.
bool ModelFolders::Impl::Refuse(const std::string& name, const absl::Status& status, ModelEvent event) {
  const auto old = ModelOf(name);
  auto model = old != nullptr ? std::make_shared<Model>(*old) : std::make_shared<Model>();
  model->warning =
      absl::StrCat(model->read ? "the files there now cannot be used, and the layers before them still answer: "
                               : "cannot be read: ",
                   status.message());
  if (old != nullptr && old->warning == model->warning) return false;
  Replace(name, model);
  event.status = status;
  Tell(std::move(event), model.get());
  return true;
}

// Null: there is no such model any more.
void ModelFolders::Impl::Replace(const std::string& name, std::shared_ptr<const Model> model) {
  std::lock_guard<std::mutex> lock(mutex);
  if (model == nullptr) {
    models.erase(name);
  } else {
    models[name] = std::move(model);
  }
}

void ModelFolders::Impl::Tell(ModelEvent event, const Model* model) const {
  if (!options.on_event) return;
  if (model != nullptr) {
    event.layers = static_cast<int>(model->UsableLayers());
    event.unusable_layers = static_cast<int>(model->layers.size()) - event.layers;
    event.family = model->family;
  }
  options.on_event(event);
}

std::shared_ptr<const Model> ModelFolders::Impl::ModelOf(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = models.find(name);
  return found == models.end() ? nullptr : found->second;
}

ModelFolders::ModelFolders(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::Status ModelsNotRead() {
  ErrorDetails details;
  details.reason = "MODELS_NOT_READ";
  details.retry_delay_ms = 500;
  return WithDetails(absl::StatusCode::kUnavailable, "the server still reads its models; try again", details);
}

absl::StatusOr<std::unique_ptr<ModelFolders>> ModelFolders::Open(const std::string& folder,
                                                                 const ModelFoldersOptions& options) {
  std::error_code error;
  const fs::directory_iterator readable(folder, error);
  if (error) {
    ErrorDetails details;
    details.reason = "MODELS_FOLDER";
    details.field = "models";
    return WithDetails(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("models: expected a folder that can be read, got ", Quoted(folder), ": ", error.message()),
        details);
  }
  auto impl = std::make_unique<Impl>(folder, options);
  try {
    impl->thread = std::thread([&impl = *impl] { impl.Run(); });
  } catch (const std::system_error& refused) {
    return InternalError(absl::StrCat("no thread that looks at models could be started: ", refused.what()));
  }
  return std::unique_ptr<ModelFolders>(new ModelFolders(std::move(impl)));
}

ModelFolders::~ModelFolders() {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  impl_->thread.join();
}

bool ModelFolders::WaitForFirstLook(absl::Time deadline) {
  const absl::Duration left = std::clamp(deadline - absl::Now(), absl::ZeroDuration(), kLongestWait);
  std::unique_lock<std::mutex> lock(impl_->mutex);
  return impl_->looked.wait_for(lock, absl::ToChronoNanoseconds(left), [this] { return impl_->looks_done > 0; });
}

void ModelFolders::LookNow() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  const uint64_t mine = ++impl_->looks_asked;
  impl_->wake.notify_all();
  impl_->looked.wait(lock, [&] { return impl_->looks_done >= mine; });
}

bool ModelFolders::HasModel(std::string_view model) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->models.find(model) != impl_->models.end();
}

absl::StatusOr<std::shared_ptr<const LayerRecord>> ModelFolders::Find(std::string_view name) {
  if (const auto parsed = ParseLayerName(name)) {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    const auto model = impl_->models.find(parsed->model);
    const auto layer = model == impl_->models.end() ? nullptr : model->second->Find(name);
    if (layer != nullptr) return layer;
    if (impl_->looks_done == 0) return ModelsNotRead();
  }
  return LayerNotFound("name", name);
}

std::vector<std::shared_ptr<const LayerRecord>> ModelFolders::List() {
  std::vector<std::shared_ptr<const LayerRecord>> all;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    for (const auto& [name, model] : impl_->models) all.insert(all.end(), model->layers.begin(), model->layers.end());
  }
  // "a-b/" comes before "a/", though "a" comes before "a-b".
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a->info().name < b->info().name; });
  return all;
}

std::string ModelFolders::WarningOf(std::string_view model) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  const auto found = impl_->models.find(model);
  return found == impl_->models.end() ? std::string() : found->second->warning;
}

}  // namespace layerd
