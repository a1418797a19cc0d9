// Both transports on emulated devices: every size class, schedule and awkward value, bit for bit against the reference.
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

// Rings of 1 MiB: slots of 512 KiB of wire data, chunks of 64 KiB. These counts are nothing, one element, less than a
// pack, odd tails, a chunk and one, a slot, and two rings + a chunk + an odd tail (for the copy engines).
const int64_t kCounts[] = {0, 1, 3, 7, 255, 1023, 4099, 16384, 16385, 131072, 131075};
constexpr int64_t kTwoRings = (2 << 20) / 4 + (64 << 10) / 4 + 13;

std::string name(const Case& c, const Machine& m) {
  return std::string(ar_path_name(c.path)) + " " + ar_type_name(c.type) + "/" + ar_type_name(c.wire) + " count " +
         std::to_string(c.count) + " schedule " + std::to_string(m.schedule) + " seed " + std::to_string(m.seed) +
         (c.in_place ? " in place" : "") + " offset " + std::to_string(c.offset);
}

void check(Rig& r, const Case& c, const Machine& m) {
  const size_t i = r.make(c);
  r.enqueue(i);
  r.wait();
  ASSERT_EQ(r.wrong(i), 0) << name(c, m);
}

TEST(Transports, EveryCountFifo) {
  Machine m;
  for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE})
    for (int wire : {AR_F32, AR_BF16, AR_F16}) {
      Rig r(m, 2);
      for (int64_t count : kCounts)
        for (bool in_place : {false, true}) {
          Case c;
          c.path = path;
          c.wire = wire;
          c.count = count;
          c.in_place = in_place;
          c.offset = static_cast<int>(count % 5);
          check(r, c, m);
        }
      Case c;
      c.path = path;
      c.wire = wire;
      c.count = kTwoRings;
      check(r, c, m);
    }
}

TEST(Transports, TypesOpsAbsentStrided) {
  Machine m;
  m.schedule = AR_SCHEDULE_RANDOM;
  for (int ranks : {2, 3, 4}) {
    m.devices = ranks;
    Rig r(m, ranks);
    for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE})
      for (int type : {AR_F32, AR_F16, AR_BF16})
        for (int op : {AR_SUM, AR_AVG})
          for (int absent = 0; absent < 1 << ranks; absent += ranks == 2 ? 1 : 3) {
            Case c;
            c.path = path;
            c.type = type;
            c.wire = type == AR_F32 ? (absent % 2 != 0 ? AR_BF16 : AR_F16) : type;
            c.op = op;
            c.count = 3 * 701;
            c.rows = 3;
            c.pad = absent % 3;
            c.in_place = absent % 2 != 0;
            for (int k = 0; k < ranks; k++) c.absent.push_back((absent >> k & 1) != 0);
            check(r, c, m);
          }
  }
}

TEST(Transports, RanksThatShareADevice) {
  Machine m;
  m.devices = 1;
  for (int ranks : {2, 3, 8}) {
    Rig r(m, ranks);
    for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE})
      for (int64_t count : {1, 5000, 40000}) {
        Case c;
        c.path = path;
        c.wire = AR_BF16;
        c.count = count;
        check(r, c, m);
      }
  }
}

TEST(Transports, EpochsWrap) {
  Machine m;
  for (uint32_t first : {0xFFFFFFFDu, 0x7FFFFFFEu, 0xFFFFEu}) {
    Rig r(m, 2, 1 << 20, 64 << 10, 4, 0, first);
    for (int64_t count : {500, 60000, 7, 40000, 500, 500, 60000, 60000}) {
      Case c;
      c.count = count;
      check(r, c, m);
    }
  }
}

// Graphs of every path with an odd number of calls, replayed with new data, between eager calls and other graphs.
// Two-shot through host memory, from four ranks on and above 64 KiB on the wire: every split, several rounds, ranks that own
// nothing of the last share, epochs that wrap, every schedule.
TEST(Transports, InternalTwoShot) {
  uint64_t seed = 0;
  for (int ranks : {4, 5, 8})
    for (int blocks : {0, 3}) {
      Machine m;
      m.devices = ranks == 5 ? 2 : ranks;
      m.schedule = static_cast<int>(seed % 4);
      m.seed = ++seed;
      Rig r(m, ranks, 1 << 20, 64 << 10, blocks, 0, 0xFFFFFFFDu);
      for (int wire : {AR_F32, AR_BF16})
        for (int64_t count : {16384, 16385, 32769, 40001, 131075, 300007}) {
          if (count > 200000 && wire == AR_F32 && blocks == 0) continue;  // time
          Case c;
          c.wire = wire;
          c.count = count;
          c.in_place = count % 3 == 0;
          c.offset = static_cast<int>(count % 4);
          for (int k = 0; k < ranks; k++) c.absent.push_back(count % 5 == 1 && k % 3 == 1);
          const size_t i = r.make(c);
          if (!c.in_place) r.enqueue(i);
          r.enqueue(i);
          r.wait();
          ASSERT_EQ(r.wrong(i), 0) << ranks << " ranks, " << blocks << " blocks, " << count << "\n"
                                   << ar_emulated_report();
        }
    }
}

TEST(Transports, GraphReplays) {
  const bool cuda = rig::B == AR_BACKEND_CUDA;
  const int replays = cuda ? 1000 : 40;
  Machine m;
  for (int schedule : {AR_SCHEDULE_FIFO, AR_SCHEDULE_RANDOM}) {
    if (cuda && schedule != AR_SCHEDULE_FIFO) continue;
    m.schedule = schedule;
    for (int wire : {AR_F32, AR_BF16}) {
      Rig r(m, 2, 1 << 20, 64 << 10, 4);
      const auto add = [&](int path, int64_t count, bool in_place) { return r.make_fed(path, wire, count, in_place); };
      std::vector<std::vector<size_t>> graphs = {
          {add(AR_PATH_INTERNAL, 3001, true)},
          {add(AR_PATH_COPY_ENGINE, 150001, false)},
          {add(AR_PATH_COPY_ENGINE, 400000, true), add(AR_PATH_INTERNAL, 77, false),
           add(AR_PATH_INTERNAL, 60000, true)},
      };
      const size_t eager[] = {add(AR_PATH_INTERNAL, 5000, false), add(AR_PATH_COPY_ENGINE, 280000, true)};
      std::vector<ar_graph> built;
      for (const auto& calls : graphs) {
        built.push_back(r.capture([&] {
          for (size_t i : calls) r.enqueue(i);
        }));
        ASSERT_NE(built.back(), 0u) << r.e.message;
      }
      for (int k = 0; k < replays; k++) {
        const size_t g = static_cast<size_t>(k) % graphs.size();
        const bool look = k < 9 || k % 50 == 0;
        if (look)
          for (size_t i : graphs[g]) r.refill(i);
        r.launch(built[g]);
        if (k % 5 == 0) r.enqueue(eager[k / 5 % 2]);
        if (!look) continue;
        r.wait();
        for (size_t i : graphs[g])
          ASSERT_EQ(r.wrong(i), 0) << "graph " << g << " replay " << k << " schedule " << schedule;
        if (k % 5 == 0) {
          ASSERT_EQ(r.wrong(eager[k / 5 % 2]), 0) << "eager after replay " << k;
        }
      }
      r.wait();
      ASSERT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << r.e.message;
      for (ar_graph g : built) ar_graph_destroy(rig::B, r.device(0), g, &r.e);
    }
  }
}

// Two captures open at once must not share streams or events, whatever the path and the number of pieces.
TEST(Transports, CapturesSideBySide) {
  for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE})
    for (int64_t count : {5000, 100000, 400000}) {
      Rig r(Machine{}, 2);
      std::vector<ar_stream> other(2);
      for (int k = 0; k < 2; k++) ar_stream_create(rig::B, r.device(k), &other[static_cast<size_t>(k)], &r.e);
      std::vector<size_t> calls;
      for (int k = 0; k < 4; k++) {
        Case c;
        c.path = path;
        c.count = count + k;
        c.fed = true;
        calls.push_back(r.make(c));
      }
      ar_graph inner = 0;
      const ar_graph outer = r.capture([&] {
        r.enqueue(calls[0]);
        // The second capture opens, and ends, inside the first; the other streams stand for another thread's.
        std::swap(r.streams, other);
        for (int k = 0; k < 2; k++)
          for (size_t i : {calls[1], calls[2]})
            r.bufs(i)[static_cast<size_t>(k)].stream = r.streams[static_cast<size_t>(k)];
        r.swap_events();
        inner = r.capture([&] {
          r.enqueue(calls[1]);
          r.enqueue(calls[2]);
        });
        r.swap_events();
        std::swap(r.streams, other);
        r.enqueue(calls[3]);
      });
      ASSERT_NE(outer, 0u) << r.e.message;
      ASSERT_NE(inner, 0u) << r.e.message;
      for (int k = 0; k < 5; k++) {
        for (size_t i : calls) r.refill(i);
        r.launch(outer);
        r.join();
        ar_stream_synchronize(rig::B, r.device(0), r.streams[0], &r.e);
        ar_graph_launch(rig::B, r.device(0), inner, other[0], &r.e);
        ar_stream_synchronize(rig::B, r.device(0), other[0], &r.e);
        for (size_t i : calls) ASSERT_EQ(r.wrong(i), 0) << ar_path_name(path) << " count " << count << " call " << i;
      }
      ar_graph_destroy(rig::B, r.device(0), outer, &r.e);
      ar_graph_destroy(rig::B, r.device(0), inner, &r.e);
      for (int k = 0; k < 2; k++) ar_stream_destroy(rig::B, r.device(k), other[static_cast<size_t>(k)], &r.e);
    }
}

// One seed: several calls in flight at once, both transports, without a wait between them.
void soup(uint64_t seed, int schedule) {
  Machine m;
  m.seed = seed;
  m.schedule = schedule;
  Rig r(m, 2, 1 << 20, seed % 2 == 0 ? 64 << 10 : 192 << 10, 3);
  std::mt19937_64 rng(seed);
  std::vector<size_t> made;
  for (int k = 0; k < 4; k++) {
    Case c;
    c.path = rng() % 2 == 0 ? AR_PATH_INTERNAL : AR_PATH_COPY_ENGINE;
    c.wire = rng() % 2 == 0 ? AR_F32 : AR_BF16;
    const int64_t small[] = {1, 100, 3000, 20001, 33333};
    // Now and then two rings + a chunk + an odd tail, for either wire.
    c.count = k == 1 && seed % 16 == 0 ? kTwoRings * (c.wire == AR_BF16 ? 2 : 1) : small[rng() % 5];
    if (k == 1 && seed % 16 == 0) c.path = AR_PATH_COPY_ENGINE;
    c.in_place = rng() % 2 == 0;
    c.offset = static_cast<int>(rng() % 4);
    if (rng() % 5 == 0) c.absent = {rng() % 2 == 0, rng() % 2 == 0};
    made.push_back(r.make(c));
  }
  for (size_t i : made) r.enqueue(i);
  r.wait();
  for (size_t i : made) ASSERT_EQ(r.wrong(i), 0) << "call " << i << " schedule " << schedule << " seed " << seed;
}
// 1000 seeds a schedule, in shares that ctest can run side by side.
class Seeds : public testing::TestWithParam<std::tuple<int, int>> {};
TEST_P(Seeds, Soup) {
  const auto [schedule, share] = GetParam();
  const char* fewer = std::getenv("AR_TEST_SEEDS");  // under sanitizers
  const uint64_t seeds = fewer != nullptr ? std::strtoull(fewer, nullptr, 10) : 250;
  for (uint64_t seed = static_cast<uint64_t>(share) * 250; seed < static_cast<uint64_t>(share) * 250 + seeds; seed++) {
    soup(seed, schedule);
    if (HasFatalFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Schedules, Seeds, testing::Combine(testing::Values(0, 1, 2, 3), testing::Values(0, 1, 2, 3)));

}  // namespace
