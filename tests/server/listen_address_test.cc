#include "server/listen_address.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

namespace layerd {
namespace {

std::string TempPath(const std::string& name) {
  return testing::TempDir() + "listen_" + std::to_string(getpid()) + "_" + name;
}

TEST(ListenAddressTest, ReadsListsOfBothKinds) {
  const auto addresses = ParseListenAddresses("127.0.0.1:0,unix:/run/x.sock,[::1]:50051");
  ASSERT_TRUE(addresses.ok()) << addresses.status();
  ASSERT_EQ(addresses->size(), 3u);
  EXPECT_FALSE((*addresses)[0].is_unix);
  EXPECT_TRUE((*addresses)[1].is_unix);
  EXPECT_EQ((*addresses)[1].path, "/run/x.sock");
  EXPECT_EQ((*addresses)[2].text, "[::1]:50051");
}

TEST(ListenAddressTest, RefusesWhatIsNoAddressAndQuotesIt) {
  for (const char* bad :
       {"", "localhost", ":50051", "host:", "host:x", "host:-1", "host:65536", "127.0.0.1:1,", "unix:"}) {
    EXPECT_FALSE(ParseListenAddresses(bad).ok()) << bad;
  }
  EXPECT_NE(ParseListenAddresses("host:99999").status().message().find("'host:99999'"), absl::string_view::npos);
  EXPECT_FALSE(ParseListenAddresses("unix:/" + std::string(200, 'p')).ok());
}

TEST(UnixSocketLockTest, ASecondHolderIsRefusedUntilTheFirstIsGone) {
  const std::string path = TempPath("lock");
  {
    const auto first = UnixSocketLock::Acquire(path);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_FALSE(UnixSocketLock::Acquire(path).ok());
  }
  EXPECT_TRUE(UnixSocketLock::Acquire(path).ok());
}

TEST(UnixSocketLockTest, AFileThatIsNoSocketIsLeftAlone) {
  const std::string path = TempPath("file");
  std::ofstream(path) << "precious";
  EXPECT_FALSE(UnixSocketLock::Acquire(path).ok());
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  unlink(path.c_str());
}

TEST(UnixSocketLockTest, ASocketLeftBehindIsRemoved) {
  const std::string path = TempPath("stale");
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
  ASSERT_EQ(access(path.c_str(), F_OK), 0);
  EXPECT_TRUE(UnixSocketLock::Acquire(path).ok());
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace layerd
