// The hazard checker: what it reports, and what it must not. Every program runs in order (FIFO, strong memory), where its
// race does no harm: found is what nothing orders, not what went wrong.
#include "emulated_rig.h"

#include <random>

#include "emulated/world.h"

namespace {

class Hazards : public Emulated {
 protected:
  static constexpr int64_t kBytes = 4096;
  // Nothing reported, or the report with all of these words.
  void expect_hazard(const std::vector<std::string>& words) {
    for (int d = 0; d < 2; d++) {
      set_device(d);
      device_synchronize();
    }
    EXPECT_GT(ar_emulated_hazards(), 0);
    for (const std::string& w : words)
      EXPECT_NE(report().find(w), std::string::npos) << w << " is not in\n" << report();
  }
  void expect_none() {
    for (int d = 0; d < 2; d++) {
      GOOD(set_device(d));
      GOOD(device_synchronize());
    }
    EXPECT_EQ(ar_emulated_hazards(), 0) << report();
  }
  void copy_down(Stream s, void* to, const void* from) {
    GOOD(copy_async(to, from, kBytes, CopyKind::host_to_device, s));
  }
  void copy_up(Stream s, void* to, const void* from) {
    GOOD(copy_async(to, from, kBytes, CopyKind::device_to_host, s));
  }
  uint32_t* host_ = nullptr;
  uint32_t* device_ = nullptr;
  Stream a_{}, b_{};
  void make() {
    host_ = pinned(kBytes / 4);
    device_ = on_device(kBytes / 4);
    a_ = stream();
    b_ = stream();
  }
};

TEST_F(Hazards, AReadBesideAWrite) {
  make();
  uint32_t* other = pinned(kBytes / 4);
  copy_down(a_, device_, host_);
  GOOD(copy_async(other, device_ + 512, 2048, CopyKind::device_to_host, b_));
  expect_hazard({"hazard at", "seed 1", "a read is not ordered after a write", "first  write by copy",
                 "second read by copy", "device 0", "offset 2048", "2048 bytes"});
}

TEST_F(Hazards, AWriteBesideARead) {
  make();
  copy_up(a_, host_, device_);
  GOOD(fill_async(device_, 1, 1, b_));
  expect_hazard({"a write is not ordered after a read", "1 bytes", "second write by fill"});
}

TEST_F(Hazards, TwoWrites) {
  make();
  copy_down(a_, device_, host_);
  GOOD(fill_async(device_ + 1023, 1, 4, b_));
  expect_hazard({"a write is not ordered after a write", "4 bytes", "offset 4092"});
}

TEST_F(Hazards, WhatIsNoHazard) {
  make();
  uint32_t* other = pinned(kBytes / 4);
  copy_up(a_, host_, device_);  // two reads
  copy_up(b_, other, device_);
  expect_none();
  GOOD(set_device(0));
  GOOD(fill_async(device_, 1, 2048, a_));  // side by side
  GOOD(fill_async(device_ + 512, 2, 2048, b_));
  expect_none();
}

TEST_F(Hazards, OneStreamAnEventAHostWaitOrder) {
  make();
  Event e = event();
  copy_down(a_, device_, host_);
  copy_up(a_, host_, device_);
  GOOD(event_record(e, a_));
  GOOD(stream_wait(b_, e));
  GOOD(fill_async(device_, 1, 8, b_));
  GOOD(stream_synchronize(b_));
  GOOD(fill_async(device_, 2, 8, a_));
  expect_none();
}

TEST_F(Hazards, AnEventOrdersWhatWasBeforeItsRecord) {
  make();
  Event e = event();
  GOOD(event_record(e, a_));
  copy_down(a_, device_, host_);  // after the record
  GOOD(stream_wait(b_, e));
  GOOD(fill_async(device_, 1, 8, b_));
  expect_hazard({"a write is not ordered after a write"});
}

TEST_F(Hazards, AWaitForOneStreamIsNoneForAnother) {
  make();
  copy_down(a_, device_, host_);
  GOOD(stream_synchronize(b_));
  GOOD(fill_async(device_, 1, 8, b_));
  expect_hazard({"a write is not ordered after a write"});
}

struct Add {  // reads and writes all of it, or a share each
  uint32_t* at;
  int64_t words;
  bool shares;
  static constexpr const char* kName = "add";
  static constexpr int kMaxThreads = 64;
  static constexpr bool kTalks = false;
  void operator()(Block& b) const {
    const int64_t n = shares ? words / b.count() : words, lo = shares ? b.index() * n : 0;
    b.reads(at + lo, n * 4);
    b.writes(at + lo, n * 4);
  }
};

TEST_F(Hazards, BlocksOfOneKernel) {
  make();
  GOOD(launch(Add{device_, 1024, true}, 4, 32, a_));
  GOOD(launch(Add{device_, 1024, true}, 8, 32, a_));
  expect_none();
  GOOD(set_device(0));
  GOOD(launch(Add{device_, 1024, false}, 2, 32, a_));
  expect_hazard({"kernel add", "block 0", "block 1"});
}

TEST_F(Hazards, AnExchangeNeedsFlagsAndBothFences) {
  // One at a time taken out; in order and with strong memory, where the values are right all the same.
  struct {
    Order out;
    const char* text;
  } programs[] = {{Order::none, ""},
                  {Order::internal_fence, "a read is not ordered after a write"},
                  {Order::internal_wait, "is not ordered after"},
                  {Order::internal_wait_fence, "a read is not ordered after a write"}};
  for (const auto& p : programs) {
    machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
    constexpr int64_t kN = 100;
    Vec16* area = pinned<Vec16>(2 * kN);
    uint32_t* flags = pinned(64);
    Stream s[2] = {stream(0), stream(1)};
    ar_emulated_mutate(static_cast<int>(p.out));
    for (int r = 0; r < 2; r++) {
      Vec16* out = on_device<Vec16>(kN, r);
      GOOD(set_device(r));
      GOOD(launch(Swap{area + r * kN, area + (1 - r) * kN, flags + 32 * r, flags + 32 * (1 - r), out, kN, 9, true}, 1,
                  32, s[r]));
    }
    if (p.out == Order::none) {
      expect_none();
    } else {
      expect_hazard({p.text, "kernel swap", "block 0"});
    }
    ar_emulated_mutate(0);
  }
}

// Values to and fro through one place: b may write again only when a has read.
struct Turn {
  uint32_t* place;
  uint32_t* to;          // flag raised
  const uint32_t* from;  // flag awaited
  uint32_t rounds;
  bool writer, answers;
  static constexpr const char* kName = "turn";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    for (uint32_t i = 1; i <= rounds; i++) {
      if (writer) {
        b.writes(place, 4);
        fence_sys(b, Order::none);
        store_flag(b, Order::none, to, i);
      }
      if (!writer || answers) {
        spin(b, Order::none, {nullptr, kNoDeadline}, from, [&] { return load_flag(b, from) >= i; });
        fence_sys(b, Order::none);
      }
      if (!writer) {
        b.reads(place, 4);
        if (answers) store_flag(b, Order::none, to, i);  // no fence: it tells of reads
      }
    }
  }
};

// What a flag orders depends on which store of it was seen, so the schedule matters: some seed shows it.
TEST_F(Hazards, AFlagTellsOfReadsWithoutAFence) {
  for (bool answers : {true, false}) {
    int64_t found = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
      machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_RANDOM, seed);
      uint32_t* words = pinned(96);
      GOOD(set_device(0));
      GOOD(launch(Turn{words, words + 32, words + 64, 3, true, answers}, 1, 32, stream(0)));
      GOOD(set_device(1));
      GOOD(launch(Turn{words, words + 64, words + 32, 3, false, answers}, 1, 32, stream(1)));
      for (int d = 0; d < 2; d++) {
        set_device(d);
        device_synchronize();
      }
      found += ar_emulated_hazards();
    }
    EXPECT_EQ(found == 0, answers) << report();
  }
}

TEST_F(Hazards, GraphsOrderAsTheirEdgesDo) {
  make();
  Event fork = event(), join = event();
  for (bool joined : {true, false}) {
    GOOD(capture_begin(a_));
    GOOD(event_record(fork, a_));
    GOOD(stream_wait(b_, fork));
    copy_down(b_, device_, host_);
    GOOD(event_record(join, b_));
    if (joined) {
      GOOD(stream_wait(a_, join));
    }
    GOOD(fill_async(device_, 1, 8, a_));
    if (!joined) {
      GOOD(stream_wait(a_, join));
    }
    Graph g{};
    GraphExec x{};
    GOOD(capture_end(a_, &g));
    GOOD(graph_instantiate(&x, g));
    GOOD(graph_launch(x, a_));
    if (!joined) break;
    GOOD(graph_launch(x, b_));  // launches of one executable follow each other
    GOOD(stream_synchronize(a_));
    GOOD(stream_synchronize(b_));
    expect_none();
    GOOD(set_device(0));
  }
  expect_hazard({"a write is not ordered after a write"});
}

TEST_F(Hazards, TwoGraphsBesideEachOther) {
  make();
  GraphExec x[2];
  for (GraphExec& one : x) {
    Graph g{};
    GOOD(capture_begin(a_));
    GOOD(fill_async(device_, 1, 8, a_));
    GOOD(capture_end(a_, &g));
    GOOD(graph_instantiate(&one, g));
  }
  GOOD(graph_launch(x[0], a_));
  GOOD(graph_launch(x[1], b_));
  expect_hazard({"a write is not ordered after a write", "fill"});
}

TEST_F(Hazards, PinnedMemoryFreedInFlight) {
  make();
  copy_down(a_, device_, host_);
  GOOD(free_pinned(host_));
  expect_hazard({"pinned memory was freed while it may be in use", "copy"});
  machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
  make();
  copy_down(a_, device_, host_);
  GOOD(stream_synchronize(a_));
  GOOD(free_pinned(host_));
  expect_none();
}

TEST_F(Hazards, UseAfterFree) {
  make();
  GOOD(launch(Add{device_, 1024, true}, 1, 32, a_));
  GOOD(stream_synchronize(a_));
  GOOD(free_device(device_));
  GOOD(launch(Add{device_, 1024, true}, 1, 32, a_));
  EXPECT_EQ(stream_synchronize(a_), kIllegalAddress);
  EXPECT_NE(report().find("freed allocation"), std::string::npos) << report();
}

TEST_F(Hazards, StreamsAndEventsDestroyedInUse) {
  make();
  Event e = event();
  copy_down(a_, device_, host_);
  GOOD(event_record(e, a_));
  GOOD(event_destroy(e));
  expect_hazard({"an event was destroyed while it may be in use"});
  machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
  make();
  copy_down(a_, device_, host_);
  GOOD(stream_destroy(a_));
  expect_hazard({"a stream was destroyed while it may be in use", "copy"});
  machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
  make();
  e = event();
  copy_down(a_, device_, host_);
  GOOD(event_record(e, a_));
  GOOD(event_synchronize(e));
  GOOD(event_destroy(e));
  GOOD(stream_destroy(a_));
  expect_none();
}

// The host's copies use the default stream: another stream's work must have been waited for.
TEST_F(Hazards, AHostCopyOfMemoryInFlight) {
  make();
  uint32_t word = 0;
  copy_down(a_, device_, host_);
  copy_blocking(&word, device_, 4, CopyKind::device_to_host);
  expect_hazard({"a read is not ordered after a write", "stream default"});
}

TEST_F(Hazards, TheDeviceStopsAndSaysWhy) {
  make();
  copy_down(a_, device_, host_);
  GOOD(fill_async(device_, 1, 8, b_));
  EXPECT_EQ(stream_synchronize(b_), kHazard);
  EXPECT_NE(std::string(code_text(kHazard)).find("a write is not ordered after a write"), std::string::npos);
  machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
  EXPECT_EQ(ar_emulated_hazards(), 0);
}

// What is read in ever other parts is remembered in few pieces, and as one once one op has read it all.
TEST_F(Hazards, ReadsDoNotCutUpARangeForEver) {
  constexpr size_t kMany = 1 << 16;
  uint32_t *all = on_device(kMany / 4), *other = on_device(kMany / 4);
  Stream s = stream();
  std::mt19937_64 rng(1);
  const auto pieces = [&] { return world().find(all, 1)->shadow.spans.size(); };
  size_t most = 0;
  for (int i = 0; i < 2000; i++) {
    const size_t from = rng() % kMany, to = from + 1 + rng() % (kMany - from);
    GOOD(copy_async(other, reinterpret_cast<char*>(all) + from, to - from, CopyKind::device_to_device, s));
    GOOD(stream_synchronize(s));
    most = std::max(most, pieces());
  }
  EXPECT_LT(most, 40u);
  GOOD(copy_async(other, all, kMany, CopyKind::device_to_device, s));
  GOOD(stream_synchronize(s));
  EXPECT_EQ(pieces(), 1u);
  GOOD(copy_async(other, all, kMany, CopyKind::device_to_device, s));
  GOOD(fill_async(reinterpret_cast<char*>(all) + 100, 1, 50, stream()));  // and still each byte counts
  expect_hazard({"a write is not ordered after a read", "50 bytes", "offset 100"});
}

}  // namespace
