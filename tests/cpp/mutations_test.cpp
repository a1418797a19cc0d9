// Takes each ordering primitive out in turn and shows that the workload below notices. A mutant that survives is a
// primitive nobody needs, or a test nobody has: the failure message names it.
#define RIG_EMULATED_ONLY
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

constexpr uint64_t kSeeds = 24;  // with two ranks; as many more with three; as many more of path peer

constexpr int64_t kPieceAndAPack = 8 * 65520 / 2 + 8;  // BF16 on the wire, chunks of 64 KiB in whole packs for three

// One seed of everything: both transports, wires, several calls in flight, streams that change from call to call, ranks
// sharing a device, a captured row of calls; with three ranks both protocols of the copy engines, absent ranks, and
// in some seeds every tensor twice; path peer with two and three ranks. Returns "" or what went wrong.
std::string workload(uint64_t seed, int schedule, int mutant) {
  const bool peer = seed >= 2 * kSeeds;
  const int ranks = seed < kSeeds || (peer && seed % 2 == 0) ? 2 : 3;
  Machine m;
  m.seed = seed;
  m.schedule = schedule;
  m.devices = seed % 3 == 2 ? 1 : ranks;
  m.peers = peer;
  if (ranks == 3) m.links.assign(3, 100e3 * 2 / 3 / 15e3);  // two-shot from 100 kB on the wire
  // Calls of one chunk each, both protocols in turn, and the same rank absent from all: nobody needs anything of it in
  // between, so nothing else tells that its last store has read the ring place.
  const bool short_calls = ranks == 3 && !peer && seed % 2 == 1;
  Rig r(m, ranks, 1 << 20, (short_calls ? 256 : 64) << 10, 2, 50);
  std::vector<ar_stream> other(static_cast<size_t>(ranks));
  for (int k = 0; k < ranks; k++) ar_stream_create(rig::B, r.device(k), &other[static_cast<size_t>(k)], &r.e);
  const int path = peer ? AR_PATH_PEER : ranks == 3 || seed % 2 == 0 ? AR_PATH_COPY_ENGINE : AR_PATH_INTERNAL;
  std::mt19937_64 rng(seed);
  std::vector<size_t> made;
  for (int k = 0; k < 6; k++) {
    Case c;
    c.path = path;
    c.wire = rng() % 2 == 0 ? AR_F32 : AR_BF16;
    const int64_t small[] = {900, 4000, 30001};
    c.count = path == AR_PATH_COPY_ENGINE ? 100000 + static_cast<int64_t>(rng() % 200000) : small[rng() % 3];
    if (path == AR_PATH_INTERNAL && k == 3) c.count = 500000;
    if (peer) {  // LL words in one and in three rounds, one-shot in several, two-shot in several
      const int64_t sizes[] = {900, 6000, 40001, ranks == 2 ? 150001 : 240001};
      c.count = sizes[rng() % 4];
      if (ranks == 3 && c.count > 200000) c.wire = AR_F32;
    } else if (ranks == 3) {
      const int64_t sizes[] = {9000, 60000, 60000, 120000};
      c.count = short_calls ? (k % 2 == 0 ? 60000 : 9000) : sizes[rng() % 4];
      for (int q = 0; q < ranks; q++) c.absent.push_back(short_calls ? q == 1 : rng() % 5 == 0);
      if (short_calls) c.wire = AR_BF16;
      // One rank's values alone are moved one-shot, in several pieces; then two-shot without one rank.
      if (!short_calls && k >= 4) {
        c.wire = AR_BF16;
        c.count = k == 4 ? 200000 : 400000;
        for (size_t q = 0; q < 3; q++) c.absent[q] = k == 4 ? q != seed % 3 : q == (seed + 1) % 3;
      }
      // A last piece of one pack, of which the absent rank owns nothing: nobody needs anything of it before the next call.
      if (seed % 4 == 0 && k >= 2 && k < 4) {
        c.wire = AR_BF16;
        c.count = k == 2 ? kPieceAndAPack : 100000;
        c.absent = {false, false, true};
      }
    }
    c.in_place = rng() % 2 == 0;
    c.fed = true;
    made.push_back(r.make(c));
    if (k % 2 == 1)
      for (int q = 0; q < ranks; q++)
        r.bufs(made.back())[static_cast<size_t>(q)].stream = other[static_cast<size_t>(q)];
  }
  if (ranks == 3 && !peer && !short_calls && seed % 4 != 0)
    for (size_t k = 0; k < 6; k++) made.insert(made.begin() + static_cast<std::ptrdiff_t>(2 * k), made[2 * k]);
  std::string bad;
  const auto note = [&](const std::string& text) {
    if (bad.empty()) bad = text;
  };
  ar_emulated_mutate(mutant);
  if (seed % 4 < 2) {
    for (size_t i : made)
      if (r.call(i) != AR_OK) note(r.e.message);
    if (ar_comm_wait(r.comm, -1, &r.e) != AR_OK) note(r.e.message);
  } else {
    for (size_t i : made)
      for (int q = 0; q < ranks; q++) r.bufs(i)[static_cast<size_t>(q)].stream = r.streams[static_cast<size_t>(q)];
    const ar_graph graph = r.capture([&] {
      for (size_t i : made)
        if (r.call(i) != AR_OK) note(r.e.message);
    });
    if (graph == 0) note(r.e.message);
    if (graph != 0) {
      r.launch(graph);
      for (int q = 0; q < ranks; q++)
        if (ar_stream_synchronize(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &r.e) != AR_OK)
          note(r.e.message);
      if (ar_comm_error(r.comm, &r.e) != AR_OK) note(r.e.message);
      ar_graph_destroy(rig::B, r.device(0), graph, &r.e);
    }
  }
  std::sort(made.begin(), made.end());
  made.erase(std::unique(made.begin(), made.end()), made.end());
  for (size_t i : made)
    if (bad.empty())
      if (const int64_t n = r.wrong(i); n != 0)
        note(std::to_string(n) + " wrong elements in call " + std::to_string(i));
  ar_emulated_mutate(0);
  for (int k = 0; k < ranks; k++) ar_stream_destroy(rig::B, r.device(k), other[static_cast<size_t>(k)], &r.e);
  return bad;
}

TEST(Mutations, NothingTakenOutPasses) {
  for (int schedule : {AR_SCHEDULE_FIFO, AR_SCHEDULE_RANDOM, AR_SCHEDULE_ADVERSARIAL, AR_SCHEDULE_PRIORITIES})
    for (uint64_t seed = 0; seed < 3 * kSeeds; seed++) {
      if (seed >= kSeeds && seed % kSeeds >= kSeeds / 2) continue;  // time
      ASSERT_EQ(workload(seed, schedule, 0), "") << "schedule " << schedule << " seed " << seed;
    }
}

class Mutant : public testing::TestWithParam<int> {};
TEST_P(Mutant, IsNoticed) {
  const int id = GetParam();
  std::string how;
  const std::string name = ar_emulated_order_name(id);
  // Two-shot of the copy engines needs three ranks; path peer has seeds of its own.
  const uint64_t from = name.rfind("peer_", 0) == 0 ? 2 * kSeeds : name.rfind("two_", 0) == 0 ? kSeeds : 0;
  for (uint64_t seed = from; seed < from + kSeeds && how.empty(); seed++)
    for (int schedule : {AR_SCHEDULE_FIFO, AR_SCHEDULE_RANDOM, AR_SCHEDULE_ADVERSARIAL, AR_SCHEDULE_PRIORITIES}) {
      how = workload(seed, schedule, id);
      if (how.empty()) continue;
      std::cout << ar_emulated_order_name(id) << " is missed: schedule " << schedule << " seed " << seed << ": " << how
                << "\n";
      break;
    }
  EXPECT_NE(how, "") << "taking out " << ar_emulated_order_name(id) << " (" << ar_emulated_order_text(id)
                     << ") changes nothing: is it needed, or is a test missing?";
}
std::vector<int> all_ids() {
  std::vector<int> ids;
  for (int id = 1; ar_emulated_order_name(id) != nullptr; id++) ids.push_back(id);
  return ids;
}
INSTANTIATE_TEST_SUITE_P(Orders, Mutant, testing::ValuesIn(all_ids()),
                         [](const auto& info) { return std::string(ar_emulated_order_name(info.param)); });

}  // namespace
