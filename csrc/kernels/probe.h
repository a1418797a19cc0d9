// The kernels that prove peer access (probe.cpp): stores, loads and a flagged exchange of messages, each with a pattern that
// depends on the place, so that a byte that is missing, late or elsewhere shows.
#pragma once

#include "types.h"

namespace AR_NS {

constexpr int kProbeThreads = 256;
constexpr int kProbeBlocks = 32;

// Word i of a pattern.
AR_HOST_DEVICE uint32_t probe_word(uint32_t seed, int64_t i) {
  uint32_t x = seed * 0x9E3779B9u + static_cast<uint32_t>(i) * 0x85EBCA6Bu + 1u;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}
AR_HOST_DEVICE Vec16 probe_vec(uint32_t seed, int64_t i) {
  return {
      {probe_word(seed, 4 * i), probe_word(seed, 4 * i + 1), probe_word(seed, 4 * i + 2), probe_word(seed, 4 * i + 3)}};
}

// A block's share of n.
struct ProbeShare {
  int64_t lo, n;
  AR_DEVICE ProbeShare(const Block& b, int64_t total) {
    const int64_t share = (total + b.count() - 1) / b.count();
    lo = b.index() * share;
    n = total - lo < share ? total - lo : share;
  }
};

// Stores words [first, first + words) of a pattern, one by one or 16 bytes at once (then both are multiples of 4).
struct ProbeStore {
  static constexpr const char* kName = "probe store";
  static constexpr int kMaxThreads = kProbeThreads;
  static constexpr bool kTalks = false;
  uint32_t* to;
  int64_t first, words;
  uint32_t seed;
  int wide;

  AR_DEVICE void operator()(Block& b) const {
    const int per = wide ? 4 : 1;
    const ProbeShare mine(b, words / per);
    if (mine.n <= 0) return;
    const int64_t from = first + mine.lo * per;
    b.writes(to + from, mine.n * per * 4);
    if (wide)
      b.each(mine.n,
             [&](int64_t i) { store_sys(b, reinterpret_cast<Vec16*>(to + from) + i, probe_vec(seed, from / 4 + i)); });
    else
      b.each(mine.n, [&](int64_t i) { store_flag(b, Order::none, to + from + i, probe_word(seed, from + i)); });
  }
};

// What a thread found wrong: how many words, and the first.
struct ProbeFound {
  uint32_t bad = 0, at = 0, got = 0, want = 0;
  AR_DEVICE void compare(uint32_t seen, uint32_t due, int64_t i) {
    if (seen == due) return;
    if (bad++ != 0) return;
    at = static_cast<uint32_t>(i);
    got = seen;
    want = due;
  }
  AR_DEVICE Vec16 record() const { return {{bad, at, got, want}}; }
  // Of all threads' records.
  void add(const Vec16& v) {
    if (v.w[0] == 0) return;
    if (bad == 0 || v.w[1] < at) at = v.w[1], got = v.w[2], want = v.w[3];
    bad += v.w[0];
  }
};

// Compares words [0, words) with what they must hold: bytes [lo, hi) are the pattern of `inside`, the others that of
// `outside`. Loads pass by every cache. One record per thread: no atomics.
struct ProbeCheck {
  static constexpr const char* kName = "probe check";
  static constexpr int kMaxThreads = kProbeThreads;
  static constexpr bool kTalks = false;
  const Vec16* from;
  int64_t words;  // a multiple of 4
  int64_t lo, hi;
  uint32_t inside, outside;
  Vec16* found;  // blocks * kProbeThreads

  AR_DEVICE uint32_t due(int64_t i) const {
    const uint32_t in = probe_word(inside, i), out = probe_word(outside, i);
    uint32_t mask = 0;
    for (int k = 0; k < 4; k++)
      if (4 * i + k >= lo && 4 * i + k < hi) mask |= 0xFFu << (8 * k);
    return (in & mask) | (out & ~mask);
  }
  AR_DEVICE void operator()(Block& b) const {
    const ProbeShare mine(b, words / 4);
    Vec16* const out = found + static_cast<int64_t>(b.index()) * kProbeThreads;
    b.writes(out, kProbeThreads * 16);
    if (mine.n > 0) b.reads(from + mine.lo, mine.n * 16);
    b.each(kProbeThreads, [&](int64_t t) {
      ProbeFound f;
      for (int64_t i = mine.lo + t; i < mine.lo + mine.n; i += kProbeThreads) {
        const Vec16 v = load_sys(b, from + i);
        for (int k = 0; k < 4; k++) f.compare(v.w[k], due(4 * i + k), 4 * i + k);
      }
      out[t] = f.record();
    });
  }
};

// One side of an exchange of messages, one block: the sender stores a payload and raises a flag behind it, the receiver
// checks the payload as soon as it sees the flag, and acknowledges. Where slots and flag lie is what is on trial.
constexpr int kTalkVecs = 256;
struct ProbeTalk {
  static constexpr const char* kName = "probe talk";
  static constexpr int kMaxThreads = kProbeThreads;
  Vec16* slots;    // two of kTalkVecs
  uint32_t* flag;  // the sender's
  uint32_t* ack;   // the receiver's, in pinned memory
  Vec16* found;    // kProbeThreads, the receiver's, and the message that never came in record kProbeThreads
  SpinLimit limit;
  int messages;
  uint32_t seed;
  int sender;

  AR_DEVICE bool await(Block& b, const uint32_t* p, uint32_t m) const {
    bool good = true;
    b.lead([&] {
      good = spin(b, Order::none, limit, p, [&] { return load_flag(b, p) == m; }) == Spin::ready;
      if (good) fence_sys(b, Order::none);
    });
    return !b.any(!good);
  }
  AR_DEVICE void raise(Block& b, uint32_t* p, uint32_t m) const {
    b.sync();
    b.lead([&] {
      fence_sys(b, Order::none);
      store_flag(b, Order::none, p, m);
    });
  }
  AR_DEVICE void operator()(Block& b) const {
    if (!sender) {
      b.writes(found, (kProbeThreads + 1) * 16);
      b.each(kProbeThreads + 1, [&](int64_t t) { found[t] = ProbeFound().record(); });
      b.sync();
    }
    for (int m = 1; m <= messages; m++) {
      const uint32_t word = static_cast<uint32_t>(m);
      Vec16* const slot = slots + (m & 1) * kTalkVecs;
      if (sender) {
        b.writes(slot, kTalkVecs * 16);
        b.each(kTalkVecs, [&](int64_t i) { store_sys(b, slot + i, probe_vec(seed + word, i)); });
        raise(b, flag, word);
        if (!await(b, ack, word)) return;
        continue;
      }
      if (!await(b, flag, word)) {
        b.lead([&] { found[kProbeThreads] = {{1, word, 0, 0}}; });
        return;
      }
      b.reads(slot, kTalkVecs * 16);
      b.each(kTalkVecs, [&](int64_t i) {
        ProbeFound f;
        const Vec16 v = load_sys(b, slot + i);
        const Vec16 want = probe_vec(seed + word, i);
        for (int k = 0; k < 4; k++)
          f.compare(v.w[k], want.w[k], static_cast<int64_t>(word) * kTalkVecs * 4 + 4 * i + k);
        Vec16& mine = found[i % kProbeThreads];
        if (f.bad != 0 && mine.w[0] == 0) mine = f.record();
      });
      raise(b, ack, word);
    }
  }
};

}  // namespace AR_NS
