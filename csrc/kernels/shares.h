// What the kernels that exchange shares through flags have in common: exchange.h (through pinned host memory) and push.h
// (into the peers' own memory). A payload is handled in rounds; in a round every block has one share, the same range on
// every rank, and exchanges it with the block of the same number on every peer only.
#pragma once

#include "sign.h"
#include "types.h"

namespace AR_NS {

constexpr int kMaxRanks = AR_MAX_RANKS;
constexpr int kMaxBlocks = 128;
constexpr int kExchangeThreads = 512;
constexpr uint32_t kScrub = 1u << 20;
// Loads in flight per thread and peer. With 16-bit wires four would spill registers.
template <class W>
constexpr int kInFlight = sizeof(typename W::Bits) == 4 ? 4 : 2;
constexpr int kFlagStride = 128 / sizeof(uint32_t);  // a flag has a 128-byte line of its own

// What an expired wait leaves behind, one Vec16 per block: {phase | peer << 8, awaited, seen, call}.
enum class Phase : uint32_t {
  none = 0,
  internal_data = 1,
  internal_flag = 2,
  peer_data = 3,
  peer_flag = 4,
  peer_scatter = 5,
  peer_gather = 6,
  told = 7
};

// The primitives of one flag: a fence between payload and flag, the flag, the wait, a fence between flag and payload.
struct FlagOrders {
  Order fence, flag, wait, wait_fence;
};

template <class T, class W>
struct Shares {
  static constexpr int kMaxThreads = kExchangeThreads;

  // The ranks this launch serves: all of this device.
  struct Local {
    View send, recv;
    uint32_t* epochs;  // blocks of them
    Vec16* records;    // blocks of them
    Signature signature;
    int rank;
    int absent;
  };

  Local local[kMaxRanks];
  // All rounds but the last hold blocks * share elements. The host divides, once: a 64-bit division costs a tenth of a
  // microsecond here.
  int64_t count;
  int64_t share, last_share;  // elements of one block in a full round and in the last
  int rounds;
  int world;
  int locals;
  int blocks;        // that take part, per rank
  uint32_t* abort;   // this process's abort word
  uint32_t* aborts;  // those of all processes, 128 bytes apart
  int abort_words;
  uint64_t timeout_ns;
  Finish finish_;
  uint32_t call;

  AR_DEVICE SpinLimit limit() const { return {abort, timeout_ns}; }

  AR_DEVICE void expire(Block& b, const Local& me, int block, Phase phase, int peer, uint32_t awaited,
                        uint32_t seen) const {
    const Vec16 record = {{static_cast<uint32_t>(phase) | static_cast<uint32_t>(peer) << 8, awaited, seen, call}};
    store_sys(b, me.records + block, record);
    AR_NO_UNROLL
    for (int p = 0; p < abort_words; p++) store_flag(b, Order::none, aborts + p * kFlagStride, 1);
  }

  // Elements [lo, hi) of a block's share in round i; false where it has none.
  AR_DEVICE bool range(int i, int block, int64_t* lo, int64_t* hi) const {
    const int64_t mine = i + 1 < rounds ? share : last_share;
    *lo = i * (blocks * share) + block * mine;
    *hi = *lo + mine < count ? *lo + mine : count;
    return *lo < count;
  }

  // The own part of one pack, as the peers see it.
  template <int K>
  AR_DEVICE void own(const Local& me, int64_t first, int64_t end, float* v) const {
    if (me.absent) {
      AR_UNROLL
      for (int k = 0; k < K; k++) v[k] = 0.0f;
    } else {
      load_elements<T, K>(me.send, first, end, v);
    }
  }

  // ---- small: LL words, {data, flag, data, flag} -----------------------------------------------------------------

  // Stores elements [lo, hi) to every place that to(k), k < targets, gives; then sums what from(rank) holds of the peers.
  template <class To, class From>
  AR_DEVICE bool ll_share(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch, int64_t bytes,
                          Order wait, Phase phase, int targets, To to, From from) const {
    constexpr int K = 8 / sizeof(typename W::Bits);
    const int64_t packs = (hi - lo + K - 1) / K;

    if (!me.absent) declare<T>(b, me.send, lo, hi, false);
    AR_NO_UNROLL
    for (int k = 0; k < targets; k++) b.writes(to(k), packs * 16);
    b.each(packs, [&](int64_t i) {
      float v[K];
      uint32_t w[2];
      own<K>(me, lo + i * K, hi, v);
      pack<W, K>(v, w);
      AR_NO_UNROLL
      for (int k = 0; k < targets; k++) store_sys(b, to(k) + i, Vec16{{w[0], epoch, w[1], epoch}});
    });
    if ((epoch & (kScrub - 1)) < 2) {
      const int64_t rest = bytes / 16 - packs;
      AR_NO_UNROLL
      for (int k = 0; k < targets; k++) {
        b.writes(to(k) + packs, rest * 16);
        b.each(rest, [&](int64_t i) { store_sys(b, to(k) + packs + i, Vec16{{0, epoch, 0, epoch}}); });
      }
    }

    bool good = true;
    b.each(packs, [&](int64_t i) {
      if (!good) return;
      float acc[K];
      AR_NO_UNROLL
      for (int r = 0; r < world; r++) {
        float v[K];
        if (r == me.rank) {
          own<K>(me, lo + i * K, hi, v);
          through_wire<W, K>(v);
        } else {
          const Vec16* p = from(r) + i;
          Vec16 w;
          const Spin s = spin(b, wait, limit(), p, [&] {
            w = load_sys(b, p);
            return w.w[1] == epoch && w.w[3] == epoch;
          });
          if (s != Spin::ready) {
            if (s == Spin::expired) expire(b, me, block, phase, r, epoch, w.w[1]);
            good = false;
            return;
          }
          const uint32_t words[2] = {w.w[0], w.w[2]};
          unpack<W, K>(words, v);
        }
        AR_UNROLL
        for (int k = 0; k < K; k++) acc[k] = r == 0 ? v[k] : add_rn(acc[k], v[k]);
      }
      finish<W, K>(finish_, acc);
      store_elements<T, K>(me.recv, lo + i * K, hi, acc);
    });
    AR_NO_UNROLL
    for (int r = 0; r < world && good; r++)
      if (r != me.rank) b.reads_flagged(from(r), packs * 16);
    declare<T>(b, me.recv, lo, hi, true);
    return !b.any(!good);
  }

  // ---- large: plain stores, one flag a block ---------------------------------------------------------------------

  // Stores elements [lo, hi) as wire values to every place that to(k), k < targets, gives.
  template <class To>
  AR_DEVICE void put(Block& b, const Local& me, int64_t lo, int64_t hi, int targets, To to) const {
    constexpr int K = kPerVec<W>;
    const int64_t packs = (hi - lo + K - 1) / K;
    if (packs <= 0) return;
    if (!me.absent) declare<T>(b, me.send, lo, hi, false);
    AR_NO_UNROLL
    for (int k = 0; k < targets; k++) b.writes(to(k), packs * 16);
    b.template groups<kInFlight<W>>(packs, [&](int i, auto each) {
      Vec16 w[kInFlight<W>];
      each([&](int u, int at) {
        float v[K];
        own<K>(me, lo + (i + at) * K, hi, v);
        pack<W, K>(v, w[u].w);
      });
      AR_NO_UNROLL
      for (int k = 0; k < targets; k++) each([&](int u, int at) { store_sys(b, to(k) + i + at, w[u]); });
    });
  }

  // Raises the flags flag(k), k < targets, behind everything the block has stored.
  template <class Flag>
  AR_DEVICE void raise(Block& b, const FlagOrders& orders, uint32_t epoch, int targets, Flag flag) const {
    b.sync();
    b.lead([&] {
      fence_sys(b, orders.fence);
      AR_NO_UNROLL
      for (int k = 0; k < targets; k++) store_flag(b, orders.flag, flag(k), epoch);
    });
  }

  // Waits for the flag(r) of every peer; what was stored before them may be read then.
  template <class Flag>
  AR_DEVICE bool await_flags(Block& b, const FlagOrders& orders, const Local& me, int block, uint32_t epoch,
                             Phase phase, Flag flag) const {
    bool good = true;
    b.each(world, [&](int64_t r) {
      if (r == me.rank) return;
      const uint32_t* p = flag(static_cast<int>(r));
      uint32_t seen = 0;
      const Spin s = spin(b, orders.wait, limit(), p, [&] {
        seen = load_flag(b, p);
        return static_cast<int32_t>(seen - epoch) >= 0;
      });
      if (s == Spin::ready) {
        fence_sys(b, orders.wait_fence);
        return;
      }
      if (s == Spin::expired) expire(b, me, block, phase, static_cast<int>(r), epoch, seen);
      good = false;
    });
    return !b.any(!good);
  }

  // Sums the packs i that each_of hands out, at most U of them: loads from host memory take over a microsecond, so
  // as many are in flight. The first peer's are asked for before the own part, which comes from device memory. from(r)
  // holds pack 0 of rank r; the total of pack i goes to out(i, total). beside(first, each) is run while the loads are on
  // their way.
  template <int U, int K, class From, class Out, class Each, class Beside>
  AR_DEVICE void sum_packs(Block& b, const Local& me, int64_t lo, int64_t hi, int first, Each each, From from, Out out,
                           Beside beside) const {
    Vec16 w[U], mine[U];
    float acc[U][K];
    const int first_peer = me.rank == 0 ? 1 : 0;
    each([&](int u, int i) { w[u] = load_sys(b, from(first_peer) + first + i); });
    beside(first, each);
    each([&](int u, int i) {
      float v[K];
      own<K>(me, lo + (first + i) * K, hi, v);
      pack<W, K>(v, mine[u].w);
    });
    AR_NO_UNROLL
    for (int r = 0; r < world; r++) {
      if (r != me.rank && r != first_peer) each([&](int u, int i) { w[u] = load_sys(b, from(r) + first + i); });
      each([&](int u, int) {
        float v[K];
        const Vec16 x = r == me.rank ? mine[u] : w[u];
        unpack<W, K>(x.w, v);
        AR_UNROLL
        for (int k = 0; k < K; k++) acc[u][k] = r == 0 ? v[k] : add_rn(acc[u][k], v[k]);
      });
    }
    each([&](int u, int i) {
      finish<W, K>(finish_, acc[u]);
      out(first + i, acc[u]);
    });
  }

  // Sums elements [lo, hi), of which from(r) holds rank r's wire values; totals go to recv, and each pack to out as well.
  template <int U = kInFlight<W>, class From, class Out>
  AR_DEVICE void sum_share(Block& b, const Local& me, int64_t lo, int64_t hi, From from, Out out) const {
    sum_share<U>(b, me, lo, hi, from, out, [](int, auto) {});
  }
  template <int U = kInFlight<W>, class From, class Out, class Beside>
  AR_DEVICE void sum_share(Block& b, const Local& me, int64_t lo, int64_t hi, From from, Out out, Beside beside) const {
    constexpr int K = kPerVec<W>;
    const int64_t packs = (hi - lo + K - 1) / K;
    if (packs <= 0) return;
    AR_NO_UNROLL
    for (int r = 0; r < world; r++)
      if (r != me.rank) b.reads(from(r), packs * 16);
    declare<T>(b, me.recv, lo, hi, true);
    b.template groups<U>(packs, [&](int i, auto each) {
      sum_packs<U, K>(
          b, me, lo, hi, i, each, from,
          [&](int at, const float* total) {
            store_elements<T, K>(me.recv, lo + at * K, hi, total);
            out(at, total);
          },
          beside);
    });
  }

  // ---- what a launch does ----------------------------------------------------------------------------------------

  // Runs work(me, block, epoch) for the rank and block that b is; it returns the block's epoch afterwards, and ends with a
  // block barrier: then all threads have read the old one.
  template <class Work>
  AR_DEVICE void run(Block& b, Work work) const {
    b.begin();
    const int l = locals == 1 ? 0 : b.index() / blocks;
    const Local& me = local[l];
    const int block = b.index() - l * blocks;
    if (me.signature.lines != nullptr && block == 0) b.lead([&] { me.signature.leave(b); });
    b.reads(me.epochs + block, sizeof(uint32_t));
    const uint32_t epoch = work(me, block, me.epochs[block]);
    b.writes(me.epochs + block, sizeof(uint32_t));
    b.lead([&] { me.epochs[block] = epoch; });
  }
};

}  // namespace AR_NS
