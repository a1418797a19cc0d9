// The emulated machine's simulated clock: the cost model of spec 8 by numbers.
#include "emulated_rig.h"

namespace {

class EmulatedClock : public Emulated {
 protected:
  void with(const ar_emulated_machine& m) { configure(m); }
  ar_emulated_machine standard(int n) {
    ar_emulated_machine m;
    ar_emulated_defaults(&m, n);
    m.drive = AR_DRIVE_STEPPED;
    return m;
  }
  // Simulated time from now until all devices are done.
  double elapsed(int devices) {
    const double start = ar_emulated_now_us();
    for (int d = 0; d < devices; d++) {
      EXPECT_EQ(0, set_device(d));
      EXPECT_EQ(0, device_synchronize());
    }
    EXPECT_EQ(0, set_device(0));
    return ar_emulated_now_us() - start;
  }
};

constexpr size_t kSize = 4 << 20;
double us(double bytes, double gbs) { return bytes / (gbs * 1e3); }

TEST_F(EmulatedClock, ACopyIsItsFixedCostAndItsBytes) {
  char* d = on_device<char>(kSize);
  char* h = pinned<char>(kSize);
  Stream s = stream();
  Event a = event(true), b = event(true);
  GOOD(event_record(a, s));
  GOOD(copy_async(d, h, kSize, CopyKind::host_to_device, s));
  GOOD(event_record(b, s));
  GOOD(stream_synchronize(s));
  double took = 0;
  GOOD(event_elapsed_us(&took, a, b));
  EXPECT_NEAR(3 + us(kSize, 55), took, 1e-6);
}

TEST_F(EmulatedClock, BothDirectionsAtOnceAreSlowerThanOne) {
  char* d = on_device<char>(2 * kSize);
  char* h = pinned<char>(2 * kSize);
  Stream a = stream(), b = stream();
  GOOD(copy_async(d, h, kSize, CopyKind::host_to_device, a));
  GOOD(copy_async(h + kSize, d + kSize, kSize, CopyKind::device_to_host, b));
  EXPECT_NEAR(3 + us(kSize, 48), elapsed(1), 1e-6);
  // The first half of the long one shares the link, the rest has it alone.
  GOOD(copy_async(d, h, kSize, CopyKind::host_to_device, a));
  GOOD(copy_async(h + kSize, d + kSize, kSize / 2, CopyKind::device_to_host, b));
  EXPECT_NEAR(3 + us(kSize / 2, 48) + us(kSize / 2, 55), elapsed(1), 1e-6);
}

TEST_F(EmulatedClock, AnEngineTakesOneCopyAtATime) {
  char* d = on_device<char>(2 * kSize);
  char* h = pinned<char>(2 * kSize);
  Stream a = stream(), b = stream();
  GOOD(copy_async(d, h, kSize, CopyKind::host_to_device, a));
  GOOD(copy_async(d + kSize, h + kSize, kSize, CopyKind::host_to_device, b));
  EXPECT_NEAR(2 * (3 + us(kSize, 55)), elapsed(1), 1e-6);
}

TEST_F(EmulatedClock, DevicesShareUplinksAndHostMemory) {
  ar_emulated_machine m = standard(8);
  m.uplink_gbs[0] = 55;
  m.device[0].uplink = m.device[1].uplink = 0;
  with(m);
  char* h = pinned<char>(8 * kSize);
  std::vector<Stream> s;
  std::vector<char*> d;
  for (int i = 0; i < 8; i++) {
    s.push_back(stream(i));
    d.push_back(on_device<char>(kSize, i));
  }
  const auto copy = [&](int i, size_t n) {
    EXPECT_EQ(0, copy_async(d[i], h + i * kSize, n, CopyKind::host_to_device, s[i]));
  };
  copy(0, kSize);
  copy(1, kSize);
  EXPECT_NEAR(3 + us(kSize, 27.5), elapsed(8), 1e-6);
  copy(0, kSize);
  copy(2, kSize);  // not below that uplink
  EXPECT_NEAR(3 + us(kSize, 55), elapsed(8), 1e-6);
  copy(0, kSize);
  copy(1, kSize / 2);  // then device 0 has the uplink alone
  EXPECT_NEAR(3 + us(kSize, 55) * 1.5, elapsed(8), 1e-6);
  for (int i = 2; i < 8; i++) copy(i, kSize);
  EXPECT_NEAR(3 + us(kSize, 184.0 / 6), elapsed(8), 1e-6);
}

TEST_F(EmulatedClock, CopiesOnADeviceAndBetweenDevices) {
  ar_emulated_machine m = standard(3);
  m.peer[0][1] = m.peer[1][0] = 1;
  with(m);
  char* d[3] = {on_device<char>(2 * kSize, 0), on_device<char>(kSize, 1), on_device<char>(kSize, 2)};
  Stream s = stream();
  GOOD(copy_async(d[0] + kSize, d[0], kSize, CopyKind::device_to_device, s));
  EXPECT_NEAR(3 + us(kSize, 2000), elapsed(1), 1e-6);  // read and written
  GOOD(copy_async(d[1], d[0], kSize, CopyKind::device_to_device, s));
  EXPECT_NEAR(3 + us(kSize, 376), elapsed(1), 1e-6);
  GOOD(copy_async(d[2], d[0], kSize, CopyKind::device_to_device, s));  // through the host
  EXPECT_NEAR(3 + us(kSize, 55), elapsed(1), 1e-6);
  GOOD(fill_async(d[0], 0, kSize, s));
  EXPECT_NEAR(2 + us(kSize, 4000), elapsed(1), 1e-6);
}

TEST_F(EmulatedClock, KernelsCostTheirLaunchAndWhatTheyTouch) {
  races();
  char* d = on_device<char>(kSize);
  char* h = pinned<char>(kSize);
  Stream s = stream();
  for (int i = 0; i < 10; i++) GOOD(launch(Nothing{}, 4, 32, s));
  EXPECT_NEAR(20, elapsed(1), 1e-6);
  GOOD(launch(Touch{d, kSize / 4, d, kSize / 8}, 4, 32, s));  // per block, and the blocks share the rate
  EXPECT_NEAR(2 + us(kSize * 1.5, 4000), elapsed(1), 1e-6);
  GOOD(launch(Touch{h, kSize / 4, nullptr, 0}, 4, 32, s));
  EXPECT_NEAR(2 + us(kSize, 44), elapsed(1), 1e-6);
}

TEST_F(EmulatedClock, MoreBlocksThanRoomRunInWaves) {
  ar_emulated_machine m = standard(1);
  m.device[0].resident_blocks = 2;
  with(m);
  char* d = on_device<char>(kSize);
  Stream s = stream();
  GOOD(launch(Touch{d, kSize, nullptr, 0}, 4, 32, s));
  EXPECT_NEAR(2 + 2 * us(4 * kSize, 4000), elapsed(1), 1e-6);
}

TEST_F(EmulatedClock, AHopToAnotherDevice) {
  Stream s[2] = {stream(0), stream(1)};
  Event e[2] = {event(false, 0), event(false, 1)};
  constexpr int kHops = 20;
  for (int i = 0; i < kHops; i++) {  // kernel + event + wait: 4.8 us
    GOOD(set_device(i % 2));
    GOOD(stream_wait(s[i % 2], e[1 - i % 2]));  // the first: never recorded
    GOOD(launch(Nothing{}, 1, 32, s[i % 2]));
    GOOD(event_record(e[i % 2], s[i % 2]));
  }
  EXPECT_NEAR(2 + (kHops - 1) * 4.8, elapsed(2), 1e-6);
  Stream t = stream();  // on one device an event costs nothing
  GOOD(launch(Nothing{}, 1, 32, s[0]));
  GOOD(event_record(e[0], s[0]));
  GOOD(stream_wait(t, e[0]));
  GOOD(launch(Nothing{}, 1, 32, t));
  EXPECT_NEAR(4, elapsed(2), 1e-6);
}

TEST_F(EmulatedClock, FlagsTakeTheirWay) {
  uint32_t* words = pinned(128);
  Stream s[2] = {stream(0), stream(1)};
  GOOD(launch(Wait{words, 1, words + 32, {nullptr, kNoDeadline}, Order::none}, 1, 1, s[0]));
  GOOD(set_device(1));
  GOOD(launch(Set{words, 1}, 1, 1, s[1]));
  EXPECT_NEAR(2 + 1.6, elapsed(2), 1e-6);

  // A whole exchange: 2 us launch, payload out, flag 1.6 us, payload in.
  constexpr int64_t kN = 16384;
  Vec16* area = pinned<Vec16>(2 * kN);
  Vec16* out[2] = {on_device<Vec16>(kN, 0), on_device<Vec16>(kN, 1)};
  for (uint32_t r = 0; r < 2; r++) {
    GOOD(set_device(static_cast<int>(r)));
    GOOD(launch(Swap{area + r * kN, area + (1 - r) * kN, words + 16 + 16 * r, words + 32 - 16 * r, out[r], kN, 9, true},
                1, 1, s[r]));
  }
  EXPECT_NEAR(2 + 2 * us(kN * 16, 44) + 1.6, elapsed(2), 1e-6);
}

TEST_F(EmulatedClock, ADeadlineIsATimeLikeAnother) {
  // The copy that would open the gate ends after the deadline.
  char* d = on_device<char>(kSize);
  char* h = pinned<char>(kSize);
  uint32_t* words = pinned(64);
  Stream a = stream(), b = stream(1);
  GOOD(copy_async(d, h, kSize, CopyKind::host_to_device, a));
  GOOD(launch(Set{words, 1}, 1, 1, a));
  GOOD(set_device(1));
  GOOD(launch(Wait{words, 1, words + 32, {nullptr, 50000}, Order::none}, 1, 1, b));
  GOOD(stream_synchronize(b));
  EXPECT_EQ(static_cast<uint32_t>(Spin::expired) + 1, words[32]);
  EXPECT_NEAR(52, ar_emulated_now_us(), 1e-6);
  GOOD(launch(Wait{words, 1, words + 32, {nullptr, 500000}, Order::none}, 1, 1, b));
  GOOD(stream_synchronize(b));
  EXPECT_EQ(static_cast<uint32_t>(Spin::ready) + 1, words[32]);
}

TEST_F(EmulatedClock, GraphsCostWhatTheirNodesCost) {
  char* d = on_device<char>(kSize);
  char* h = pinned<char>(kSize);
  Stream a = stream(), b = stream();
  Event e = event(), f = event();
  Graph g{};
  GraphExec x{};
  GOOD(capture_begin(a));
  GOOD(event_record(e, a));
  GOOD(stream_wait(b, e));
  GOOD(copy_async(d, h, kSize, CopyKind::host_to_device, a));
  for (int i = 0; i < 5; i++) GOOD(launch(Nothing{}, 1, 32, b));
  GOOD(event_record(f, b));
  GOOD(stream_wait(a, f));
  GOOD(launch(Nothing{}, 1, 32, a));
  GOOD(capture_end(a, &g));
  GOOD(graph_instantiate(&x, g));
  GOOD(graph_launch(x, a));
  GOOD(graph_launch(x, b));
  EXPECT_NEAR(2 * (3 + us(kSize, 55) + 2), elapsed(1), 1e-6);
}

TEST_F(EmulatedClock, TheTraceHasEveryOperation) {
  char* d = on_device<char>(kSize);
  char* h = pinned<char>(kSize);
  Stream s = stream();
  GOOD(trace_start({0}));
  GOOD(copy_async(d, h, 1000, CopyKind::host_to_device, s));
  GOOD(launch(Nothing{}, 1, 32, s));
  GOOD(copy_async(h, d, 2000, CopyKind::device_to_host, s));
  GOOD(copy_async(d + 5000, d, 3000, CopyKind::device_to_device, s));
  GOOD(fill_async(d, 1, 100, s));
  GOOD(stream_synchronize(s));
  trace_stop();
  GOOD(launch(Nothing{}, 1, 32, s));
  GOOD(stream_synchronize(s));
  const auto t = trace();
  ASSERT_EQ(5u, t.size());
  const int kinds[] = {1, 0, 2, 3, 4};
  const int64_t bytes[] = {1000, 0, 2000, 3000, 100};
  double at = 0;
  for (size_t i = 0; i < 5; i++) {
    EXPECT_EQ(kinds[i], t[i].kind);
    EXPECT_EQ(bytes[i], t[i].bytes);
    EXPECT_EQ(0, t[i].device);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(s), t[i].stream);
    EXPECT_DOUBLE_EQ(at, t[i].start_us);
    EXPECT_GT(t[i].end_us, t[i].start_us);
    at = t[i].end_us;
  }
  EXPECT_STREQ("copy", t[0].name);
  EXPECT_STREQ("nothing", t[1].name);
  EXPECT_STREQ("fill", t[4].name);
  ar_trace_record one[2] = {};
  int64_t have = 0;
  EXPECT_EQ(AR_OK, ar_trace_read(AR_BACKEND_EMULATED, one, 1, &have, nullptr));
  EXPECT_EQ(5, have);
  EXPECT_EQ(1, one[0].kind);
  EXPECT_EQ(0, one[1].end_us);
  GOOD(trace_start({1}));  // another device: nothing of this one
  GOOD(launch(Nothing{}, 1, 32, s));
  GOOD(stream_synchronize(s));
  EXPECT_TRUE(trace().empty());
  const int32_t devices[] = {0, 64};
  ar_error e{};
  EXPECT_EQ(AR_ERR_NO_DEVICE, ar_trace_start(AR_BACKEND_EMULATED, devices, 2, &e));
  EXPECT_EQ(64, e.device);
}

}  // namespace
