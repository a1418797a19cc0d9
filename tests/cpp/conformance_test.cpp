// Conformance: streams, events, memory, waits in kernels, arithmetic (conformance.h says how it is run).
#include "conformance.h"

#include <chrono>
#include <cmath>
#include <thread>

namespace {

struct Fill {  // out[i] = base + i, through every way to walk an array
  uint32_t* out;
  int64_t n;
  uint32_t base;
  static constexpr const char* kName = "fill";
  static constexpr int kMaxThreads = 128;
  AR_DEVICE void operator()(Block& b) const {
    const int64_t share = (n + b.count() - 1) / b.count();
    const int64_t from = share * b.index() < n ? share * b.index() : n;
    const int64_t mine = from + share < n ? share : n - from;
    uint32_t* p = out + from;
    const uint32_t start = base + static_cast<uint32_t>(from);
    b.writes(p, mine * 4);
    b.each(mine, [&](int64_t i) { p[i] = start; });
    b.sync();
    b.groups<4>(mine, [&](int64_t i, auto slots) {
      uint32_t v[4];
      slots([&](int u, int64_t off) { v[u] = p[i + off]; });
      slots([&](int u, int64_t off) { p[i + off] = v[u] + static_cast<uint32_t>(i + off); });
    });
  }
};

// One rank of a flagged exchange: payload, fence, flag; then the peer's flag and payload.
struct Exchange {
  Vec16* mine;
  const Vec16* peers;
  uint32_t* my_flag;
  const uint32_t* peer_flag;
  Vec16* out;
  int64_t n;
  uint32_t value, epoch;
  SpinLimit limit;
  static constexpr const char* kName = "exchange";
  static constexpr int kMaxThreads = 128;
  AR_DEVICE void operator()(Block& b) const {
    b.writes(mine, n * 16);
    b.each(n, [&](int64_t i) {
      const uint32_t k = static_cast<uint32_t>(i);
      store_sys(b, mine + i, Vec16{{value + k, value ^ k, k, value}});
      fence_sys(b, Order::none);
    });
    b.sync();
    b.lead([&] { store_flag(b, Order::none, my_flag, epoch); });
    bool failed = false;
    b.lead([&] {
      failed = spin(b, Order::none, limit, peer_flag, [&] { return load_flag(b, peer_flag) == epoch; }) != Spin::ready;
      fence_sys(b, Order::none);
    });
    if (b.any(failed)) return;
    b.reads(peers, n * 16);
    b.each(n, [&](int64_t i) { out[i] = load_sys(b, peers + i); });
  }
};

struct Halves {  // conversions in both directions
  const float* floats;
  uint16_t* halves;
  float* back;
  int64_t n;
  static constexpr const char* kName = "halves";
  static constexpr int kMaxThreads = 256;
  AR_DEVICE void operator()(Block& b) const {
    b.each(n, [&](int64_t i) { halves[i] = float_to_half_bits(floats[i]); });
    b.each(65536, [&](int64_t i) { back[i] = half_bits_to_float(static_cast<uint16_t>(i)); });
  }
};

struct Arithmetic {
  const float* a;
  const float* b;
  float* sums;
  float* quotients;
  int64_t n;
  static constexpr const char* kName = "arithmetic";
  static constexpr int kMaxThreads = 256;
  AR_DEVICE void operator()(Block& blk) const {
    blk.each(n, [&](int64_t i) {
      sums[i] = add_rn(a[i], b[i]);
      quotients[i] = div_rn(a[i], b[i]);
    });
  }
};

// ---- streams and events -----------------------------------------------------------------------------------------

TEST_P(Conformance, StreamKeepsItsOrder) {
  NEEDS(1);
  uint32_t expected = 0;
  for (uint32_t i = 0; i < 20; i++) {
    GOOD(launch(Add{words_, i}, 1, 32, a_));
    expected = expected * 2 + i;
  }
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(expected, word(words_));
}

TEST_P(Conformance, WaitBindsToTheRecordOfItsTime) {
  NEEDS(1);
  uint32_t* first = gate(a_);
  GOOD(event_record(e_, a_));
  GOOD(stream_wait(b_, e_));
  GOOD(launch(Add{words_, 1}, 1, 32, b_));
  gate(a_);
  GOOD(event_record(e_, a_));  // re-recorded: b_ does not care
  EXPECT_FALSE(finished(b_));
  open(first);
  GOOD(stream_synchronize(b_));
  EXPECT_EQ(1u, word(words_));
  bool done = true;
  GOOD(event_query(e_, &done));
  EXPECT_FALSE(done);  // the event itself is the second record
}

TEST_P(Conformance, WaitBeforeAnyRecordDoesNothing) {
  NEEDS(1);
  bool done = false;
  GOOD(event_query(e_, &done));
  EXPECT_TRUE(done);
  GOOD(event_synchronize(e_));
  GOOD(stream_wait(b_, e_));
  gate(a_);
  GOOD(event_record(e_, a_));
  GOOD(launch(Add{words_, 1}, 1, 32, b_));
  GOOD(stream_synchronize(b_));
  EXPECT_EQ(1u, word(words_));
}

TEST_P(Conformance, DefaultStreamDoesNotWaitForNonBlockingStreams) {
  NEEDS(1);
  gate(a_);
  GOOD(launch(Add{words_, 1}, 1, 32, nullptr));
  GOOD(launch(Add{words_, 2}, 1, 32, nullptr));
  GOOD(stream_synchronize(nullptr));
  EXPECT_EQ(4u, word(words_));  // copy_blocking goes through the default stream as well
  EXPECT_FALSE(finished(a_));
}

TEST_P(Conformance, BlockingCopyFollowsTheDefaultStream) {
  NEEDS(1);
  for (uint32_t i = 0; i < 8; i++) GOOD(launch(Add{words_, i}, 1, 32, nullptr));
  uint32_t expected = 0;
  for (uint32_t i = 0; i < 8; i++) expected = expected * 2 + i;
  EXPECT_EQ(expected, word(words_));
}

TEST_P(Conformance, DestroyedStreamsAndEventsFinishTheirWork) {
  NEEDS(1);
  Stream s{};
  Event e{};
  GOOD(stream_create(&s));
  GOOD(event_create(&e, false));
  uint32_t* g = gate(s);
  GOOD(launch(Add{words_, 5}, 1, 32, s));
  GOOD(event_record(e, s));
  GOOD(stream_wait(a_, e));
  GOOD(launch(Add{words_, 1}, 1, 32, a_));
  GOOD(stream_destroy(s));
  GOOD(event_destroy(e));
  open(g);
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(11u, word(words_));
}

TEST_P(Conformance, TimingEvents) {
  NEEDS(1);
  Event x{}, y{};
  GOOD(event_create(&x, true));
  GOOD(event_create(&y, true));
  double us = -1;
  EXPECT_EQ(400, event_elapsed_us(&us, x, y));  // never recorded
  GOOD(event_record(x, a_));
  GOOD(launch(Add{words_, 1}, 1, 32, a_));
  GOOD(event_record(y, a_));
  GOOD(event_synchronize(y));
  GOOD(event_elapsed_us(&us, x, y));
  EXPECT_GT(us, 0);
  GOOD(event_record(e_, a_));
  GOOD(event_synchronize(e_));
  EXPECT_EQ(400, event_elapsed_us(&us, x, e_));  // e_ keeps no time
  GOOD(event_destroy(x));
  GOOD(event_destroy(y));
}

void append(void* arg) {
  uint32_t* log = static_cast<uint32_t*>(arg);
  log[0] = log[0] * 10 + log[1];
}

TEST_P(Conformance, HostCallsRunInStreamOrder) {
  NEEDS(1);
  uint32_t* log = pinned_words(2);
  uint32_t* ones = pinned_words(2);
  ones[0] = 1;
  ones[1] = 2;
  GOOD(copy_async(words_, ones, 4, CopyKind::host_to_device, a_));
  GOOD(copy_async(log + 1, words_, 4, CopyKind::device_to_host, a_));
  GOOD(host_call(a_, append, log));
  GOOD(copy_async(words_, ones + 1, 4, CopyKind::host_to_device, a_));
  GOOD(copy_async(log + 1, words_, 4, CopyKind::device_to_host, a_));
  GOOD(host_call(a_, append, log));
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(12u, log[0]);
}

// ---- memory -----------------------------------------------------------------------------------------------------

TEST_P(Conformance, CopiesBothWays) {
  NEEDS(1);
  constexpr size_t kN = 100003;
  uint32_t* up = pinned_words(kN);
  uint32_t* down = pinned_words(kN);
  uint32_t* x = device_words(kN);
  uint32_t* y = device_words(kN);
  for (size_t i = 0; i < kN; i++) up[i] = static_cast<uint32_t>(i * 2654435761u);
  GOOD(copy_async(x, up, kN * 4, CopyKind::host_to_device, a_));
  GOOD(copy_async(y, x, kN * 4, CopyKind::device_to_device, a_));
  GOOD(fill_async(x, 0x11, kN * 4, a_));
  GOOD(event_record(e_, a_));
  GOOD(stream_wait(b_, e_));
  GOOD(copy_async(down, y, kN * 4, CopyKind::device_to_host, b_));
  GOOD(stream_synchronize(b_));
  EXPECT_EQ(0, std::memcmp(up, down, kN * 4));
  EXPECT_EQ(0x11111111u, word(x + kN - 1));
  std::vector<uint32_t> pageable(kN);
  GOOD(copy_blocking(pageable.data(), y, kN * 4, CopyKind::device_to_host));
  EXPECT_EQ(0, std::memcmp(up, pageable.data(), kN * 4));
}

TEST_P(Conformance, CopyReadsPinnedMemoryWhenItRuns) {
  NEEDS(1);
  pinned_[0] = 1;
  uint32_t* g = gate(a_);
  GOOD(copy_async(words_, pinned_, 4, CopyKind::host_to_device, a_));
  pinned_[0] = 2;
  open(g);
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(2u, word(words_));
}

TEST_P(Conformance, KernelsWriteMappedMemory) {
  NEEDS(1);
  constexpr int64_t kN = 10007;
  GOOD(launch(Fill{pinned_, kN, 3}, 7, 128, a_));
  GOOD(stream_synchronize(a_));
  for (int64_t i = 0; i < kN; i++) ASSERT_EQ(static_cast<uint32_t>(3 + i), pinned_[i]);
}

TEST_P(Conformance, Allocation) {
  NEEDS(1);
  void* p = &p;
  const Code c = malloc_device(&p, size_t{1} << 50);
  EXPECT_NE(0, c);
  EXPECT_TRUE(code_is_memory(c));
  EXPECT_FALSE(code_is_lost(c));
  p = &p;
  GOOD(malloc_device(&p, 0));
  EXPECT_EQ(nullptr, p);
  GOOD(free_device(nullptr));
  GOOD(free_pinned(nullptr));
  int on_stack = 0;
  EXPECT_EQ(1, host_to_device(&p, &on_stack));
}

TEST_P(Conformance, DevicesAreWhatTheThreadChose) {
  NEEDS(1);
  EXPECT_EQ(101, set_device(devices_));
  EXPECT_EQ(101, set_device(-1));
  int d = -1;
  GOOD(get_device(&d));
  EXPECT_EQ(0, d);
  std::thread([&] { EXPECT_EQ(0, get_device(&d)); }).join();
  EXPECT_EQ(0, d);
  DeviceInfo info;
  GOOD(device_info(0, &info));
  EXPECT_GT(info.sms, 0);
  EXPECT_GT(info.memory_bytes, 0);
  EXPECT_EQ(101, device_info(devices_, &info));
  int can = -1, blocks = 0;
  GOOD(can_access_peer(&can, 0, 0));
  EXPECT_EQ(0, can);
  GOOD(resident_blocks<Exchange>(128, &blocks));
  EXPECT_GE(blocks, info.sms);
}

TEST_P(Conformance, ImpossibleLaunches) {
  NEEDS(1);
  EXPECT_NE(0, launch(Add{words_, 1}, 0, 32, a_));
  EXPECT_NE(0, launch(Add{words_, 1}, 1, 0, a_));
  EXPECT_NE(0, launch(Add{words_, 1}, 1, 4096, a_));
  GOOD(stream_synchronize(a_));
}

// ---- waits in kernels -------------------------------------------------------------------------------------------

TEST_P(Conformance, SpinsEnd) {
  NEEDS(1);
  uint32_t* aborted = pinned_words(1);
  uint32_t* g = pinned_words(2);
  GOOD(launch(Gate{g, {aborted, 60 * kSecond}}, 1, 32, a_));
  EXPECT_FALSE(finished(a_));
  __atomic_store_n(aborted, 1u, __ATOMIC_SEQ_CST);
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(static_cast<uint32_t>(Spin::aborted) + 1, g[1]);
  GOOD(launch(Gate{g, {abort(), 30000000}}, 1, 32, a_));
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(static_cast<uint32_t>(Spin::expired) + 1, g[1]);
  open(g);
  GOOD(launch(Gate{g, {abort(), 0}}, 1, 32, a_));
  GOOD(stream_synchronize(a_));
  EXPECT_EQ(static_cast<uint32_t>(Spin::ready) + 1, g[1]);
}

TEST_P(Conformance, KernelsExchangeThroughMappedMemory) {
  NEEDS(2);
  constexpr int64_t kN = 3001;
  Vec16* area = reinterpret_cast<Vec16*>(pinned_words(2 * kN * 4));
  uint32_t* flags = pinned_words(64);
  Stream s[2] = {a_, {}};
  GOOD(load_kernel<Exchange>());
  Vec16* out[2] = {reinterpret_cast<Vec16*>(device_words(kN * 4)), nullptr};
  GOOD(set_device(1));
  GOOD(load_kernel<Exchange>());
  GOOD(stream_create(&s[1]));
  out[1] = reinterpret_cast<Vec16*>(device_words(kN * 4));
  for (uint32_t epoch = 1; epoch <= 3; epoch++) {
    for (int r = 0; r < 2; r++) {
      GOOD(set_device(r));
      GOOD(launch(Exchange{area + r * kN,
                           area + (1 - r) * kN,
                           flags + 32 * r,
                           flags + 32 * (1 - r),
                           out[r],
                           kN,
                           1000u * epoch + static_cast<uint32_t>(r),
                           epoch,
                           {abort(), 60 * kSecond}},
                  1, 128, s[r]));
    }
    for (int r = 0; r < 2; r++) GOOD(stream_synchronize(s[r]));
    for (int r = 0; r < 2; r++) {
      std::vector<Vec16> got(kN);
      GOOD(copy_blocking(got.data(), out[r], kN * 16, CopyKind::device_to_host));
      const uint32_t v = 1000u * epoch + static_cast<uint32_t>(1 - r);
      for (int64_t i = 0; i < kN; i++) {
        ASSERT_EQ(v + static_cast<uint32_t>(i), got[i].w[0]);
        ASSERT_EQ(v ^ static_cast<uint32_t>(i), got[i].w[1]);
        ASSERT_EQ(v, got[i].w[3]);
      }
    }
  }
  GOOD(stream_destroy(s[1]));
}

TEST_P(Conformance, DevicesAndStreamsMustFit) {
  NEEDS(2);
  Stream other{};
  Event there{};
  GOOD(set_device(1));
  GOOD(stream_create(&other));
  GOOD(event_create(&there, false));
  GOOD(set_device(0));
  EXPECT_EQ(400, event_record(e_, other));
  GOOD(event_record(there, other));  // whatever device is current
  GOOD(stream_wait(a_, there));
  GOOD(copy_async(words_, pinned_, 4, CopyKind::host_to_device, other));
  GOOD(fill_async(words_ + 1, 1, 4, a_));
  GOOD(stream_synchronize(other));
  GOOD(stream_synchronize(a_));
  GOOD(event_destroy(there));
  GOOD(stream_destroy(other));
}

// ---- arithmetic -------------------------------------------------------------------------------------------------

float as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
uint32_t as_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
// Independent of the platform's: by value, not by bits.
float half_value(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  if (e == 31) return m ? as_float(0x7fffffff) : as_float((h & 0x8000u) << 16 | 0x7f800000u);
  const double v = e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
  return static_cast<float>(h & 0x8000 ? -v : v);
}

TEST_P(Conformance, HalfConversionsAreExact) {
  NEEDS(1);
  std::vector<float> in;
  std::vector<uint16_t> expected;
  const auto put = [&](double v, uint16_t h) {
    in.push_back(static_cast<float>(v));
    expected.push_back(h);
    in.push_back(static_cast<float>(-v));
    expected.push_back(static_cast<uint16_t>(h | 0x8000));
  };
  for (uint32_t h = 0; h <= 0x7c00; h++) {
    const double v = h == 0x7c00 ? 65536.0 : half_value(static_cast<uint16_t>(h));
    const double next = h + 1 >= 0x7c00 ? 65536.0 : half_value(static_cast<uint16_t>(h + 1));
    put(v, static_cast<uint16_t>(h));
    if (h == 0x7c00) break;
    const float middle = static_cast<float>((v + next) / 2);  // exact in single precision
    put(middle, static_cast<uint16_t>(h & 1 ? h + 1 : h));
    put(std::nextafterf(middle, 0.0f), static_cast<uint16_t>(h));
    put(std::nextafterf(middle, 1e30f), static_cast<uint16_t>(h + 1));
  }
  put(as_float(0x7f800000), 0x7c00);
  put(as_float(1), 0);
  for (uint32_t nan : {0x7f800001u, 0x7fc00000u, 0xffffffffu}) {
    in.push_back(as_float(nan));
    expected.push_back(0x7fff);
  }
  const int64_t n = static_cast<int64_t>(in.size());
  float* floats = reinterpret_cast<float*>(device_words(in.size()));
  uint16_t* halves = reinterpret_cast<uint16_t*>(device_words(in.size()));
  float* back = reinterpret_cast<float*>(device_words(65536));
  GOOD(copy_blocking(floats, in.data(), in.size() * 4, CopyKind::host_to_device));
  GOOD(launch(Halves{floats, halves, back, n}, 1, 256, a_));
  GOOD(stream_synchronize(a_));
  std::vector<uint16_t> got(in.size());
  std::vector<uint32_t> got_back(65536);
  GOOD(copy_blocking(got.data(), halves, got.size() * 2, CopyKind::device_to_host));
  GOOD(copy_blocking(got_back.data(), back, 65536 * 4, CopyKind::device_to_host));
  for (size_t i = 0; i < in.size(); i++) ASSERT_EQ(expected[i], got[i]) << in[i];
  for (uint32_t h = 0; h < 65536; h++) ASSERT_EQ(as_bits(half_value(static_cast<uint16_t>(h))), got_back[h]) << h;
}

TEST_P(Conformance, ArithmeticIsIeee) {
  NEEDS(1);
  std::vector<float> x, y;
  uint64_t z = 1;
  for (int i = 0; i < 20000; i++) {
    z = z * 6364136223846793005ull + 1442695040888963407ull;
    x.push_back(as_float(static_cast<uint32_t>(z >> 32)));
    z = z * 6364136223846793005ull + 1442695040888963407ull;
    y.push_back(as_float(static_cast<uint32_t>(z >> 32)));
  }
  const size_t n = x.size();
  float* d = reinterpret_cast<float*>(device_words(n * 4));
  GOOD(copy_blocking(d, x.data(), n * 4, CopyKind::host_to_device));
  GOOD(copy_blocking(d + n, y.data(), n * 4, CopyKind::host_to_device));
  GOOD(launch(Arithmetic{d, d + n, d + 2 * n, d + 3 * n, static_cast<int64_t>(n)}, 1, 256, a_));
  GOOD(stream_synchronize(a_));
  std::vector<float> got(2 * n);
  GOOD(copy_blocking(got.data(), d + 2 * n, n * 8, CopyKind::device_to_host));
  for (size_t i = 0; i < n; i++) {
    const float sum = x[i] + y[i], quotient = x[i] / y[i];
    if (std::isnan(sum))
      ASSERT_TRUE(std::isnan(got[i]));
    else
      ASSERT_EQ(as_bits(sum), as_bits(got[i])) << x[i] << " + " << y[i];
    if (std::isnan(quotient))
      ASSERT_TRUE(std::isnan(got[n + i]));
    else
      ASSERT_EQ(as_bits(quotient), as_bits(got[n + i])) << x[i] << " / " << y[i];
  }
}

}  // namespace
