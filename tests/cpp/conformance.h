// What the library relies on of a GPU runtime, written against platform.h alone. The conformance tests are compiled by
// nvcc (AR_PLATFORM_CUDA) and by a plain C++ compiler (AR_PLATFORM_EMULATED), so that the emulated machine's idea of
// CUDA stays true. Codes are CUDA's numbers on both.
//
// AR_TEST_BACKEND=cuda: a test that finds too few devices fails instead of being skipped.
#pragma once

#include "platform/platform.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#if defined(AR_PLATFORM_EMULATED)
#include "include/allreduce_emulated.h"
#endif

namespace {

using namespace AR_NS;

constexpr uint64_t kSecond = 1000000000;

#define GOOD(call) ASSERT_EQ(0, (call)) << #call

// ---- kernels ----------------------------------------------------------------------------------------------------

struct Add {  // *word += add
  uint32_t* word;
  uint32_t add;
  static constexpr const char* kName = "add";
  static constexpr int kMaxThreads = 64;
  AR_DEVICE void operator()(Block& b) const {
    b.lead([&] { *word = *word * 2 + add; });
  }
};

struct Gate {      // holds its stream until the host, or another kernel, opens it
  uint32_t* gate;  // pinned; [1] gets what spin said, plus 1
  SpinLimit limit;
  static constexpr const char* kName = "gate";
  static constexpr int kMaxThreads = 64;
  AR_DEVICE void operator()(Block& b) const {
    b.lead([&] {
      const uint32_t* word = gate;
      const Spin s = spin(b, Order::none, limit, word, [&] { return load_flag(b, word) != 0; });
      store_flag(b, Order::none, gate + 1, static_cast<uint32_t>(s) + 1);
    });
  }
};

// ---- the fixture ------------------------------------------------------------------------------------------------

struct Setting {
  const char* name;
  int drive, schedule;
};
void PrintTo(const Setting& s, std::ostream* os) { *os << s.name; }

class Conformance : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
#if defined(AR_PLATFORM_EMULATED)
    ar_emulated_machine m;
    ar_emulated_defaults(&m, 4);
    m.drive = GetParam().drive;
    m.schedule = GetParam().schedule;
    m.seed = 7;
    ASSERT_EQ(0, ar_emulated_configure(&m, 1, nullptr));
#endif
    int n = 0;
    GOOD(device_count(&n));
    devices_ = n;
    if (!enough(1)) return;
    GOOD(set_device(0));
    GOOD(stream_create(&a_));
    GOOD(stream_create(&b_));
    GOOD(event_create(&e_, false));
    GOOD(event_create(&f_, false));
    words_ = device_words(1024);
    pinned_ = pinned_words(1 << 16);
    ASSERT_NE(nullptr, words_);
    ASSERT_NE(nullptr, pinned_);
    GOOD(load_kernel<Add>());
    GOOD(load_kernel<Gate>());
    set_words(words_, 0);
  }

  void TearDown() override {
    if (devices_ == 0) return;
    for (uint32_t* g : gates_) open(g);
    for (int d = 0; d < devices_ && d < 2; d++) {
      set_device(d);
      EXPECT_EQ(0, device_synchronize());
    }
    set_device(0);
    EXPECT_EQ(0, stream_destroy(a_));
    EXPECT_EQ(0, stream_destroy(b_));
    EXPECT_EQ(0, event_destroy(e_));
    EXPECT_EQ(0, event_destroy(f_));
    for (void* p : device_) EXPECT_EQ(0, free_device(p));
    for (void* p : host_) EXPECT_EQ(0, free_pinned(p));
#if defined(AR_PLATFORM_EMULATED)
    if (!HasFailure() && !IsSkipped()) {
      EXPECT_EQ(0, ar_emulated_live_objects());
    }
#endif
  }

  bool enough(int needed) {
    if (devices_ >= needed) return true;
    const char* backend = std::getenv("AR_TEST_BACKEND");
    const std::string text = "needs " + std::to_string(needed) + " devices, found " + std::to_string(devices_);
    [&] {
      if (backend != nullptr && std::string(backend) == "cuda") FAIL() << text;
      GTEST_SKIP() << text;
    }();
    return false;
  }
  uint32_t* device_words(size_t n) {
    void* p = nullptr;
    EXPECT_EQ(0, malloc_device(&p, n * 4));
    device_.push_back(p);
    return static_cast<uint32_t*>(p);
  }
  uint32_t* pinned_words(size_t n) {
    void* p = nullptr;
    EXPECT_EQ(0, malloc_pinned(&p, n * 4));
    host_.push_back(p);
    std::memset(p, 0, n * 4);
    void* seen = nullptr;
    EXPECT_EQ(0, host_to_device(&seen, p));
    EXPECT_EQ(p, seen);  // what the tests assume of the machine: one address for host and devices
    return static_cast<uint32_t*>(p);
  }
  void set_words(uint32_t* p, uint32_t v) { EXPECT_EQ(0, copy_blocking(p, &v, 4, CopyKind::host_to_device)); }
  uint32_t word(const uint32_t* p) {
    uint32_t v = 0;
    EXPECT_EQ(0, copy_blocking(&v, p, 4, CopyKind::device_to_host));
    return v;
  }
  // A gate that is closed: launched into a stream, it holds what comes after it.
  uint32_t* gate(Stream s) {
    uint32_t* g = pinned_words(2);
    gates_.push_back(g);
    EXPECT_EQ(0, launch(Gate{g, {abort(), 60 * kSecond}}, 1, 32, s));
    return g;
  }
  void open(uint32_t* g) { __atomic_store_n(g, 1u, __ATOMIC_SEQ_CST); }
  uint32_t* abort() {
    if (abort_ == nullptr) abort_ = pinned_words(1);
    return abort_;
  }
  Capturing state(Stream s) {
    CaptureInfo info;
    EXPECT_EQ(0, capture_info(s, &info));
    return info.state;
  }
  bool finished(Stream s) {
    bool done = false;
    EXPECT_EQ(0, stream_query(s, &done));
    return done;
  }

  int devices_ = 0;
  Stream a_{}, b_{};
  Event e_{}, f_{};
  uint32_t* words_ = nullptr;
  uint32_t* pinned_ = nullptr;
  uint32_t* abort_ = nullptr;
  std::vector<void*> device_, host_;
  std::vector<uint32_t*> gates_;
};

#if defined(AR_PLATFORM_EMULATED)
const Setting kSettings[] = {{"background", AR_DRIVE_BACKGROUND, AR_SCHEDULE_FIFO},
                             {"stepped", AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO},
                             {"random", AR_DRIVE_STEPPED, AR_SCHEDULE_RANDOM},
                             {"adversarial", AR_DRIVE_STEPPED, AR_SCHEDULE_ADVERSARIAL},
                             {"priorities", AR_DRIVE_STEPPED, AR_SCHEDULE_PRIORITIES}};
#else
const Setting kSettings[] = {{"cuda", 0, 0}};
#endif
INSTANTIATE_TEST_SUITE_P(On, Conformance, ::testing::ValuesIn(kSettings),
                         [](const ::testing::TestParamInfo<Setting>& i) { return std::string(i.param.name); });

#define NEEDS(n) \
  if (!enough(n)) return

}  // namespace
