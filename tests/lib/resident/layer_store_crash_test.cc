// Processes that are killed: every change is there whole or not at all, and what was acknowledged is there.
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "tests/lib/resident/child_process.h"
#include "tests/lib/resident/store_testing.h"
#include "tests/lib/resident/traced_process.h"

namespace layerd {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::Eq;

// Which layers there are, by their content hashes.
using State = std::map<std::string, std::string>;

// The layers of a store; every one reads whole.
State StateOf(LayerStore& store) {
  State state;
  for (const auto& record : store.List()) {
    const auto layer = record->Read();
    EXPECT_TRUE(layer.ok()) << layer.status();
    if (!layer.ok()) continue;
    EXPECT_EQ(ContentHash(*layer), record->info().content_hash);
    state[record->info().name] = record->info().content_hash;
  }
  return state;
}

// One change after the other, each acknowledged by a byte.
struct Change {
  std::string name;
  std::optional<Layer> layer;  // nothing: delete
  std::optional<std::string> etag;
};

absl::Status Try(LayerStore& store, const Change& change) {
  return change.layer ? Upload(store, change.name, *change.layer, change.etag).status()
                      : store.Delete(change.name, change.etag);
}

void Apply(LayerStore& store, const Change& change) {
  const auto status = Try(store, change);
  EXPECT_TRUE(status.ok()) << status;
}

const std::vector<Change>& Changes() {
  static const auto& changes = *new std::vector<Change>{
      {"models/new/layers/a", SeededSwiGlu(1), {}},
      {"models/old/layers/replaced", SeededNorm(2), ContentHash(SeededNorm(1))},
      {"models/old/layers/deleted", {}, {}},
      {"models/same/layers/s", SeededSwiGlu(1), {}},
      {"models/new/layers/a", {}, {}},
      {"models/old/layers/replaced", {}, ContentHash(SeededNorm(2))},
  };
  return changes;
}

// The state after so many changes.
std::vector<State> States() {
  std::vector<State> states = {{{"models/old/layers/replaced", ContentHash(SeededNorm(1))},
                                {"models/old/layers/deleted", ContentHash(SeededNorm(3))}}};
  for (const Change& change : Changes()) {
    State state = states.back();
    if (change.layer) {
      state[change.name] = ContentHash(*change.layer);
    } else {
      state.erase(change.name);
    }
    states.push_back(state);
  }
  return states;
}

void MakeFirstState(const std::string& folder) {
  const auto store = OpenStore(folder);
  ASSERT_TRUE(Upload(*store, "models/old/layers/replaced", SeededNorm(1)).ok());
  ASSERT_TRUE(Upload(*store, "models/old/layers/deleted", SeededNorm(3)).ok());
}

TEST(LayerStoreCrash, KilledBeforeAnySystemCallItLeavesTheChangeOrNone) {
  TemporaryFolder first(QuickFolder());
  MakeFirstState(first.path());
  const std::vector<State> states = States();
  bool ended = false;
  int moments = 0;
  for (; !ended; ++moments) {
    TemporaryFolder folder(QuickFolder());
    std::filesystem::copy(first.path(), folder.path(), std::filesystem::copy_options::recursive);
    Pipe acknowledged;
    TracedProcess process([&] {
      const auto store = OpenStore(folder.path());
      for (const Change& change : Changes()) {
        Apply(*store, change);
        acknowledged.Send('a');
      }
    });
    if (!process.is_traced()) GTEST_SKIP() << "processes may not be traced here";
    acknowledged.CloseWriter();
    std::string call;
    for (int moment = 0; moment <= moments && !ended; ++moment) {
      const auto next = process.Next();
      ended = !next;
      call = next.value_or("the end");
    }
    if (!ended) process.Kill();
    size_t changes = 0;
    while (acknowledged.Receive() != '\0') ++changes;
    SCOPED_TRACE(absl::StrCat("killed before its call ", moments, ", ", call, ", after ", changes, " changes"));
    const auto store = OpenStore(folder.path());
    EXPECT_THAT(StateOf(*store), AnyOf(Eq(states[changes]), Eq(states[std::min(changes + 1, Changes().size())])));
    ExpectNoStrays(folder.path(), *store);
    if (HasFailure()) return;
  }
  EXPECT_EQ(States().back(), (State{{"models/same/layers/s", ContentHash(SeededSwiGlu(1))}}));
  EXPECT_GT(moments, 80);
}

#ifdef __x86_64__
// One system call of one change fails; the change is refused, or there whole.
TEST(LayerStoreCrash, AnyFailingSystemCallLeavesTheChangeOrNone) {
  TemporaryFolder first(QuickFolder());
  MakeFirstState(first.path());
  const State before = States()[0];
  int refused = 0, done = 0;
  for (const size_t number : {0, 1, 2}) {
    const Change& change = Changes()[number];
    State after = before;
    if (change.layer) {
      after[change.name] = ContentHash(*change.layer);
    } else {
      after.erase(change.name);
    }
    for (const int error : {EIO, ENOSPC, EINTR, EOPNOTSUPP}) {
      bool ended = false;
      for (int moment = 0; !ended; ++moment) {
        TemporaryFolder folder(QuickFolder());
        std::filesystem::copy(first.path(), folder.path(), std::filesystem::copy_options::recursive);
        Pipe answers;
        TracedProcess process([&] {
          const auto store = OpenStore(folder.path());
          answers.Send('b');
          const auto status = Try(*store, change);
          EXPECT_EQ(DetailsOf(status).field, status.ok() ? "" : "layer_store") << status;
          answers.Send(status.ok() ? 'a' : 'e');
        });
        if (!process.is_traced()) GTEST_SKIP() << "processes may not be traced here";
        answers.CloseWriter();
        const auto is_answer = [](const std::optional<std::string>& call) {
          return call && call->find("pipe:") != std::string::npos;
        };
        std::optional<std::string> call;
        while (!is_answer(call)) call = process.Next();
        call = process.Next();
        for (int skipped = 0; skipped < moment && !is_answer(call); ++skipped) call = process.Next();
        ended = is_answer(call);
        SCOPED_TRACE(absl::StrCat("change ", number, ": its call ", moment, " fails with ", error, ": ", *call));
        if (!ended) process.FailCall(error);
        while (process.Next()) {
        }
        EXPECT_EQ(answers.Receive(), 'b');
        const char answer = answers.Receive();
        (answer == 'a' ? done : refused) += 1;
        const auto store = OpenStore(folder.path());
        if (answer == 'a') {
          EXPECT_THAT(StateOf(*store), Eq(after));
        } else {
          EXPECT_EQ(answer, 'e');
          EXPECT_THAT(StateOf(*store), AnyOf(Eq(before), Eq(after)));
        }
        ExpectNoStrays(folder.path(), *store);
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(done, 50);
}
#endif

// The calls by which `change` comes to be, but for locks and for removing what is not there.
std::vector<std::string> CallsOf(const TemporaryFolder& temporary, const Change& change) {
  const std::string folder = std::filesystem::canonical(temporary.path());
  Pipe acknowledged;
  TracedProcess process([&] {
    const auto store = OpenStore(folder);
    acknowledged.Send('b');
    Apply(*store, change);
    acknowledged.Send('e');
  });
  std::vector<std::string> calls;
  if (!process.is_traced()) return calls;
  bool begun = false;
  while (const auto call = process.Next()) {
    std::string text = absl::StrReplaceAll(*call, {{folder + "/", ""}});
    const size_t upload = text.find("uploads/"), ending = text.find(".partial");
    if (ending != std::string::npos) text.replace(upload, ending - upload, "uploads/X");
    if (text.find("pipe:") != std::string::npos) {
      if (begun) calls.push_back("acknowledge");
      begun = true;
      continue;
    }
    const std::string verb = text.substr(0, text.find(' '));
    if (begun && verb != "lock" && text != "unlink uploads/record.json") calls.push_back(text);
  }
  return calls;
}

TEST(LayerStoreCrash, WhatIsAcknowledgedIsOnTheDiskFirst) {
  TemporaryFolder folder;
  const auto weights = [](const Layer& layer) {
    return "weights/" + Sha256Of(AsBytes(SafetensorsOf(layer))) + ".safetensors";
  };
  const Layer one = SeededNorm(1), two = SeededNorm(2);
  const auto created = CallsOf(folder, {"models/m/layers/l", one, {}});
  if (created.empty()) GTEST_SKIP() << "processes may not be traced here";
  EXPECT_THAT(created,
              ElementsAre("create uploads/X.partial", "allocate uploads/X.partial", "write uploads/X.partial",
                          "sync uploads/X.partial", "rename uploads/X.partial -> " + weights(one), "sync weights",
                          "create uploads/record.json", "write uploads/record.json", "touch uploads/record.json",
                          "sync uploads/record.json", "mkdir layers/m", "rename uploads/record.json -> layers/m/l.json",
                          "sync layers/m", "sync layers", "acknowledge"));
  const auto replaced = CallsOf(folder, {"models/m/layers/l", two, ContentHash(one)});
  EXPECT_THAT(replaced,
              ElementsAre("create uploads/X.partial", "allocate uploads/X.partial", "write uploads/X.partial",
                          "sync uploads/X.partial", "rename uploads/X.partial -> " + weights(two), "sync weights",
                          "create uploads/record.json", "write uploads/record.json", "touch uploads/record.json",
                          "sync uploads/record.json", "mkdir layers/m", "rename uploads/record.json -> layers/m/l.json",
                          "sync layers/m", "sync layers", "rmdir layers/m", "unlink " + weights(one), "acknowledge"));
  EXPECT_THAT(CallsOf(folder, {"models/m/layers/l", {}, {}}),
              ElementsAre("unlink layers/m/l.json", "sync layers/m", "rmdir layers/m", "unlink " + weights(two),
                          "acknowledge"));
}

// A process of its own that changes four layers of its own, again and again; what it does follows from `seed` alone.
class Worker {
 public:
  Worker(const std::string& model, uint64_t seed, State state)
      : model_(model), random_(seed), state_(std::move(state)) {}

  Change Next() {
    Change change{absl::StrCat("models/", model_, "/layers/", random_() % 4), {}, {}};
    const auto there = state_.find(change.name);
    if (there != state_.end() && random_() % 3 == 0) {
      state_.erase(there);
      return change;
    }
    // Few sizes and seeds, so that many layers have the same weights.
    change.layer = SeededNorm(random_() % 3, static_cast<int64_t>(1) << (random_() % 17));
    if (there != state_.end()) change.etag = there->second;
    state_[change.name] = ContentHash(*change.layer);
    return change;
  }
  const State& state() const { return state_; }

 private:
  const std::string model_;
  std::mt19937_64 random_;
  State state_;
};

// A byte for every step, 'a' for an acknowledgement.
void Work(const std::string& folder, Worker worker, Pipe& steps) {
  const auto store = OpenStore(folder);
  for (;;) {
    const Change change = worker.Next();
    if (!change.layer) {
      Apply(*store, change);
    } else {
      const std::string bytes = SafetensorsOf(*change.layer);
      const auto upload = store->Begin(HeaderOf(change.name, *change.layer, bytes, change.etag));
      EXPECT_TRUE(upload.ok()) << upload.status();
      for (size_t at = 0; at < bytes.size(); at += 50'000) {
        EXPECT_TRUE((*upload)->Write(AsBytes(std::string_view(bytes).substr(at, 50'000))).ok());
        steps.Send('w');
      }
      EXPECT_TRUE((*upload)->Commit().ok());
    }
    // A worker that fails tells nobody of progress any more.
    if (::testing::Test::HasFailure()) return;
    steps.Send('a');
  }
}

TEST(LayerStoreCrash, KilledAtRandomMomentsTwoProcessesLeaveWhatTheyAcknowledged) {
  TemporaryFolder folder(QuickFolder());
  std::mt19937_64 random(20'250'131);
  State states[2];
  int changes = 0;
  for (int round = 0; round < 60; ++round) {
    Pipe steps[2];
    std::unique_ptr<ChildProcess> children[2];
    const uint64_t seeds[2] = {random(), random()};
    const std::string models[2] = {"zero", "one"};
    for (int i = 0; i < 2; ++i) {
      children[i] = std::make_unique<ChildProcess>([&] {
        steps[1 - i].CloseWriter();
        Work(folder.path(), {models[i], seeds[i], states[i]}, steps[i]);
      });
      steps[i].CloseWriter();
    }
    int acknowledged[2] = {0, 0};
    for (uint64_t step = random() % 30; step > 0; --step) {
      for (int i = 0; i < 2; ++i) acknowledged[i] += steps[i].Receive() == 'a' ? 1 : 0;
    }
    for (auto& child : children) child->Kill();
    for (int i = 0; i < 2; ++i) {
      for (char step = steps[i].Receive(); step != '\0'; step = steps[i].Receive())
        acknowledged[i] += step == 'a' ? 1 : 0;
      changes += acknowledged[i];
    }
    const auto store = OpenStore(folder.path());
    State found[2];
    for (const auto& [name, hash] : StateOf(*store))
      found[name.find("/zero/") == std::string::npos ? 1 : 0][name] = hash;
    for (int i = 0; i < 2; ++i) {
      Worker worker(models[i], seeds[i], states[i]);
      for (int change = 0; change < acknowledged[i]; ++change) (void)worker.Next();
      const State before = worker.state();
      (void)worker.Next();
      EXPECT_THAT(found[i], AnyOf(Eq(before), Eq(worker.state()))) << "round " << round;
      states[i] = found[i];
    }
    ExpectNoStrays(folder.path(), *store);
    if (HasFailure()) return;
  }
  EXPECT_GT(changes, 100);
}

}  // namespace
}  // namespace layerd
