#include "lib/resident/store_files.h"

#include <set>
#include <string>

#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

// A file system may give a new file the inode number and the size of one just deleted, and its clock ticks slowly: here
// several records are written between two ticks.
TEST(StoreFiles, NoTwoRecordsHaveTheSameTime) {
  TemporaryFolder folder(QuickFolder());
  const auto files = StoreFiles::Open(folder.path());
  ASSERT_TRUE(files.ok()) << files.status();
  const auto lock = (*files)->Acquire();
  ASSERT_TRUE(lock.ok());
  const LayerName name = {"m", "l"};
  std::set<int64_t> times;
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE((*files)->WriteRecord(*lock, name, "{}").ok());
    const auto stamp = (*files)->StampOf(name);
    ASSERT_TRUE(stamp.ok() && *stamp);
    EXPECT_EQ((*files)->ReadRecord(name).value()->stamp, **stamp);
    times.insert((*stamp)->modified_ns);
  }
  EXPECT_EQ(times.size(), 200u);
}

TEST(StoreFiles, FaultsSayWhatAndWhere) {
  ExpectStoreError(StoreFault("layers/m", "a record cannot be read", EIO), absl::StatusCode::kInternal, "STORE_IO",
                   "layer_store", {"a record cannot be read: Input/output error: \"layers/m\""});
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    const auto full = StoreFault("uploads", "x", error);
    ExpectStoreError(full, absl::StatusCode::kResourceExhausted, "DISK_FULL", "layer_store");
    EXPECT_EQ(DetailsOf(full).retry_delay_ms, -1);
  }
}

}  // namespace
}  // namespace layerd
