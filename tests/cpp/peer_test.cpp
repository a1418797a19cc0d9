// Path peer: every size class of its three ways (LL, one-shot, two-shot), ranks, types, layouts and schedules, bit for bit
// against the reference; epochs that wrap, graphs, deadlines, memory.
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

std::string name(const Case& c, int ranks, const Machine& m) {
  std::string absent;
  for (bool a : c.absent) absent += a ? "a" : "-";
  return std::to_string(ranks) + " ranks on " + std::to_string(m.devices) + " " + ar_type_name(c.type) + "/" +
         ar_type_name(c.wire) + " count " + std::to_string(c.count) + " rows " + std::to_string(c.rows) + " schedule " +
         std::to_string(m.schedule) + " seed " + std::to_string(m.seed) + (c.in_place ? " in place" : "") + " offset " +
         std::to_string(c.offset) + " absent " + absent + "\n" + ar_emulated_report();
}

Machine peers(int devices) {
  Machine m;
  m.devices = devices;
  m.peers = true;
  return m;
}
Case pushed(int64_t count, int wire) {
  Case c;
  c.path = AR_PATH_PEER;
  c.wire = wire;
  c.count = count;
  return c;
}

// Real GPUs need not grant peer access; ranks that share one always can.
#define NEEDS_PEERS(r)                                                 \
  do {                                                                 \
    char why[256];                                                     \
    if (!ar_comm_has_path((r).comm, AR_PATH_PEER, why, sizeof(why))) { \
      ASSERT_EQ(rig::B, AR_BACKEND_CUDA) << why;                       \
      GTEST_SKIP() << why;                                             \
    }                                                                  \
  } while (false)

void check(Rig& r, const Case& c, const Machine& m) {
  const size_t i = r.make(c);
  r.enqueue(i);
  r.wait();
  ASSERT_EQ(r.wrong(i), 0) << name(c, r.ranks(), m);
}

// Nothing, one element, less than a pack, odd tails; LL words to their last byte and beyond; one slot of two blocks, several
// rounds, and a little.
const int64_t kCounts[] = {0, 1, 3, 7, 255, 2047, 2048, 4099, 16384, 16385, 24577, 131072, 300001};

TEST(Peer, EveryCount) {
  for (int ranks = 2; ranks <= 8; ranks++) {
    const Machine m = peers(ranks);
    Rig r(m, ranks, 1 << 20, 64 << 10, 2);
    NEEDS_PEERS(r);
    for (int wire : {AR_F32, AR_BF16})
      for (int64_t count : kCounts) {
        if (count > 30000 && ranks > 4 && wire == AR_F32) count /= 2;  // time
        Case c = pushed(count, wire);
        c.in_place = count % 2 != 0;
        c.offset = static_cast<int>(count % 5);
        check(r, c, m);
      }
  }
}

TEST(Peer, TypesOpsAbsentStrided) {
  for (int ranks : {2, 3, 5}) {
    Machine m = peers(ranks == 5 ? 3 : ranks);
    m.schedule = AR_SCHEDULE_RANDOM;
    Rig r(m, ranks, 1 << 20, 64 << 10, 2);
    NEEDS_PEERS(r);
    for (int64_t count : {3 * 701, 3 * 40001})  // from three ranks on the larger is two-shot
      for (int type : {AR_F32, AR_F16, AR_BF16})
        for (int op : {AR_SUM, AR_AVG})
          for (int absent = 0; absent < 1 << ranks; absent += ranks == 2 ? 1 : ranks == 3 ? 3 : 11) {
            Case c = pushed(count, type == AR_F32 ? (absent % 2 != 0 ? AR_BF16 : AR_F16) : type);
            c.type = type;
            c.op = op;
            c.rows = absent % 3 != 2 ? 3 : 0;
            c.pad = absent % 3;
            c.in_place = absent % 2 != 0;
            for (int k = 0; k < ranks; k++) c.absent.push_back((absent >> k & 1) != 0);
            check(r, c, m);
          }
  }
}

TEST(Peer, RanksThatShareADevice) {
  for (int devices : {1, 2})
    for (int ranks : {2, 3, 8}) {
      const Machine m = peers(devices);
      Rig r(m, ranks);  // with as many blocks as fit
      NEEDS_PEERS(r);
      for (int64_t count : {1, 5000, 40000, 400000}) check(r, pushed(count, AR_BF16), m);
    }
}

TEST(Peer, EpochsWrap) {
  for (int ranks : {2, 3})
    for (uint32_t first : {0xFFFFFFFDu, 0x7FFFFFFEu, 0xFFFFEu}) {
      const Machine m = peers(ranks);
      Rig r(m, ranks, 1 << 20, 64 << 10, 2, 0, first);
      NEEDS_PEERS(r);
      for (int64_t count : {500, 300000, 7, 40000, 20000, 500, 60000, 300000}) check(r, pushed(count, AR_F32), m);
    }
}

TEST(Peer, Memory) {
  for (int ranks = 2; ranks <= 8; ranks++) {
    Rig r(peers(ranks), ranks);
    NEEDS_PEERS(r);
    ar_stats s;
    ar_comm_stats(r.comm, &s);
    for (int q = 0; q < ranks; q++) {
      EXPECT_GT(s.rank[q].device_bytes[AR_PATH_PEER], 8 << 20);
      EXPECT_LE(s.rank[q].device_bytes[AR_PATH_PEER], 32 << 20) << ranks;
      EXPECT_EQ(s.rank[q].pinned_bytes[AR_PATH_PEER], 0);
    }
  }
}

// Graphs with an odd number of calls, replayed with new data, between eager calls.
TEST(Peer, GraphReplays) {
  const bool cuda = rig::B == AR_BACKEND_CUDA;
  for (int ranks : {2, 3})
    for (int schedule : {AR_SCHEDULE_FIFO, AR_SCHEDULE_RANDOM, AR_SCHEDULE_PRIORITIES}) {
      if (cuda && schedule != AR_SCHEDULE_FIFO) continue;
      Machine m = peers(ranks);
      m.schedule = schedule;
      Rig r(m, ranks, 1 << 20, 64 << 10, 3);
      NEEDS_PEERS(r);
      const auto add = [&](int64_t count, bool in_place) {
        Case c = pushed(count, count % 2 != 0 ? AR_F32 : AR_BF16);
        c.in_place = in_place;
        c.fed = true;
        return r.make(c);
      };
      const std::vector<std::vector<size_t>> graphs = {
          {add(3001, true)}, {add(150001, false)}, {add(300000, true), add(77, false), add(250001, true)}};
      const size_t eager[] = {add(5000, false), add(280001, true)};
      std::vector<ar_graph> built;
      for (const auto& calls : graphs) {
        built.push_back(r.capture([&] {
          for (size_t i : calls) r.enqueue(i);
        }));
        ASSERT_NE(built.back(), 0u) << r.e.message;
      }
      for (int k = 0; k < (cuda ? 1000 : 18); k++) {
        const size_t g = static_cast<size_t>(k) % graphs.size();
        const bool look = k < 9 || k % 50 == 0;
        if (look)
          for (size_t i : graphs[g]) r.refill(i);
        r.launch(built[g]);
        if (k % 5 == 0) r.enqueue(eager[k / 5 % 2]);
        if (!look) continue;
        r.wait();
        for (size_t i : graphs[g])
          ASSERT_EQ(r.wrong(i), 0) << "graph " << g << " replay " << k << " schedule " << schedule << "\n"
                                   << ar_emulated_report();
      }
      r.wait();
      ASSERT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << r.e.message;
      for (ar_graph g : built) ar_graph_destroy(rig::B, r.device(0), g, &r.e);
    }
}

// Several calls of all three ways and of the other paths in flight at once, without a wait between them.
void soup(uint64_t seed, int schedule) {
  std::mt19937_64 rng(seed * 31 + 5);
  const int ranks = 2 + static_cast<int>(rng() % 4);
  Machine m = peers(rng() % 4 == 0 ? 1 : ranks);
  m.seed = seed;
  m.schedule = schedule;
  Rig r(m, ranks, 1 << 20, 64 << 10, 2);
  NEEDS_PEERS(r);
  std::vector<size_t> made;
  for (int k = 0; k < 5; k++) {
    Case c = pushed(0, rng() % 2 == 0 ? AR_F32 : AR_BF16);
    if (rng() % 8 == 0) c.path = rng() % 2 == 0 ? AR_PATH_INTERNAL : AR_PATH_COPY_ENGINE;
    const int64_t counts[] = {1, 100, 3000, 20001, 33333, 150000};
    c.count = counts[rng() % 6];
    c.fed = rng() % 2 == 0;
    c.in_place = c.fed && rng() % 2 == 0;  // unfed, the second time would have the first result for its input
    c.offset = static_cast<int>(rng() % 4);
    for (int q = 0; q < ranks; q++) c.absent.push_back(rng() % 6 == 0);
    made.push_back(r.make(c));
  }
  for (int k = 0; k < 2; k++)
    for (size_t i : made) r.enqueue(i);
  r.wait();
  for (size_t i : made)
    ASSERT_EQ(r.wrong(i), 0) << "call " << i << " of " << ranks << " ranks, schedule " << schedule << " seed " << seed
                             << "\n"
                             << ar_emulated_report();
  ASSERT_EQ(ar_emulated_hazards(), 0) << "seed " << seed << " schedule " << schedule << "\n" << ar_emulated_report();
}
class Seeds : public testing::TestWithParam<int> {};
TEST_P(Seeds, Soup) {
  const char* fewer = std::getenv("AR_TEST_SEEDS");  // under sanitizers
  const uint64_t seeds = fewer != nullptr ? std::strtoull(fewer, nullptr, 10) : 60;
  for (uint64_t seed = 0; seed < seeds; seed++) {
    soup(seed, GetParam());
    if (HasFatalFailure() || IsSkipped()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Schedules, Seeds, testing::Values(0, 1, 2, 3));

// A peer that never comes: one error for everyone, within the deadline.
TEST(Peer, APeerNeverComes) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "stores are dropped on emulated devices only";
  struct {
    int64_t count;
    const char* phase;
  } cases[] = {{100, "peer data"}, {20000, "peer flag"}, {300000, "two-shot scatter"}};
  for (const auto& c : cases) {
    Rig r(peers(3), 3, 1 << 20, 64 << 10, 0, 50);  // one round: a later one's flag would do for a lost one
    const size_t i = r.make(pushed(c.count, AR_F32));
    r.enqueue(i);
    r.wait();
    ar_emulated_drop_store(c.count > 1000, 1);
    r.enqueue(i);
    ASSERT_EQ(ar_comm_wait(r.comm, -1, &r.e), AR_ERR_TIMEOUT) << r.e.message;
    EXPECT_EQ(std::string(r.e.phase), c.phase) << r.e.message;
    EXPECT_EQ(r.e.call, 1u);
    EXPECT_EQ(r.call(i), AR_ERR_TIMEOUT);
    EXPECT_EQ(ar_emulated_hazards(), 0) << ar_emulated_report();
  }
}

TEST(Peer, NeedsPermission) {
  Machine m = peers(2);
  m.peers = false;
  Rig r(m, 2);
  char why[256];
  EXPECT_EQ(ar_comm_has_path(r.comm, AR_PATH_PEER, why, sizeof(why)), 0);
  EXPECT_EQ(std::string(why), "peer access is neither proven nor trusted");
}
TEST(Peer, NeedsTheDriversWord) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "the machine's matrix is the emulated one's";
  Machine m = peers(3);
  m.tweak = [](ar_emulated_machine& x) { x.peer[2][1] = 0; };
  Rig r(m, 3);
  char why[256];
  EXPECT_EQ(ar_comm_has_path(r.comm, AR_PATH_PEER, why, sizeof(why)), 0);
  EXPECT_EQ(std::string(why), "the driver denies device 2 access to the memory of device 1");
}
// Memory that cannot be had costs the path, not the communicator.
TEST(Peer, WithoutMemory) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "memory is short on emulated devices only";
  Machine m = peers(2);
  m.tweak = [](ar_emulated_machine& x) { x.device[1].memory_bytes = 8 << 20; };
  Rig r(m, 2);
  char why[256];
  EXPECT_EQ(ar_comm_has_path(r.comm, AR_PATH_PEER, why, sizeof(why)), 0);
  EXPECT_NE(std::string(why).find("bytes of device memory"), std::string::npos) << why;
  Case c;
  c.count = 1000;
  check(r, c, m);
}

}  // namespace
