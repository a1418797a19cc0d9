// Faults: whatever fails, wherever, ends within the deadline in one typed error for everyone who asks; Close returns
// within a second, nothing leaks, and a fresh communicator on the same devices works.
#define RIG_EMULATED_ONLY
#include <chrono>
#include <iterator>

#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTimeoutMs = 50;
const char* const kCalls[] = {"device memory", "pinned memory", "copy",  "launch", "record",
                              "wait",          "stream",        "event", "graph",  "ipc open"};
static_assert(std::size(kCalls) == AR_CALL_KINDS, "a kind of call has no name here");

// Path peer needs peer access; the others are tested without it.
Machine machine_for(int path) {
  Machine m;
  m.peers = path == AR_PATH_PEER;
  return m;
}

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

Case case_of(int path, int wire) {
  Case c;
  c.path = path;
  c.wire = wire;
  c.count = path == AR_PATH_COPY_ENGINE ? 300000 : 5000;  // three pieces of the small ring
  return c;
}

// Closes within a second; then nothing of the communicator is left, and another one works.
void expect_recovery(Rig& r, Case c) {
  c.count = std::min<int64_t>(c.count, 20000);
  const auto start = Clock::now();
  EXPECT_EQ(ar_comm_close(r.comm, &r.e), AR_OK);
  EXPECT_LT(seconds_since(start), 1.0);
  EXPECT_EQ(ar_comm_error(r.comm, &r.e) == AR_OK, false);
  EXPECT_EQ(ar_emulated_hazards(), 0) << ar_emulated_report();
  r.renew();
  const size_t i = r.make(c);
  r.enqueue(i);
  r.wait();
  EXPECT_EQ(r.wrong(i), 0);
}

// The nth call of a kind fails, n = 1, 2, ... until the call under test makes no more of them.
class NthCall : public testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(NthCall, Fails) {
  const auto [path, wire, kind] = GetParam();
  int hit = 0;
  for (int n = 1;; n++) {
    ASSERT_LT(n, 500);
    Rig r(machine_for(path), 2, 1 << 20, 256 << 10, 2, kTimeoutMs);
    const Case c = case_of(path, wire);
    const size_t i = r.make(c);
    const int64_t before = ar_emulated_live_objects();
    ar_emulated_fail(kind, n);
    const int32_t status = r.call(i);
    const std::string text = r.e.message;
    const int64_t left = ar_emulated_fail_left(kind);
    ar_emulated_fail(kind, 0);
    if (left != 0) {  // the call came through without its nth
      EXPECT_EQ(status, AR_OK) << text;
      r.wait();
      EXPECT_EQ(r.wrong(i), 0);
      break;
    }
    hit++;
    const std::string where = std::string(kCalls[kind]) + " " + std::to_string(n);
    ASSERT_NE(status, AR_OK) << where;
    EXPECT_NE(text, "") << where;
    const bool memory = kind == AR_CALL_MALLOC_DEVICE || kind == AR_CALL_MALLOC_HOST;
    EXPECT_EQ(status, memory ? AR_ERR_ALLOC : AR_ERR_RUNTIME) << where << ": " << text;
    if (memory) {  // nothing was enqueued, nothing is kept, and the next call may try again
      EXPECT_EQ(ar_emulated_live_objects(), before) << where;
      EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << where << ": " << r.e.message;
      r.enqueue(i);
      r.wait();
      EXPECT_EQ(r.wrong(i), 0) << where;
    } else if (const int32_t latched = ar_comm_error(r.comm, &r.e); latched != AR_OK) {
      // A part was enqueued: the communicator is done for, and says the same to all.
      EXPECT_EQ(latched, status) << where;
      EXPECT_EQ(std::string(r.e.message), text) << where;
      EXPECT_EQ(ar_comm_wait(r.comm, -1, &r.e), status) << where;
      EXPECT_EQ(std::string(r.e.message), text) << where;
      EXPECT_EQ(r.call(i), status) << where;
      EXPECT_EQ(std::string(r.e.message), text) << where;
    } else {  // nothing was
      r.enqueue(i);
      r.wait();
      EXPECT_EQ(r.wrong(i), 0) << where;
    }
    for (int q = 0; q < 2; q++)
      EXPECT_EQ(ar_stream_synchronize(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &r.e), AR_OK) << where;
    expect_recovery(r, c);
    if (HasFailure()) return;
  }
  std::cout << hit << " faults of " << kCalls[kind] << "\n";
}
INSTANTIATE_TEST_SUITE_P(Eager, NthCall,
                         testing::Combine(testing::Values(AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE, AR_PATH_PEER),
                                          testing::Values(AR_F32, AR_BF16), testing::Range(0, int{AR_CALL_KINDS})));

// In a capture: an error, no abort word; the communicator and the streams go on.
class NthCallCaptured : public testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(NthCallCaptured, Fails) {
  const auto [path, wire, kind] = GetParam();
  for (int n = 1;; n++) {
    ASSERT_LT(n, 500);
    Rig r(machine_for(path), 2, 1 << 20, 256 << 10, 2, kTimeoutMs);
    const Case c = case_of(path, wire);
    const size_t i = r.make(c);
    int32_t status = AR_OK;
    int64_t left = 0;
    const ar_graph graph = r.capture([&] {
      ar_emulated_fail(kind, n);
      status = r.call(i);
      left = ar_emulated_fail_left(kind);
      ar_emulated_fail(kind, 0);
    });
    if (graph != 0) ar_graph_destroy(rig::B, r.device(0), graph, &r.e);
    const std::string where = std::string(kCalls[kind]) + " " + std::to_string(n);
    if (left == 0) {
      EXPECT_NE(status, AR_OK) << where;
    }
    EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << where << ": " << r.e.message;
    r.renew_streams();
    r.enqueue(i);
    r.wait();
    EXPECT_EQ(r.wrong(i), 0) << where;
    if (left != 0) {
      EXPECT_EQ(status, AR_OK);
      EXPECT_NE(graph, 0u);
      break;
    }
    expect_recovery(r, c);
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Graph, NthCallCaptured,
                         testing::Combine(testing::Values(AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE, AR_PATH_PEER),
                                          testing::Values(AR_F32, AR_BF16), testing::Range(0, int{AR_CALL_KINDS})));

// A flag, or a word that carries one, that never arrives.
TEST(Faults, AFlagNeverArrives) {
  for (int64_t count : {100, 60000})  // LL words, plain stores
    for (int64_t nth : {1, 2}) {
      Rig r(Machine{}, 2, 1 << 20, 64 << 10, 2, kTimeoutMs);
      Case c;
      c.count = count;
      const size_t i = r.make(c);
      r.enqueue(i);
      r.wait();
      ar_emulated_drop_store(count > 1000 ? 1 : 0, nth);
      r.enqueue(i);
      const double from = ar_emulated_now_us();
      ASSERT_EQ(ar_comm_wait(r.comm, -1, &r.e), AR_ERR_TIMEOUT) << r.e.message;
      EXPECT_LT(ar_emulated_now_us() - from, kTimeoutMs * 1000 * 1.5);
      const ar_error first = r.e;
      EXPECT_EQ(first.call, 1u);
      EXPECT_EQ(first.peer, 1 - first.rank);
      EXPECT_LT(first.seen, first.awaited) << first.message;
      EXPECT_EQ(std::string(first.phase), count > 1000 ? "internal flag" : "internal data");
      // The same to everyone.
      EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_ERR_TIMEOUT);
      EXPECT_EQ(std::memcmp(&r.e, &first, sizeof(first)), 0);
      EXPECT_EQ(r.call(i), AR_ERR_TIMEOUT);
      EXPECT_EQ(std::memcmp(&r.e, &first, sizeof(first)), 0);
      expect_recovery(r, c);
    }
}

// A device that is lost in the middle of a call: an error for all, at once or after the deadline; the others live on.
TEST(Faults, ADeviceIsLost) {
  for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE, AR_PATH_PEER})
    for (int64_t after = 0; after < 24; after++) {
      Rig r(machine_for(path), 2, 1 << 20, 64 << 10, 2, kTimeoutMs);
      const Case c = case_of(path, AR_BF16);
      const size_t i = r.make(c);
      r.enqueue(i);
      r.wait();
      ar_emulated_lose(1, after);
      int32_t status = AR_OK;
      for (int k = 0; k < 3 && status == AR_OK; k++) status = r.call(i);
      if (status == AR_OK) status = ar_comm_wait(r.comm, -1, &r.e);
      if (path != AR_PATH_COPY_ENGINE && after > 2 && status == AR_OK) break;  // not reached
      EXPECT_TRUE(status == AR_ERR_DEVICE_LOST || status == AR_ERR_TIMEOUT)
          << ar_path_name(path) << " after " << after << ": " << status << " " << r.e.message;
      const std::string text = r.e.message;
      EXPECT_EQ(ar_comm_error(r.comm, &r.e), status);
      EXPECT_EQ(std::string(r.e.message), text);
      const auto start = Clock::now();
      EXPECT_EQ(ar_comm_close(r.comm, &r.e), AR_OK);
      EXPECT_LT(seconds_since(start), 1.0);
      if (HasFailure()) return;
    }
}

}  // namespace
