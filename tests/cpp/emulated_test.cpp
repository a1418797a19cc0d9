// The emulated machine: memory, handles, faults, waits and deadlocks, drives. Its clock is in emulated_clock_test.cpp,
// its schedules and weak memory in emulated_schedule_test.cpp; what it shares with CUDA in conformance*_test.cpp.
#include <chrono>
#include <cstring>
#include <thread>

#include "emulated_rig.h"

namespace {

// ---- the machine and its memory ---------------------------------------------------------------------------------

TEST_F(Emulated, ImpossibleMachinesAreRefused) {
  ar_emulated_machine good;
  ar_emulated_defaults(&good, 3);
  ar_error error;
  const auto refused = [&](auto change, const char* named) {
    ar_emulated_machine m = good;
    change(m);
    EXPECT_EQ(AR_ERR_ARGUMENT, ar_emulated_configure(&m, 0, &error));
    EXPECT_NE(nullptr, std::strstr(error.message, named)) << error.message;
  };
  refused([](auto& m) { m.size = 4; }, "size");
  refused([](auto& m) { m.devices = 0; }, "devices");
  refused([](auto& m) { m.devices = 17; }, "devices");
  refused([](auto& m) { m.drive = 2; }, "drive");
  refused([](auto& m) { m.schedule = 5; }, "schedule");
  refused([](auto& m) { m.device[1].h2d_gbs = -1; }, "negative");
  refused([](auto& m) { m.host_gbs = 0.0 / 0.0; }, "negative");
  refused([](auto& m) { m.device[2].uplink = 3; }, "uplink");
  EXPECT_EQ(AR_ERR_ARGUMENT, ar_emulated_configure(nullptr, 0, &error));
  EXPECT_EQ(AR_OK, ar_emulated_configure(&good, 0, &error));
  int n = 0;
  GOOD(device_count(&n));
  EXPECT_EQ(3, n);
}

TEST_F(Emulated, AMachineInUseIsReplacedOnlyByForce) {
  ar_emulated_machine m;
  ar_emulated_defaults(&m, 2);
  m.drive = AR_DRIVE_STEPPED;
  Stream s = stream();
  on_device(16);
  pinned(16);
  Event e = event();
  EXPECT_EQ(4, ar_emulated_live_objects());
  ar_error error;
  EXPECT_EQ(AR_ERR_ARGUMENT, ar_emulated_configure(&m, 0, &error));
  EXPECT_NE(nullptr, std::strstr(error.message, "alive"));
  GOOD(launch(Nothing{}, 1, 32, s));
  EXPECT_EQ(AR_OK, ar_emulated_configure(&m, 1, nullptr));
  EXPECT_EQ(0, ar_emulated_live_objects());
  EXPECT_EQ(kInvalidHandle, stream_synchronize(s));
  EXPECT_EQ(kInvalidHandle, event_record(e, nullptr));
}

TEST_F(Emulated, FreshMemoryIsPoison) {
  const uint32_t* p = on_device(64);
  for (int i = 0; i < 64; i++) EXPECT_EQ(0xA5A5A5A5u, p[i]);
}

TEST_F(Emulated, DeviceMemoryEnds) {
  ar_emulated_machine m;
  ar_emulated_defaults(&m, 2);
  m.drive = AR_DRIVE_STEPPED;
  m.device[0].memory_bytes = 10000;
  configure(m);
  void *p = nullptr, *q = nullptr, *r = nullptr;
  GOOD(malloc_device(&p, 6000));
  EXPECT_EQ(kMemory, malloc_device(&q, 6000));
  EXPECT_EQ(nullptr, q);
  EXPECT_TRUE(code_is_memory(kMemory));
  GOOD(set_device(1));
  GOOD(malloc_device(&r, 6000));
  GOOD(set_device(0));
  GOOD(free_device(p));
  GOOD(malloc_device(&q, 10000));
}

TEST_F(Emulated, PointersAreChecked) {
  uint32_t* d = on_device(100);
  uint32_t* other = on_device(100, 1);
  uint32_t* h = pinned(100);
  uint32_t local[4] = {};
  Stream s = stream();
  EXPECT_TRUE(check_range(d, 400, 0));
  EXPECT_TRUE(check_range(d + 99, 4, 0));
  EXPECT_TRUE(check_range(nullptr, 0, 0));
  EXPECT_FALSE(check_range(d + 99, 5, 0));
  EXPECT_FALSE(check_range(d - 1, 4, 0));
  EXPECT_FALSE(check_range(d, 400, 1));  // no peer access
  EXPECT_FALSE(check_range(d, 400, 2));
  EXPECT_FALSE(check_range(local, 4, 0));
  EXPECT_TRUE(check_range(h, 400, 0));
  EXPECT_TRUE(check_range(h, 400, 1));
  const auto bad = [&](void* to, const void* from, size_t n, CopyKind k) {
    EXPECT_EQ(kInvalidValue, copy_async(to, from, n, k, s));
    EXPECT_NE(std::string::npos, report().find("copy of")) << report();
  };
  bad(d + 1, h, 400, CopyKind::host_to_device);
  bad(d, h + 1, 400, CopyKind::host_to_device);
  bad(h, d, 401, CopyKind::device_to_host);
  bad(d, local, 16, CopyKind::host_to_device);  // pageable
  bad(d, other + 60, 400, CopyKind::device_to_device);
  bad(h, h + 50, 16, CopyKind::device_to_device);
  bad(d, d + 1, 16, CopyKind::device_to_device);  // overlapping
  EXPECT_EQ(kInvalidValue, fill_async(d, 0, 401, s));
  EXPECT_EQ(kInvalidValue, fill_async(other, 0, 4, s));
  EXPECT_EQ(kInvalidValue, copy_blocking(d, other, 4, CopyKind::host_to_device));
  EXPECT_EQ(kInvalidValue, free_device(d + 1));
  EXPECT_EQ(kInvalidValue, free_device(h));
  EXPECT_EQ(kInvalidValue, free_pinned(local));
  GOOD(stream_synchronize(s));
}

TEST_F(Emulated, FreedMemoryIsNamed) {
  uint32_t* d = on_device(100);
  Stream s = stream();
  GOOD(free_device(d));
  EXPECT_EQ(kInvalidValue, free_device(d));
  EXPECT_EQ(kInvalidValue, fill_async(d, 0, 4, s));
  EXPECT_NE(std::string::npos, report().find("freed allocation")) << report();
}

TEST_F(Emulated, FreeWaitsForWhatIsInFlight) {
  uint32_t* h = pinned(4);
  uint32_t* d = on_device(4);
  uint32_t* out = pinned(4);
  Stream s = stream();
  h[0] = 42;
  GOOD(copy_async(d, h, 16, CopyKind::host_to_device, s));
  GOOD(copy_async(out, d, 16, CopyKind::device_to_host, s));
  GOOD(free_pinned(h));
  GOOD(free_device(d));
  EXPECT_EQ(42u, out[0]);
}

TEST_F(Emulated, AGraphThatUsesFreedMemoryLosesItsDevice) {
  uint32_t* d = on_device(16);
  Stream s = stream();
  Graph g{};
  GraphExec x{};
  GOOD(capture_begin(s));
  GOOD(fill_async(d, 1, 64, s));
  GOOD(capture_end(s, &g));
  GOOD(graph_instantiate(&x, g));
  GOOD(free_device(d));
  GOOD(graph_launch(x, s));
  EXPECT_EQ(kIllegalAddress, stream_synchronize(s));
  EXPECT_TRUE(code_is_lost(kIllegalAddress));
  EXPECT_NE(std::string::npos, report().find("freed allocation")) << report();
}

struct Stray {
  const uint32_t* from;
  uint32_t* after;
  int how;
  static constexpr const char* kName = "stray";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    if (how == 0) b.reads(from, 16);
    if (how == 1) load_sys(b, reinterpret_cast<const Vec16*>(from));
    *after = 1;
  }
};

TEST_F(Emulated, KernelsThatStrayLoseTheirDevice) {
  for (int how = 0; how < 2; how++) {
    machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
    uint32_t* h = pinned(16);
    Stream s = stream();
    const uint32_t* from = how == 0 ? on_device(4, 1) : h + 1;  // another device's; misaligned
    GOOD(launch(Stray{from, h + 8, how}, 1, 32, s));
    const Code c = stream_synchronize(s);
    EXPECT_EQ(how == 0 ? kIllegalAddress : kMisaligned, c);
    EXPECT_EQ(0u, h[8]);
    EXPECT_NE(std::string::npos, report().find("stray")) << report();
    EXPECT_EQ(c, launch(Nothing{}, 1, 32, s));
    GOOD(set_device(1));
    GOOD(device_synchronize());  // the others work on
    GOOD(set_device(0));
  }
}

// ---- handles, faults, primitives --------------------------------------------------------------------------------

TEST_F(Emulated, HandlesAreCheckedAndNeverUsedTwice) {
  bool done;
  const Stream junk = reinterpret_cast<Stream>(0x12345670);
  EXPECT_EQ(kInvalidHandle, stream_synchronize(junk));
  EXPECT_EQ(kInvalidHandle, stream_query(junk, &done));
  EXPECT_EQ(kInvalidHandle, launch(Nothing{}, 1, 1, junk));
  EXPECT_EQ(kInvalidHandle, stream_destroy(junk));
  EXPECT_EQ(kInvalidHandle, stream_destroy(nullptr));
  EXPECT_EQ(kInvalidHandle, event_destroy(reinterpret_cast<Event>(0x10)));
  EXPECT_EQ(kInvalidValue, graph_launch(reinterpret_cast<GraphExec>(0x10), nullptr));
  EXPECT_EQ(kInvalidValue, graph_destroy(nullptr));
  Stream s = stream();
  GOOD(stream_destroy(s));
  EXPECT_NE(s, stream());
  EXPECT_EQ(kInvalidHandle, stream_synchronize(s));
  Event e = event();
  EXPECT_EQ(kInvalidHandle, stream_wait(reinterpret_cast<Stream>(e), e));
  GOOD(event_destroy(e));
  EXPECT_EQ(kInvalidHandle, event_record(e, nullptr));
  EXPECT_EQ(kInvalidHandle, event_query(e, &done));
}

TEST_F(Emulated, TheNthCallFails) {
  Stream s = stream();
  Event e = event();
  uint32_t* d = on_device(4);
  uint32_t* h = pinned(4);
  const auto third_fails = [&](int call, Code code, auto f) {
    ar_emulated_fail(call, 3);
    EXPECT_EQ(0, f());
    EXPECT_EQ(0, f());
    EXPECT_EQ(code, f());
    EXPECT_EQ(0, f());
    ar_emulated_fail(call, 1);
    ar_emulated_fail(call, 0);
    EXPECT_EQ(0, f());
  };
  void* p;
  Stream t;
  Event v;
  third_fails(AR_CALL_MALLOC_DEVICE, kMemory, [&] { return malloc_device(&p, 16); });
  third_fails(AR_CALL_MALLOC_HOST, kMemory, [&] { return malloc_pinned(&p, 16); });
  third_fails(AR_CALL_COPY, kInjectedFault, [&] { return copy_async(d, h, 16, CopyKind::host_to_device, s); });
  third_fails(AR_CALL_LAUNCH, kInjectedFault, [&] { return launch(Nothing{}, 1, 1, s); });
  third_fails(AR_CALL_RECORD, kInjectedFault, [&] { return event_record(e, s); });
  third_fails(AR_CALL_WAIT, kInjectedFault, [&] { return stream_wait(s, e); });
  third_fails(AR_CALL_STREAM_CREATE, kInjectedFault, [&] { return stream_create(&t); });
  third_fails(AR_CALL_EVENT_CREATE, kInjectedFault, [&] { return event_create(&v, false); });
  Graph g{};
  GraphExec x{};
  GOOD(capture_begin(s));
  GOOD(capture_end(s, &g));
  third_fails(AR_CALL_GRAPH, kInjectedFault, [&] { return graph_instantiate(&x, g); });
  EXPECT_FALSE(code_is_lost(kInjectedFault));
  GOOD(device_synchronize());
}

TEST_F(Emulated, PrimitivesAreCountedAndCanBeTakenOut) {
  const int id = static_cast<int>(Order::call_order);
  EXPECT_STREQ("call_order", ar_emulated_order_name(id));
  EXPECT_NE(nullptr, ar_emulated_order_text(id));
  EXPECT_EQ(nullptr, ar_emulated_order_name(0));
  EXPECT_EQ(nullptr, ar_emulated_order_name(static_cast<int>(Order::count)));
  EXPECT_EQ(nullptr, ar_emulated_order_text(static_cast<int>(Order::count)));
  uint32_t* word = pinned(4);
  Stream a = stream(), b = stream();
  Event e = event();
  GOOD(launch(Wait{word, 1, word + 2, {nullptr, 100 * kMillisecond}, Order::internal_wait}, 1, 1, a));
  GOOD(event_record(e, a));
  GOOD(order_wait(Order::call_order, b, e));
  bool done = true;
  GOOD(stream_query(b, &done));
  EXPECT_FALSE(done);
  EXPECT_TRUE(ordered(Order::call_order));
  ar_emulated_mutate(id);
  EXPECT_FALSE(ordered(Order::call_order));
  Stream c = stream();
  GOOD(order_wait(Order::call_order, c, e));
  GOOD(stream_query(c, &done));
  EXPECT_TRUE(done);
  EXPECT_EQ(2, ar_emulated_order_count(id));
  EXPECT_EQ(5u, slot_turn(Order::internal_slot, 5));
  ar_emulated_mutate(static_cast<int>(Order::internal_slot));
  EXPECT_EQ(0u, slot_turn(Order::internal_slot, 5));
  ar_emulated_mutate(static_cast<int>(Order::internal_wait));  // a wait that is taken out looks once and goes on
  GOOD(launch(Wait{word, 1, word + 2, {nullptr, kNoDeadline}, Order::internal_wait}, 1, 1, c));
  GOOD(stream_synchronize(c));
  EXPECT_EQ(static_cast<uint32_t>(Spin::ready) + 1, word[2]);
}

// ---- waits, deadlines, deadlocks --------------------------------------------------------------------------------

TEST_F(Emulated, TimeJumpsToTheDeadlineWhenAllWait) {
  uint32_t* word = pinned(4);
  Stream s = stream();
  GOOD(launch(Wait{word, 1, word + 2, {nullptr, 10000 * kMillisecond}, Order::internal_wait}, 1, 1, s));
  const auto start = std::chrono::steady_clock::now();
  GOOD(stream_synchronize(s));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_EQ(static_cast<uint32_t>(Spin::expired) + 1, word[2]);
  EXPECT_EQ(10000000u, word[3]);
  EXPECT_NEAR(10000002, ar_emulated_now_us(), 1);
}

TEST_F(Emulated, AskingAgainAndAgainAlsoReachesTheDeadline) {
  uint32_t* word = pinned(4);
  Stream s = stream();
  GOOD(launch(Wait{word, 1, word + 2, {nullptr, 10000 * kMillisecond}, Order::internal_wait}, 1, 1, s));
  bool done = false;
  const auto start = std::chrono::steady_clock::now();
  while (!done && std::chrono::steady_clock::now() - start < std::chrono::seconds(5)) {
    GOOD(stream_query(s, &done));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EXPECT_TRUE(done);
}

TEST_F(Emulated, AHostThatStillWorksStopsTheJump) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kSilence = std::chrono::milliseconds(50);  // after which a host counts as idle (world.cpp)
  uint32_t* word = pinned(4);
  Stream s = stream(), t = stream(1);
  bool kept_up = false;  // a busy machine may silence the other thread for longer than that: then it proves nothing
  for (int turn = 0; turn < 20 && !kept_up; turn++) {
    word[0] = 0;
    GOOD(launch(Wait{word, 1, word + 2, {nullptr, 10 * kMillisecond}, Order::internal_wait}, 1, 1, s));
    std::thread other([&] {
      EXPECT_EQ(0, set_device(1));
      Clock::duration longest{};
      auto last = Clock::now();
      const auto look = [&] {
        longest = std::max(longest, Clock::now() - last);
        last = Clock::now();
      };
      for (int i = 0; i < 10; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        int d;
        EXPECT_EQ(0, get_device(&d));
        look();
      }
      EXPECT_EQ(0, launch(Set{word, 1}, 1, 1, t));
      look();
      EXPECT_EQ(0, stream_synchronize(t));
      kept_up = longest < kSilence / 2;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(8));
    GOOD(stream_synchronize(s));
    const uint32_t outcome = word[2];
    other.join();
    if (kept_up) {
      EXPECT_EQ(static_cast<uint32_t>(Spin::ready) + 1, outcome);
    }
  }
  EXPECT_TRUE(kept_up) << "this machine is too busy for this test";
}

TEST_F(Emulated, AnAbortWordEndsWaits) {
  uint32_t* word = pinned(8);
  Stream s = stream();
  GOOD(launch(Wait{word, 1, word + 2, {word + 4, kNoDeadline}, Order::internal_wait}, 1, 1, s));
  bool done = true;
  GOOD(stream_query(s, &done));
  EXPECT_FALSE(done);
  word[4] = 1;
  GOOD(stream_synchronize(s));
  EXPECT_EQ(static_cast<uint32_t>(Spin::aborted) + 1, word[2]);
}

TEST_F(Emulated, DeadlocksAreReportedWithEveryReason) {
  uint32_t* word = pinned(8);
  Stream a = stream(), b = stream(1);
  Event e = event();
  GOOD(launch(Wait{word, 1, word + 2, {nullptr, kNoDeadline}, Order::internal_wait}, 1, 1, a));
  GOOD(event_record(e, a));
  GOOD(stream_wait(b, e));
  GOOD(set_device(1));
  GOOD(launch(Set{word, 1}, 1, 1, b));
  GOOD(set_device(0));
  EXPECT_EQ(kDeadlock, stream_synchronize(b));
  EXPECT_TRUE(code_is_deadlock(kDeadlock));
  for (const char* part : {"deadlock", "kernel wait", "internal_wait", "device 0", "block 0", "pinned allocation",
                           "without a deadline", "event wait", "device 1", "kernel set", "event record", "seed 1"})
    EXPECT_NE(std::string::npos, report().find(part)) << part << " is missing in:\n" << report();
  EXPECT_EQ(kDeadlock, device_synchronize());
  EXPECT_EQ(kDeadlock, free_pinned(word));  // still in use
  word[0] = 1;
  GOOD(stream_synchronize(b));
}

struct Meet {  // every block waits for all others
  uint32_t* arrived;
  uint32_t* outcome;
  uint64_t timeout_ns;
  static constexpr const char* kName = "meet";
  static constexpr int kMaxThreads = 64;
  void operator()(Block& b) const {
    store_flag(b, Order::none, arrived + b.index(), 1);
    const int n = b.count();
    const Spin s = spin(b, Order::internal_wait, {nullptr, timeout_ns}, arrived, [&] {
      for (int i = 0; i < n; i++)
        if (load_flag(b, arrived + i) == 0) return false;
      return true;
    });
    outcome[b.index()] = static_cast<uint32_t>(s) + 1;
  }
};

TEST_F(Emulated, BlocksThatFindNoRoomAreReported) {
  for (int schedule : {AR_SCHEDULE_FIFO, AR_SCHEDULE_RANDOM, AR_SCHEDULE_ADVERSARIAL}) {
    ar_emulated_machine m;
    ar_emulated_defaults(&m, 1);
    m.drive = AR_DRIVE_STEPPED;
    m.schedule = schedule;
    m.device[0].resident_blocks = 3;
    configure(m);
    int blocks = 0;
    GOOD(resident_blocks<Meet>(64, &blocks));
    EXPECT_EQ(3, blocks);
    uint32_t* words = pinned(16);
    Stream s = stream();
    GOOD(launch(Meet{words, words + 8, kMillisecond}, 3, 64, s));
    GOOD(stream_synchronize(s));
    EXPECT_EQ("", report());
    for (int i = 0; i < 3; i++) EXPECT_EQ(static_cast<uint32_t>(Spin::ready) + 1, words[8 + i]);
    std::memset(words, 0, 64);
    GOOD(launch(Meet{words, words + 8, kMillisecond}, 4, 64, s));
    GOOD(stream_synchronize(s));
    for (const char* part : {"cannot become resident", "limit 3", "1 blocks of kernel meet"})
      EXPECT_NE(std::string::npos, report().find(part)) << part << " is missing in:\n" << report();
    int expired = 0;
    for (int i = 0; i < 4; i++) expired += words[8 + i] == static_cast<uint32_t>(Spin::expired) + 1;
    EXPECT_GT(expired, 0);
  }
}

// ---- drives -----------------------------------------------------------------------------------------------------

TEST_F(Emulated, SteppedWorkWaitsForTheHost) {
  uint32_t* word = pinned(1);
  Stream s = stream();
  GOOD(launch(Set{word, 7}, 1, 1, s));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(0u, word[0]);
  EXPECT_EQ(0, ar_emulated_now_us());
  bool done = false;
  for (int i = 0; i < 10 && !done; i++) GOOD(stream_query(s, &done));
  EXPECT_TRUE(done);
  EXPECT_EQ(7u, word[0]);
}

TEST_F(Emulated, BackgroundWorkRunsByItself) {
  machine(2, AR_DRIVE_BACKGROUND, AR_SCHEDULE_FIFO, 1);
  uint32_t* word = pinned(8);
  Stream s = stream();
  GOOD(launch(Set{word, 7}, 1, 1, s));
  for (int i = 0; i < 2000 && __atomic_load_n(word, __ATOMIC_ACQUIRE) != 7; i++)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(7u, word[0]);
}

TEST_F(Emulated, BackgroundDeadlinesAreInRealTime) {
  machine(2, AR_DRIVE_BACKGROUND, AR_SCHEDULE_FIFO, 1);
  uint32_t* word = pinned(8);
  Stream s = stream();
  const auto start = std::chrono::steady_clock::now();
  GOOD(launch(Wait{word, 1, word + 2, {nullptr, 40 * kMillisecond}, Order::internal_wait}, 1, 1, s));
  GOOD(stream_synchronize(s));
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, std::chrono::milliseconds(40));
  EXPECT_LT(took, std::chrono::seconds(5));
  EXPECT_EQ(static_cast<uint32_t>(Spin::expired) + 1, word[2]);
  GOOD(launch(Wait{word, 1, word + 2, {word + 4, kNoDeadline}, Order::internal_wait}, 1, 1, s));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  __atomic_store_n(word + 4, 1u, __ATOMIC_RELEASE);
  GOOD(stream_synchronize(s));
  EXPECT_EQ(static_cast<uint32_t>(Spin::aborted) + 1, word[2]);
}

TEST_F(Emulated, ManyHostThreads) {
  for (int drive : {AR_DRIVE_BACKGROUND, AR_DRIVE_STEPPED}) {
    machine(4, drive, AR_SCHEDULE_RANDOM, 3);
    std::vector<std::thread> threads;
    std::vector<uint32_t*> words;
    for (int t = 0; t < 4; t++) words.push_back(pinned(4));
    for (int t = 0; t < 4; t++)
      threads.emplace_back([&, t] {
        EXPECT_EQ(0, set_device(t));
        Stream s{};
        EXPECT_EQ(0, stream_create(&s));
        for (uint32_t i = 1; i <= 50; i++) {
          EXPECT_EQ(0, launch(Set{words[t], i}, 1, 1, s));
          // the next thread's word, or its deadline: both are fine, hanging is not
          EXPECT_EQ(
              0, launch(Wait{words[(t + 1) % 4], i, words[t] + 2, {nullptr, kMillisecond / 4}, Order::none}, 1, 1, s));
          EXPECT_EQ(0, i % 10 != 0 ? kOk : stream_synchronize(s));
        }
        EXPECT_EQ(0, stream_synchronize(s));
        EXPECT_EQ(0, stream_destroy(s));
      });
    for (auto& t : threads) t.join();
    for (int t = 0; t < 4; t++) EXPECT_EQ(50u, words[t][0]);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Freed memory goes back to the system, also from below what is still allocated.
TEST_F(Emulated, LargeMemoryIsGivenBack) {
  const auto resident = [] {
    long pages = 0, ignored = 0;
    FILE* f = std::fopen("/proc/self/statm", "r");
    if (f == nullptr || std::fscanf(f, "%ld %ld", &ignored, &pages) != 2) pages = -1;
    if (f != nullptr) std::fclose(f);
    return pages * 4;  // KiB
  };
  constexpr size_t kMiB = 1 << 20;
  GOOD(free_device(on_device<char>(16 * kMiB)));  // malloc keeps memory of up to this size from now on
  char* low = on_device<char>(12 * kMiB);
  char* high = on_device<char>(12 * kMiB);
  const long before = resident();
  ASSERT_GT(before, 24 * 1024);
  GOOD(free_device(low < high ? low : high));
  EXPECT_LT(resident(), before - 11 * 1024);
}
#endif

}  // namespace
