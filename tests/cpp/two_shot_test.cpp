// The copy engines' two protocols for three ranks and more: every size class, rank that is absent, layout and schedule, bit
// for bit against the reference; calls of both behind one another; graphs.
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

// A link rate for which two-shot serves more than `bytes` on the wire (crossover_ in transports/copy_engine.cpp).
Machine above(double bytes, int ranks, int devices) {
  Machine m;
  m.devices = devices;
  m.links.assign(static_cast<size_t>(ranks), bytes * (ranks - 1) * (1 - 2.0 / ranks) / 15e3);
  return m;
}

std::string name(const Case& c, int ranks, const Machine& m) {
  std::string absent;
  for (bool a : c.absent) absent += a ? "a" : "-";
  return std::to_string(ranks) + " ranks " + ar_type_name(c.type) + "/" + ar_type_name(c.wire) + " count " +
         std::to_string(c.count) + " rows " + std::to_string(c.rows) + " schedule " + std::to_string(m.schedule) +
         " seed " + std::to_string(m.seed) + (c.in_place ? " in place" : "") + " offset " + std::to_string(c.offset) +
         " absent " + absent + "\n" + ar_emulated_report();
}

Case engines(int64_t count, int wire) {
  Case c;
  c.path = AR_PATH_COPY_ENGINE;
  c.wire = wire;
  c.count = count;
  return c;
}

// Less than a rank each, less than a pack each, odd tails, a chunk and a little, pieces and a little.
const int64_t kCounts[] = {1, 2, 7, 23, 24, 25, 129, 4099, 16384, 16385, 131075, (1 << 18) + 13};

TEST(TwoShot, EveryCount) {
  for (int ranks = 3; ranks <= 8; ranks++) {
    const Machine m = above(1e-3, ranks, ranks);
    Rig r(m, ranks);
    for (int wire : {AR_F32, AR_BF16})
      for (int64_t count : kCounts) {
        if (count > 20000 && ranks > 4 && ranks % 2 == 0 && wire == AR_F32) continue;  // time
        Case c = engines(count, wire);
        c.in_place = count % 2 != 0;
        c.offset = static_cast<int>(count % 3);
        const size_t i = r.make(c);
        r.enqueue(i);
        r.wait();
        ASSERT_EQ(r.wrong(i), 0) << name(c, ranks, m);
      }
  }
}

// Shards by the rates of the links, down to ranks that own nothing and one that owns everything.
TEST(TwoShot, UnequalLinks) {
  const std::vector<std::vector<double>> machines = {
      {4, 1, 4}, {9, 1, 1}, {1, 9, 1}, {1.5, 1, 2, 3}, {1, 8, 8, 1}, {8, 8, 8, 1, 8, 8}, {1, 1, 1, 1, 1, 1, 1, 9}};
  int seed = 0;
  for (const auto& rates : machines) {
    const int ranks = static_cast<int>(rates.size());
    Machine m = above(1e-3, ranks, ranks);
    for (size_t i = 0; i < rates.size(); i++) m.links[i] *= rates[i];
    m.schedule = seed % 4;
    m.seed = static_cast<uint64_t>(++seed);
    Rig r(m, ranks, 1 << 20, seed % 2 == 0 ? 0 : 64 << 10);
    for (int wire : {AR_F32, AR_BF16})
      for (int64_t count : {1, 7, 24, 129, 16385, 131075})
        for (int absent = 0; absent < 3; absent++) {
          Case c = engines(count, wire);
          c.in_place = count % 2 != 0;
          for (int k = 0; k < ranks; k++) c.absent.push_back(absent != 0 && k == absent % ranks);
          const size_t i = r.make(c);
          r.enqueue(i);
          r.wait();
          ASSERT_EQ(r.wrong(i), 0) << name(c, ranks, m);
        }
  }
}

TEST(TwoShot, TypesOpsAbsentStrided) {
  for (int ranks : {3, 4, 7}) {
    Machine m = above(1e-3, ranks, ranks == 7 ? 3 : ranks);
    m.schedule = AR_SCHEDULE_RANDOM;
    Rig r(m, ranks);
    for (int type : {AR_F32, AR_F16, AR_BF16})
      for (int op : {AR_SUM, AR_AVG})
        for (int absent = 0; absent < 1 << ranks; absent += ranks == 7 ? 13 : 1) {
          Case c = engines(3 * 7001, type == AR_F32 ? (absent % 3 == 0   ? AR_F32
                                                       : absent % 3 == 1 ? AR_BF16
                                                                         : AR_F16)
                                                    : type);
          c.type = type;
          c.op = op;
          c.rows = absent % 2 != 0 ? 3 : 0;
          c.pad = absent % 4;
          c.in_place = absent % 5 < 2;
          for (int k = 0; k < ranks; k++) c.absent.push_back((absent >> k & 1) != 0);
          const size_t i = r.make(c);
          r.enqueue(i);
          r.wait();
          ASSERT_EQ(r.wrong(i), 0) << name(c, ranks, m);
        }
  }
}

// Calls of both protocols and of other paths in flight at once, ranks alone and sharing devices; half of the time captured
// and replayed with other data.
void soup(uint64_t seed, int schedule) {
  std::mt19937_64 rng(seed * 31 + 7);
  const int ranks = 3 + static_cast<int>(rng() % 3);
  Machine m = above(30000, ranks, rng() % 4 == 0 ? 1 : ranks);
  m.seed = seed;
  m.schedule = schedule;
  if (seed % 3 == 1) m.links[seed % m.links.size()] *= 1 + static_cast<double>(seed % 5);
  if (seed % 3 == 2)
    for (size_t k = 1; k < m.links.size(); k++) m.links[k] *= 7;
  Rig r(m, ranks, 1 << 20, rng() % 2 == 0 ? 64 << 10 : 0, 2);
  std::vector<size_t> made;
  for (int k = 0; k < 5; k++) {
    Case c = engines(0, rng() % 2 == 0 ? AR_F32 : AR_BF16);
    if (rng() % 8 == 0) c.path = AR_PATH_INTERNAL;
    const int64_t counts[] = {1, 5, 3000, 20001, 33333, 66666};
    c.count = counts[rng() % 6];
    c.in_place = rng() % 2 == 0;
    c.fed = true;
    c.offset = static_cast<int>(rng() % 4);
    if (rng() % 3 == 0) {
      c.rows = 3;
      c.count = (c.count + 2) / 3 * 3;
      c.pad = static_cast<int>(rng() % 3);
    }
    for (int q = 0; q < ranks; q++) c.absent.push_back(rng() % 4 == 0);
    made.push_back(r.make(c));
  }
  const auto look = [&](const char* when) {
    for (size_t i : made) {
      ASSERT_EQ(r.wrong(i), 0) << when << " call " << i << " of " << ranks << " ranks, schedule " << schedule
                               << " seed " << seed << "\n"
                               << ar_emulated_report();
    }
  };
  if (seed % 2 == 0) {
    for (int k = 0; k < 2; k++)  // the same tensors again
      for (size_t i : made) r.enqueue(i);
    r.wait();
    look("eager");
    return;
  }
  const ar_graph graph = r.capture([&] {
    for (size_t i : made) r.enqueue(i);
  });
  ASSERT_NE(graph, 0u) << r.e.message << " seed " << seed;
  for (int k = 0; k < 3; k++) {
    r.launch(graph);
    r.wait();
    look("replayed");
    if (testing::Test::HasFatalFailure()) break;
    for (size_t i : made) r.refill(i);
    r.enqueue(made[k % 5]);
    r.wait();
  }
  ar_graph_destroy(rig::B, r.device(0), graph, &r.e);
}
class Seeds : public testing::TestWithParam<int> {};
TEST_P(Seeds, BothProtocols) {
  for (uint64_t seed = 0; seed < 30; seed++) {
    soup(seed, GetParam());
    if (HasFatalFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Schedules, Seeds, testing::Values(0, 1, 2, 3));

}  // namespace
