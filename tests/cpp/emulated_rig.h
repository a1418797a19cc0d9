// What the emulated machine's own tests share: a machine per test, and kernels small enough to reason about.
#pragma once

#define AR_PLATFORM_EMULATED 1
#include "platform/platform.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "include/allreduce_emulated.h"

namespace {

using namespace AR_NS;

#define GOOD(call) ASSERT_EQ(0, (call)) << #call

class Emulated : public ::testing::Test {
 protected:
  void SetUp() override { machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1); }
  void TearDown() override {
    ar_emulated_mutate(0);
    for (int c = 0; c < AR_CALL_KINDS; c++) ar_emulated_fail(c, 0);
    machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
  }
  void machine(int devices, int drive, int schedule, uint64_t seed) {
    ar_emulated_machine m;
    ar_emulated_defaults(&m, devices);
    m.drive = drive;
    m.schedule = schedule;
    m.seed = seed;
    m.lifetimes = 1;
    m.unchecked = races_on_purpose ? 1 : 0;
    configure(m);
  }
  void configure(const ar_emulated_machine& m) {
    ar_error e;
    ASSERT_EQ(AR_OK, ar_emulated_configure(&m, 1, &e)) << e.message;
  }
  template <class T = uint32_t>
  T* on_device(size_t n, int device = 0) {
    int before = 0;
    void* p = nullptr;
    get_device(&before);
    EXPECT_EQ(0, set_device(device));
    EXPECT_EQ(0, malloc_device(&p, n * sizeof(T)));
    set_device(before);
    return static_cast<T*>(p);
  }
  template <class T = uint32_t>
  T* pinned(size_t n) {
    void* p = nullptr;
    EXPECT_EQ(0, malloc_pinned(&p, n * sizeof(T)));
    std::memset(p, 0, n * sizeof(T));
    return static_cast<T*>(p);
  }
  Stream stream(int device = 0) {
    int before = 0;
    Stream s{};
    get_device(&before);
    EXPECT_EQ(0, set_device(device));
    EXPECT_EQ(0, stream_create(&s));
    set_device(before);
    return s;
  }
  Event event(bool timing = false, int device = 0) {
    int before = 0;
    Event e{};
    get_device(&before);
    EXPECT_EQ(0, set_device(device));
    EXPECT_EQ(0, event_create(&e, timing));
    set_device(before);
    return e;
  }
  // For tests of what a race looks like: hazards_test.cpp has what is said of it.
  void races() {
    races_on_purpose = true;
    machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
  }
  bool races_on_purpose = false;
  std::string report() { return ar_emulated_report(); }
  std::vector<ar_trace_record> trace() {
    std::vector<ar_trace_record> r;
    EXPECT_EQ(0, trace_read(&r));
    return r;
  }
};

constexpr uint64_t kMillisecond = 1000000;
constexpr uint64_t kNoDeadline = UINT64_MAX;

struct Nothing {
  static constexpr const char* kName = "nothing";
  static constexpr int kMaxThreads = 64;
  void operator()(Block&) const {}
};

struct Set {
  uint32_t* word;
  uint32_t value;
  static constexpr const char* kName = "set";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const { store_flag(b, Order::none, word, value); }
};

struct Touch {  // declares accesses, for their cost
  const void* from;
  int64_t read;
  const void* to;
  int64_t written;
  static constexpr const char* kName = "touch";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    b.reads(from, read);
    b.writes(to, written);
  }
};

struct Wait {  // until *word is value; says how that went in *outcome
  const uint32_t* word;
  uint32_t value;
  uint32_t* outcome;
  SpinLimit limit;
  Order order;
  static constexpr const char* kName = "wait";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    const uint64_t start = device_clock_ns();
    const Spin s = spin(b, order, limit, word, [&] { return load_flag(b, word) == value; });
    outcome[0] = static_cast<uint32_t>(s) + 1;
    outcome[1] = static_cast<uint32_t>((device_clock_ns() - start) / 1000);
  }
};

// One side of an exchange through pinned memory. Without the fence the payload may appear after its flag.
struct Swap {
  Vec16* mine;
  const Vec16* peers;
  uint32_t* my_flag;
  const uint32_t* peer_flag;
  Vec16* out;
  int64_t n;
  uint32_t value;
  bool fence;
  static constexpr const char* kName = "swap";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    b.writes(mine, n * 16);
    b.each(n, [&](int64_t i) { store_sys(b, mine + i, Vec16{{value, value, value, value}}); });
    if (fence) fence_sys(b, Order::internal_fence);
    store_flag(b, Order::internal_flag, my_flag, value);
    if (spin(b, Order::internal_wait, {nullptr, kNoDeadline}, peer_flag,
             [&] { return load_flag(b, peer_flag) == value; }) != Spin::ready)
      return;
    fence_sys(b, Order::internal_wait_fence);
    b.reads(peers, n * 16);
    b.each(n, [&](int64_t i) { out[i] = load_sys(b, peers + i); });
  }
};

}  // namespace
