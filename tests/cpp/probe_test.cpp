// The proof of peer access: each way in which it goes wrong on an emulated machine gets its verdict, and nothing is left behind.
#include "rig.h"

namespace {

ar_probe_result probe(int from, int to) {
  ar_probe_result r;
  ar_error e{};
  EXPECT_EQ(ar_probe_pair(rig::B, from, to, 500, &r, &e), AR_OK) << e.message;
  return r;
}
void machine(int devices, bool peers, int drive = AR_DRIVE_STEPPED) {
  if (rig::B == AR_BACKEND_CUDA) return;
  ar_emulated_machine m;
  ar_emulated_defaults(&m, devices);
  m.drive = drive;
  for (int a = 0; a < devices; a++)
    for (int b = 0; b < devices; b++) m.peer[a][b] = peers && a != b;
  ar_error e{};
  ASSERT_EQ(ar_emulated_configure(&m, 1, &e), AR_OK) << e.message;
}
bool has(const ar_probe_result& r, const char* text) { return std::string(r.detail).find(text) != std::string::npos; }

TEST(Probe, AGoodPair) {
  machine(2, true);
  if (rig::device_count() < 2) GTEST_SKIP() << "one device";
  int32_t can = 0;
  ar_device_can_access_peer(rig::B, 0, 1, &can, nullptr);
  const ar_probe_result r = probe(0, 1);
  std::printf("verdict %d: copy %.1f GB/s, store %.1f, staged %.1f, %.2f us; %s\n", r.verdict, r.copy_gbs, r.store_gbs,
              r.staged_gbs, r.latency_us, r.detail);
  if (rig::B == AR_BACKEND_CUDA) {
    EXPECT_EQ(r.verdict == AR_PROBE_UNSUPPORTED, can == 0) << r.detail;
    return;
  }
  EXPECT_EQ(r.verdict, AR_PROBE_OK) << r.detail;
  EXPECT_EQ(std::string(r.detail), "");
  // 1 MiB at 376 GB/s and 3 us; staged: a link of 48 to 55 GB/s.
  EXPECT_NEAR(r.copy_gbs, (1 << 20) / ((1 << 20) / 376e3 + 3) / 1e3, 5);
  EXPECT_GT(r.store_gbs, 200);
  EXPECT_GT(r.staged_gbs, 30);
  EXPECT_LT(r.staged_gbs, 56);
  EXPECT_GT(r.latency_us, 0.5);
  EXPECT_LT(r.latency_us, 5);
  EXPECT_EQ(ar_emulated_live_objects(), 0);
  EXPECT_EQ(ar_emulated_hazards(), 0) << ar_emulated_report();
}

TEST(Probe, Unsupported) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "emulated faults";
  machine(2, false);
  const ar_probe_result r = probe(0, 1);
  EXPECT_EQ(r.verdict, AR_PROBE_UNSUPPORTED);
  EXPECT_EQ(std::string(r.detail), "the driver denies it");
}

TEST(Probe, Faults) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "emulated faults";
  const struct {
    int fault, verdict;
    const char* detail;
  } cases[] = {
      {AR_PEER_GOOD, AR_PROBE_OK, ""},
      {AR_PEER_DROPPED, AR_PROBE_BROKEN, "copy engine write, 1 bytes at offset 5: 1 words wrong, the first at byte 4"},
      {AR_PEER_MIRRORED, AR_PROBE_BROKEN, "copy engine write, 1 bytes at offset 5: 1 words wrong, the first at byte 4"},
      {AR_PEER_DELAYED, AR_PROBE_BROKEN, "messages"},
      {AR_PEER_BOUNCED, AR_PROBE_SLOW, "right, but"},
  };
  for (int drive : {AR_DRIVE_STEPPED, AR_DRIVE_BACKGROUND})
    for (const auto& c : cases) {
      machine(3, true, drive);
      ASSERT_EQ(ar_emulated_peer_fault(0, 2, c.fault), AR_OK);
      const ar_probe_result r = probe(0, 2);
      EXPECT_EQ(r.verdict, c.verdict) << c.fault << ": " << r.detail;
      EXPECT_TRUE(has(r, c.detail)) << c.fault << ": " << r.detail;
      // One direction only: the way back, and other pairs, are good.
      if (c.fault == AR_PEER_DROPPED) {
        EXPECT_EQ(probe(2, 0).verdict, AR_PROBE_OK);
        EXPECT_EQ(probe(0, 1).verdict, AR_PROBE_OK);
      }
      EXPECT_EQ(ar_emulated_live_objects(), 0) << c.fault;
    }
  machine(2, true);
}

// The copies of a mirror read back fine where they were made: the owner alone can tell.
TEST(Probe, AMirrorReadsBackFine) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "emulated faults";
  machine(2, true);
  ar_emulated_peer_fault(0, 1, AR_PEER_MIRRORED);
  ar_error e{};
  ar_ptr mine = 0, theirs = 0;
  const uint32_t sent = 0x12345678;
  uint32_t got = 0;
  ASSERT_EQ(ar_device_malloc(rig::B, 0, 64, &mine, &e), AR_OK);
  ASSERT_EQ(ar_device_malloc(rig::B, 1, 64, &theirs, &e), AR_OK);
  const auto copy = [&](ar_ptr to, ar_ptr from) {
    ASSERT_EQ(ar_copy_async(rig::B, 0, to, from, 4, 0, &e), AR_OK) << e.message;
    ASSERT_EQ(ar_device_synchronize(rig::B, 0, &e), AR_OK);
  };
  ASSERT_EQ(ar_copy_to_device(rig::B, 0, mine, &sent, 4, &e), AR_OK);
  copy(theirs, mine);
  ASSERT_EQ(ar_copy_to_device(rig::B, 0, mine, &got, 4, &e), AR_OK);
  copy(mine, theirs);
  ASSERT_EQ(ar_copy_to_host(rig::B, 0, &got, mine, 4, &e), AR_OK);
  EXPECT_EQ(got, sent);
  ASSERT_EQ(ar_copy_to_host(rig::B, 1, &got, theirs, 4, &e), AR_OK);
  EXPECT_NE(got, sent);
  ar_device_free(rig::B, 0, mine, &e);
  ar_device_free(rig::B, 1, theirs, &e);
}

// A broken control says nothing of peer access.
TEST(Probe, Inconclusive) {
  if (rig::B == AR_BACKEND_CUDA) GTEST_SKIP() << "emulated faults";
  machine(2, true);
  ar_emulated_drop_store(0, 10 * (4 << 20) / 16 / 8);  // data that the control stores to pinned memory
  const ar_probe_result r = probe(0, 1);
  EXPECT_EQ(r.verdict, AR_PROBE_INCONCLUSIVE) << r.detail;
  ar_emulated_drop_store(0, 0);
}

TEST(Probe, Arguments) {
  machine(2, true);
  ar_probe_result r;
  ar_error e{};
  EXPECT_EQ(ar_probe_pair(rig::B, 0, 0, 500, &r, &e), AR_ERR_ARGUMENT);
  EXPECT_EQ(ar_probe_pair(rig::B, 0, 99, 500, &r, &e), AR_ERR_NO_DEVICE);
  EXPECT_EQ(ar_probe_pair(rig::B, 0, 1, 0, &r, &e), rig::device_count() < 2 ? AR_ERR_NO_DEVICE : AR_ERR_ARGUMENT);
}

}  // namespace
