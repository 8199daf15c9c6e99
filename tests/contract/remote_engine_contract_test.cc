// The same suite through the wire: a RemoteEngine that asks a real server, over TCP and over a unix socket.
#include <unistd.h>

#include <memory>
#include <string>

#include "client/remote_engine.h"
#include "lib/engine/cpu_engine.h"
#include "lib/engine/resident_engine.h"
#include "server/server.h"
#include "tests/contract/layers_by_name_contract.h"

namespace layerd {
namespace {

// What a server is above of.
struct Served {
  CpuEngine cpu{{.threads = 2}};
  ContractLayers layers;
  ResidentEngine engine{layers.library(), cpu};
  LayerRegistry registry{layers.library(), nullptr, nullptr};

  auto Start(const std::string& listen) { return Server::Start({.grpc_listen = listen}, engine, registry); }
};

struct Below {
  Served served;
  std::unique_ptr<Server> server;
};

EngineUnderTest MakeRemote(const std::string& listen, RemoteEngineOptions remote = {}) {
  auto below = std::make_shared<Below>();
  auto server = below->served.Start(listen);
  EXPECT_TRUE(server.ok()) << server.status();
  below->server = *std::move(server);
  remote.target = below->server->addresses().front();
  return {below, std::make_unique<RemoteEngine>(remote)};
}

const auto kFactories = testing::Values(
    EngineFactory{"Tcp", [] { return MakeRemote("127.0.0.1:0"); }},
    // A row at a time.
    EngineFactory{"Streamed",
                  [] { return MakeRemote("127.0.0.1:0", {.stream_from_bytes = 0, .stream_chunk_bytes = 1}); }},
    EngineFactory{"UnixSocket", [] {
                    return MakeRemote("unix:" + testing::TempDir() + "layerd_" + std::to_string(getpid()) + ".sock");
                  }});
INSTANTIATE_TEST_SUITE_P(RemoteEngine, EngineContractTest, kFactories,
                         [](const auto& factory) { return factory.param.name; });
INSTANTIATE_TEST_SUITE_P(RemoteEngine, LayersByNameContractTest, kFactories,
                         [](const auto& factory) { return factory.param.name; });

TEST(RemoteEngineTest, NobodyThereIsUnavailableWithoutAReason) {
  RemoteEngine engine({.target = "127.0.0.1:1"});
  NormalizeCall call;
  call.context.deadline = absl::Now() + absl::Seconds(5);
  const absl::Status status = Normalize(engine, std::move(call)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine.CheckHealth("", absl::Seconds(5)).code(), absl::StatusCode::kUnavailable);
}

TEST(RemoteEngineTest, HealthKnowsTheServerAndItsServices) {
  Served served;
  auto server = served.Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  RemoteEngine engine({.target = (*server)->addresses().front()});
  EXPECT_EQ(engine.CheckHealth("", absl::Seconds(5)).code(), absl::StatusCode::kUnavailable);
  (*server)->SetReady();
  EXPECT_TRUE(engine.CheckHealth("", absl::Seconds(5)).ok());
  EXPECT_TRUE(engine.CheckHealth("layerd.v1.LayerRegistry", absl::Seconds(5)).ok());
  EXPECT_TRUE(engine.CheckHealth("layerd.v1.LayerService", absl::Seconds(5)).ok());
  EXPECT_TRUE(engine.CheckHealth("layerd.v1.SharedMemoryRegistry", absl::Seconds(5)).ok());
  EXPECT_EQ(engine.CheckHealth("no.such.Service", absl::Seconds(5)).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ((*server)->Drain(absl::Seconds(1)), 0);
  (*server)->SetReady();  // too late
  EXPECT_EQ(engine.CheckHealth("", absl::Seconds(5)).code(), absl::StatusCode::kUnavailable);
}

TEST(ServerTest, ASecondServerOnTheSameAddressIsRefused) {
  Served served;
  auto first = served.Start("127.0.0.1:0");
  ASSERT_TRUE(first.ok());
  const std::string address = (*first)->addresses().front();
  const absl::Status second = served.Start(address).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(second.message()).find(address), std::string::npos) << second;
}

}  // namespace
}  // namespace layerd
