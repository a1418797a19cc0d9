// How near the copy engines come to T(c*) (docs/performance.md) on the emulated machine's simulated clock, for equal,
// shared and unequal links. The communicator is told of the links what New tells it of emulated devices (links.go).
#define RIG_EMULATED_ONLY
#include "rig.h"

using rig::Machine;
using rig::Rig;

namespace {

constexpr double kCopyUs = 3;  // o

using Tweak = std::function<void(ar_emulated_machine&)>;

ar_emulated_machine machine_of(int ranks, const Tweak& tweak) {
  ar_emulated_machine m;
  ar_emulated_defaults(&m, ranks);
  if (tweak) tweak(m);
  return m;
}
double duplex(const ar_emulated_device& d) { return std::min({d.h2d_gbs, d.d2h_gbs, d.duplex_gbs}); }

// What bare bytes take at least: every GPU uploads S, and downloads 2(N-1)/N S if shards are equal; in any case S. Uplinks
// are shared, and host memory carries all of it.
double bytes_us(const ar_emulated_machine& m, int n, double s, bool equal_shards) {
  const double down = equal_shards ? 2.0 * (n - 1) / n : 1;
  std::vector<int> hanging(AR_EMULATED_MAX_DEVICES, 0);
  for (int i = 0; i < n; i++)
    if (m.device[i].uplink >= 0) hanging[static_cast<size_t>(m.device[i].uplink)]++;
  double us = (n + 2.0 * (n - 1)) * s / m.host_gbs;
  for (int i = 0; i < n; i++) {
    double gbs = duplex(m.device[i]);
    if (const int u = m.device[i].uplink; u >= 0)
      gbs = std::min(gbs, m.uplink_gbs[u] / hanging[static_cast<size_t>(u)]);
    us = std::max({us, s / gbs, down * s / gbs});
  }
  return us / 1e3;
}
// T(c) = S/B (1 + k/c) + c o at its best c.
double best_us(double bytes, int n) { return bytes + 2 * std::sqrt((n == 2 ? 1 : 3) * bytes * kCopyUs); }

struct Timed {
  double us;
  int chunk;
};
// One reduction of so many wire bytes (F32 for F32), the second of two: from an idle machine to the last result.
Timed reduce(int ranks, int64_t bytes, const Tweak& tweak) {
  Machine m;
  m.devices = ranks;
  m.tweak = [&](ar_emulated_machine& machine) {
    machine.unchecked = 1;  // time
    if (tweak) tweak(machine);
  };
  const ar_emulated_machine machine = machine_of(ranks, tweak);
  for (int i = 0; i < ranks; i++) m.links.push_back(duplex(machine.device[i]));
  Rig r(m, ranks, 0, 0);
  std::vector<ar_buffer> bufs;
  for (int k = 0; k < ranks; k++) {
    ar_buffer b{};
    ar_device_malloc(rig::B, r.device(k), bytes, &b.send, &r.e);
    ar_device_malloc(rig::B, r.device(k), bytes, &b.recv, &r.e);
    b.count = bytes / 4;
    b.stream = r.streams[static_cast<size_t>(k)];
    bufs.push_back(b);
  }
  Timed run{};
  for (int i = 0; i < 2; i++) {
    const double start = ar_emulated_now_us();
    EXPECT_EQ(ar_allreduce(r.comm, bufs.data(), ranks, AR_PATH_COPY_ENGINE, AR_F32, &r.e), AR_OK) << r.e.message;
    r.wait();
    run.us = ar_emulated_now_us() - start;
  }
  ar_stats stats;
  ar_comm_stats(r.comm, &stats);
  run.chunk = stats.chunk_bytes;
  for (int k = 0; k < ranks; k++)
    for (ar_ptr p : {bufs[static_cast<size_t>(k)].send, bufs[static_cast<size_t>(k)].recv})
      ar_device_free(rig::B, r.device(k), p, &r.e);
  return run;
}

// Prints a row and checks it.
void within_ten_percent(const char* links, int ranks, int64_t bytes, const Tweak& tweak, bool equal_shards = true) {
  const double best =
      best_us(bytes_us(machine_of(ranks, tweak), ranks, static_cast<double>(bytes), equal_shards), ranks);
  const Timed run = reduce(ranks, bytes, tweak);
  std::printf("| %s | %d | %.1f MiB | %d KiB | %.0f | %.0f | %.2f |\n", links, ranks,
              static_cast<double>(bytes) / (1 << 20), run.chunk >> 10, best, run.us, run.us / best);
  std::fflush(stdout);
  EXPECT_LE(run.us, 1.1 * best) << links << ", " << ranks << " ranks, " << bytes << " bytes";
}

void link(ar_emulated_device& d, double alone, double both) {
  d.h2d_gbs = d.d2h_gbs = alone;
  d.duplex_gbs = both;
}

struct Links {
  const char* name;
  Tweak tweak;
};
const Links kLinks[] = {
    {"PCIe 5 x16", nullptr},
    {"PCIe 4 x16",
     [](ar_emulated_machine& m) {
       for (auto& d : m.device) link(d, 25, 22);
     }},
    {"PCIe 4 x16, two a switch",
     [](ar_emulated_machine& m) {
       for (int i = 0; i < AR_EMULATED_MAX_DEVICES; i++) {
         link(m.device[i], 25, 22);
         m.device[i].uplink = i / 2;
         m.uplink_gbs[i / 2] = 25;
       }
     }},
};

TEST(Bounds, WithinTenPercentFrom16MiB) {
  for (const Links& l : kLinks)
    for (int ranks = 2; ranks <= 8; ranks++)
      for (int64_t mib : {16, 64})  // 64 MiB: docs/performance.md has them all
        if (mib == 16 || (ranks == 5 && l.tweak)) within_ten_percent(l.name, ranks, mib << 20, l.tweak);
}

// One card in an x4 slot downloads S and no more: with three ranks and more it owns no shard (equal ones: 1.23 of T(c*) with
// three ranks, 1.56 with eight).
TEST(Bounds, ASlowCard) {
  const auto slow = [](int at) {
    return [at](ar_emulated_machine& m) {
      for (auto& d : m.device) link(d, 25, 22);
      link(m.device[at], 3.3, 2.8);
    };
  };
  // docs/machines/pcie4-x16-and-x4.json. NCCL took 1290 us there, 1.25 T(c*).
  within_ten_percent("PCIe 4 x16 and 3 x4", 2, 2600000, slow(1), false);
  within_ten_percent("PCIe 4 x16 and 3 x4", 2, 2600000, slow(0), false);
  for (int ranks : {2, 3, 5, 8}) within_ten_percent("PCIe 4 x16, one 3 x4", ranks, 16 << 20, slow(ranks / 2), false);
}

}  // namespace
