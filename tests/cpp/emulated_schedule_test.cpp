// The emulated machine's schedules: late effects, weak memory, determinism by seed.
#include <set>

#include "emulated_rig.h"

namespace {

class EmulatedSchedule : public Emulated {
 protected:
  void seeded(int schedule, uint64_t seed) { machine(2, AR_DRIVE_STEPPED, schedule, seed); }

  // Two devices swap values; true if both got the other's in all of their payload.
  bool swap_is_right(int64_t n, bool fence) {
    Vec16* area = pinned<Vec16>(static_cast<size_t>(2 * n));
    uint32_t* flags = pinned(64);
    Vec16* out[2];
    Stream s[2];
    for (int r = 0; r < 2; r++) {
      out[r] = on_device<Vec16>(static_cast<size_t>(n), r);
      s[r] = stream(r);
      EXPECT_EQ(0, set_device(r));
      EXPECT_EQ(
          0, launch(Swap{area + r * n, area + (1 - r) * n, flags + 32 * r, flags + 32 * (1 - r), out[r], n, 9, fence},
                    1, 32, s[r]));
    }
    for (int r = 0; r < 2; r++) EXPECT_EQ(0, stream_synchronize(s[r]));
    EXPECT_EQ(0, set_device(0));
    for (int r = 0; r < 2; r++)
      for (int64_t i = 0; i < n; i++)
        for (uint32_t w : out[r][i].w)
          if (w != 9) return false;
    return true;
  }
  int wrong(int schedule, int seeds, bool fence) {
    int n = 0;
    for (int seed = 1; seed <= seeds; seed++) {
      seeded(schedule, static_cast<uint64_t>(seed));
      n += !swap_is_right(20, fence);
    }
    return n;
  }
};

TEST_F(EmulatedSchedule, WithItsFenceAnExchangeIsAlwaysRight) {
  EXPECT_EQ(0, wrong(AR_SCHEDULE_FIFO, 1, true));
  EXPECT_EQ(0, wrong(AR_SCHEDULE_RANDOM, 300, true));
  EXPECT_EQ(0, wrong(AR_SCHEDULE_ADVERSARIAL, 300, true));
}

TEST_F(EmulatedSchedule, ALostFenceShows) {
  races();
  EXPECT_EQ(0, wrong(AR_SCHEDULE_FIFO, 1, false));  // strong memory
  EXPECT_GT(wrong(AR_SCHEDULE_RANDOM, 100, false), 10);
  EXPECT_GT(wrong(AR_SCHEDULE_ADVERSARIAL, 100, false), 10);
  ar_emulated_mutate(static_cast<int>(Order::internal_fence));
  EXPECT_GT(wrong(AR_SCHEDULE_RANDOM, 100, true), 10);
}

TEST_F(EmulatedSchedule, ALostWaitShows) {
  races();
  ar_emulated_mutate(static_cast<int>(Order::internal_wait));
  EXPECT_GT(wrong(AR_SCHEDULE_RANDOM, 100, true), 10);
  EXPECT_GT(wrong(AR_SCHEDULE_ADVERSARIAL, 100, true), 10);
}

// LL words: 4 bytes of data and 4 of flag in one 8-byte half, two of them in a Vec16, no fence.
struct SendWords {
  Vec16* to;
  int64_t n;
  static constexpr const char* kName = "send_words";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    b.each(n, [&](int64_t i) {
      const uint32_t k = static_cast<uint32_t>(i);
      store_sys(b, to + i, Vec16{{k * 2, 1, k * 2 + 1, 1}});
    });
  }
};
struct ReceiveWords {
  const Vec16* from;
  uint32_t* out;
  uint32_t* halves_apart;
  int64_t n;
  static constexpr const char* kName = "receive_words";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    b.each(n, [&](int64_t i) {
      Vec16 v{};
      spin(b, Order::internal_ll_wait, {nullptr, kNoDeadline}, from + i, [&] {
        v = load_sys(b, from + i);
        if (v.w[1] != v.w[3]) *halves_apart += 1;
        return v.w[1] == 1 && v.w[3] == 1;
      });
      out[2 * i] = v.w[0];
      out[2 * i + 1] = v.w[2];
    });
  }
};

TEST_F(EmulatedSchedule, EightByteWordsNeverTear) {
  uint32_t apart = 0;
  for (uint64_t seed = 1; seed <= 100; seed++) {
    seeded(seed % 2 ? AR_SCHEDULE_RANDOM : AR_SCHEDULE_ADVERSARIAL, seed);
    constexpr int64_t kN = 90;
    Vec16* words = pinned<Vec16>(kN);
    uint32_t* out = pinned(2 * kN + 1);
    Stream s = stream(0), t = stream(1);
    GOOD(launch(ReceiveWords{words, out, out + 2 * kN, kN}, 1, 32, s));
    GOOD(set_device(1));
    GOOD(launch(SendWords{words, kN}, 1, 32, t));
    GOOD(set_device(0));
    GOOD(stream_synchronize(s));
    GOOD(stream_synchronize(t));
    for (uint32_t i = 0; i < 2 * kN; i++) ASSERT_EQ(i, out[i]) << "seed " << seed;
    apart += out[2 * kN];
  }
  EXPECT_GT(apart, 0u);  // but the halves of 16 bytes do come apart
}

struct OwnStores {  // a processor sees its own stores at once, in order
  Vec16* at;
  uint32_t* wrong;
  static constexpr const char* kName = "own_stores";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    for (uint32_t k = 1; k < 50; k++) {
      store_sys(b, at, Vec16{{k, k + 1, k + 2, k + 3}});
      if (load_sys(b, at).w[3] != k + 3) *wrong += 1;
      store_flag(b, Order::none, at->w, 7);
      const Vec16 v = load_sys(b, at);
      if (v.w[0] != 7 || v.w[1] != k + 1 || load_flag(b, at->w + 2) != k + 2) *wrong += 1;
    }
  }
};

TEST_F(EmulatedSchedule, OwnStoresAreSeen) {
  for (uint64_t seed = 1; seed <= 30; seed++) {
    seeded(AR_SCHEDULE_RANDOM, seed);
    Vec16* at = pinned<Vec16>(2);
    Stream s = stream();
    GOOD(launch(OwnStores{at, at[1].w}, 1, 32, s));
    GOOD(stream_synchronize(s));
    ASSERT_EQ(0u, at[1].w[0]) << seed;
    ASSERT_EQ(7u, at[0].w[0]);
    ASSERT_EQ(52u, at[0].w[3]);
  }
}

void look(void* arg) {
  uint32_t* words = static_cast<uint32_t*>(arg);
  words[1] = words[0];
  words[2] = 77;
}

TEST_F(EmulatedSchedule, CopiesTakeEffectAtTheirEnd) {
  // Beside a copy of 3 us, whatever looks at its destination finds poison, and its source is read last.
  uint32_t* words = pinned(16);
  uint32_t* d = on_device(16);
  Stream a = stream(), b = stream();
  words[0] = 1;
  GOOD(copy_blocking(d, words, 4, CopyKind::host_to_device));
  words[0] = 5;
  GOOD(copy_async(words, d, 4, CopyKind::device_to_host, a));
  GOOD(copy_async(d + 2, words + 2, 4, CopyKind::host_to_device, a));
  GOOD(host_call(b, look, words));
  GOOD(stream_synchronize(b));
  GOOD(stream_synchronize(a));
  EXPECT_EQ(0xA5A5A5A5u, words[1]);
  EXPECT_EQ(1u, words[0]);
  EXPECT_EQ(77u, d[2]);
}

TEST_F(EmulatedSchedule, UnorderedWorkIsSeenInEveryOrder) {
  // A reader beside a copy sees the old value, poison and the new one, depending on the seed.
  for (int schedule : {AR_SCHEDULE_RANDOM, AR_SCHEDULE_ADVERSARIAL}) {
    std::set<uint32_t> seen;
    for (uint64_t seed = 1; seed <= 60; seed++) {
      seeded(schedule, seed);
      uint32_t* words = pinned(16);
      uint32_t* d = on_device(16);
      Stream a = stream(), b = stream();
      words[0] = 1;
      GOOD(copy_blocking(d, words, 4, CopyKind::host_to_device));
      words[0] = 2;
      GOOD(copy_async(words, d, 4, CopyKind::device_to_host, a));
      GOOD(host_call(b, look, words));
      GOOD(stream_synchronize(b));
      GOOD(stream_synchronize(a));
      seen.insert(words[1]);
    }
    EXPECT_EQ(1u, seen.count(0xA5A5A5A5u));
    if (schedule == AR_SCHEDULE_RANDOM) {  // the adversary ends copies last
      EXPECT_EQ((std::set<uint32_t>{1, 2, 0xA5A5A5A5u}), seen);
    }
  }
}

TEST_F(EmulatedSchedule, TheSameSeedIsTheSameRun) {
  races();
  const auto run = [&](int schedule, uint64_t seed) {
    machine(4, AR_DRIVE_STEPPED, schedule, seed);
    EXPECT_EQ(0, trace_start({0, 1, 2, 3}));
    std::vector<Stream> s;
    std::vector<Event> e;
    for (int d = 0; d < 4; d++) {
      s.push_back(stream(d));
      e.push_back(event(false, d));
    }
    uint32_t* h = pinned(4096);
    uint32_t* dev[4];
    for (int d = 0; d < 4; d++) dev[d] = on_device(4096, d);
    uint32_t* flags = pinned(4 * 32);
    for (int round = 0; round < 4; round++)
      for (int d = 0; d < 4; d++) {
        EXPECT_EQ(0, set_device(d));
        EXPECT_EQ(0, copy_async(dev[d], h, 4096u << (d & 1), CopyKind::host_to_device, s[d]));
        EXPECT_EQ(0, launch(Set{flags + 32 * d, static_cast<uint32_t>(round + 1)}, 1, 32, s[d]));
        EXPECT_EQ(0, d == 0 ? kOk : stream_wait(s[d], e[d - 1]));
        EXPECT_EQ(0, launch(Touch{dev[d], 4096, h, 4096}, 3, 32, s[d]));
        EXPECT_EQ(0, event_record(e[d], s[d]));
      }
    for (int d = 0; d < 4; d++) EXPECT_EQ(0, stream_synchronize(s[d]));
    EXPECT_EQ(0, set_device(0));
    std::string text;
    for (const ar_trace_record& r : trace())
      text += std::to_string(r.device) + r.name + std::to_string(r.start_us) + "-" + std::to_string(r.end_us) + " ";
    return text;
  };
  for (int schedule : {AR_SCHEDULE_FIFO, AR_SCHEDULE_RANDOM, AR_SCHEDULE_ADVERSARIAL}) {
    std::set<std::string> runs;
    for (uint64_t seed = 1; seed <= 10; seed++) {
      const std::string once = run(schedule, seed);
      EXPECT_EQ(once, run(schedule, seed));
      runs.insert(once);
    }
    if (schedule == AR_SCHEDULE_FIFO) {
      EXPECT_EQ(1u, runs.size());
    } else {
      EXPECT_GT(runs.size(), 8u);
    }
  }
}

}  // namespace
