// What overlaps with what, on the emulated machine's simulated clock, and when memory is held.
#define RIG_EMULATED_ONLY
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

void trace(bool on) {
  const int32_t devices[] = {0, 1};
  EXPECT_EQ(AR_OK, on ? ar_trace_start(rig::B, devices, 2, nullptr) : ar_trace_stop(rig::B, nullptr));
}

enum Kind { kKernel = 0, kDown = 1, kUp = 2 };  // host-to-device is a download

std::vector<ar_trace_record> records(int device, int kind, const char* name = nullptr) {
  int64_t have = 0;
  EXPECT_EQ(AR_OK, ar_trace_read(rig::B, nullptr, 0, &have, nullptr));
  std::vector<ar_trace_record> all(static_cast<size_t>(have));
  EXPECT_EQ(AR_OK, ar_trace_read(rig::B, all.data(), have, &have, nullptr));
  std::vector<ar_trace_record> out;
  for (const auto& r : all)
    if (r.device == device && r.kind == kind && (name == nullptr || std::string(r.name) == name)) out.push_back(r);
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.start_us < b.start_us; });
  return out;
}

Case large(int64_t count, int wire) {
  Case c;
  c.path = AR_PATH_COPY_ENGINE;
  c.wire = wire;
  c.count = count;
  return c;
}

TEST(Timeline, NextPieceIsConvertedInsideTheTransfer) {
  Rig r(Machine{}, 2);
  const size_t i = r.make(large(1 << 20, AR_BF16));  // 2 MiB on the wire: four pieces of 512 KiB
  trace(true);
  r.enqueue(i);
  r.wait();
  trace(false);
  for (int d = 0; d < 2; d++) {
    const auto converts = records(d, kKernel, "convert");
    const auto ups = records(d, kUp), downs = records(d, kDown);
    ASSERT_EQ(converts.size(), 4u);
    ASSERT_EQ(ups.size(), 32u);
    for (size_t p = 0; p + 1 < 4; p++) {
      // Piece p is on the links from its first chunk's upload to the end of its last chunk's download.
      const double from = ups[p * 8].start_us, to = downs[p * 8 + 7].end_us;
      EXPECT_GT(converts[p + 1].start_us, p == 0 ? converts[0].end_us - 1e-9 : from)
          << "device " << d << " piece " << p;
      EXPECT_LT(converts[p + 1].end_us, to) << "device " << d << " piece " << p;
    }
  }
  EXPECT_EQ(r.wrong(i), 0);
}

TEST(Timeline, NextCallIsConvertedInsideASlowPeersDownload) {
  Machine m;
  m.tweak = [](ar_emulated_machine& machine) { machine.device[1].h2d_gbs = machine.device[1].duplex_gbs = 5; };
  Rig r(m, 2);
  const size_t a = r.make(large(1 << 17, AR_BF16)), b = r.make(large(1 << 17, AR_BF16));  // one piece each
  trace(true);
  r.enqueue(a);
  r.enqueue(b);
  r.wait();
  trace(false);
  const auto converts = records(0, kKernel, "convert");
  const auto downs = records(1, kDown);
  ASSERT_EQ(converts.size(), 2u);
  ASSERT_EQ(downs.size(), 8u);
  EXPECT_GT(converts[1].start_us, downs[0].start_us);
  EXPECT_LT(converts[1].end_us, downs[3].end_us);
  EXPECT_EQ(r.wrong(a) + r.wrong(b), 0);
}

TEST(Timeline, BothDirectionsOfEveryLinkAreBusy) {
  Rig r(Machine{}, 2, 8 << 20, 0);
  const size_t i = r.make(large(4 << 20, AR_F32));  // 16 MiB
  trace(true);
  r.enqueue(i);
  r.wait();
  trace(false);
  for (int d = 0; d < 2; d++) {
    const auto ups = records(d, kUp), downs = records(d, kDown);
    double both = 0;
    for (const auto& u : ups)
      for (const auto& w : downs)
        both += std::max(0.0, std::min(u.end_us, w.end_us) - std::max(u.start_us, w.start_us));
    const double all = downs.back().end_us - ups.front().start_us;
    EXPECT_GT(both / all, 0.8) << "device " << d;
  }
  EXPECT_EQ(r.wrong(i), 0);
}

TEST(Memory, CopyEnginesHoldNoneBeforeTheFirstLargeCallAndTheirShareAfter) {
  Rig r(Machine{}, 2, 0, 0);
  ar_stats s;
  ar_comm_stats(r.comm, &s);
  for (int k = 0; k < 2; k++) {
    EXPECT_EQ(s.rank[k].device_bytes[AR_PATH_COPY_ENGINE], 0);
    EXPECT_EQ(s.rank[k].pinned_bytes[AR_PATH_COPY_ENGINE], 0);
    EXPECT_LE(s.rank[k].pinned_bytes[AR_PATH_INTERNAL], 4 << 20);
  }
  const size_t i = r.make(large(5 << 20, AR_BF16));
  r.enqueue(i);
  r.wait();
  ar_comm_stats(r.comm, &s);
  for (int k = 0; k < 2; k++) {
    EXPECT_GT(s.rank[k].device_bytes[AR_PATH_COPY_ENGINE], 0);
    EXPECT_LE(s.rank[k].device_bytes[AR_PATH_COPY_ENGINE], 16 << 20);
    EXPECT_LE(s.rank[k].pinned_bytes[AR_PATH_COPY_ENGINE], 8 << 20);
  }
}

// Every allocation the copy engines make may fail: the call says so, nothing was enqueued, the next path serves it and a
// later call may try again.
TEST(Memory, AFailedAllocationLosesNothing) {
  for (int kind : {AR_CALL_MALLOC_DEVICE, AR_CALL_MALLOC_HOST})
    for (int64_t nth = 1; nth <= (kind == AR_CALL_MALLOC_DEVICE ? 4 : 2); nth++) {
      Rig r(Machine{}, 2);
      const int64_t before = ar_emulated_live_objects();
      const size_t i = r.make(large(1 << 18, AR_F32));
      ar_emulated_fail(kind, nth);
      EXPECT_NE(r.call(i), AR_OK);
      ar_emulated_fail(kind, 0);
      EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << r.e.message;
      EXPECT_LE(ar_emulated_live_objects(), before + 4);
      Case c = large(1 << 18, AR_F32);
      c.path = AR_PATH_INTERNAL;
      const size_t k = r.make(c);
      r.enqueue(k);
      r.enqueue(i);
      r.wait();
      EXPECT_EQ(r.wrong(k) + r.wrong(i), 0);
    }
}

}  // namespace
