// The exchange kernel of the `internal` path: one launch per GPU stores this rank's wire values to pinned host memory,
// waits for its peers' and sums.
//
// Protocol. A payload is handled in rounds of what one slot holds; in a round every block has one share, the same
// range on every rank, and exchanges it with the block of the same number on every peer only. So everything below is said
// of one block number.
//   - An epoch is the block's own count of shares, kept in device memory and advanced by the kernel: a captured launch
//     replays with new epochs. A block without a share in a round does not count it; shares depend on what all ranks have
//     equal (count, type, wire), so the counts agree.
//   - Two slots alternate by the epoch's lowest bit. Writing epoch e overwrites e-2. That is safe: this block has e-1 from
//     every peer, and a peer stored e-1 only after its reads of e-2 (data-dependent loads, then a block barrier or the end
//     of the launch before the next store).
//   - Small (LL): 16-byte stores of {data, flag, data, flag}. Each 8-byte half carries its own flag, the platform keeps
//     aligned 8 bytes whole, so data and flag cannot part and no fence is needed.
//   - Large (plain): 16-byte stores, block barrier, one system fence, one flag per block on a line of its own; the reader
//     polls the flag, a fence and a block barrier, then loads past every cache. 64 KiB on the wire is where the doubled
//     bytes of LL cost more than the fence and the second trip.
//   - Flags are compared for equality (LL) or by signed difference (plain), so they may wrap. An LL word that was not
//     written for 2^32 epochs could be taken for new: every kScrub epochs a block writes its whole slot.
//   - LL words and plain payload have regions of their own: a payload may look like a flag.
// Every wait has a deadline from its own start and looks at the abort word; a block that expires leaves a record.
#pragma once

#include "sign.h"
#include "types.h"

namespace AR_NS {

constexpr int kMaxRanks = AR_MAX_RANKS;
constexpr int kMaxBlocks = 64;
constexpr int kExchangeThreads = 512;
constexpr uint32_t kScrub = 1u << 20;
// Loads in flight per thread and peer. With 16-bit wires four would spill registers.
template <class W>
constexpr int kInFlight = sizeof(typename W::Bits) == 4 ? 4 : 2;

// What an expired wait leaves behind, one Vec16 per block: {phase | peer << 8, awaited, seen, call}.
enum class Phase : uint32_t { none = 0, internal_data = 1, internal_flag = 2, told = 3 };

// One rank's pinned memory, by its device-visible addresses. Regions are cut into kMaxBlocks-independent shares: block b's
// slot s starts at (s * blocks + b) * bytes per block.
struct Wire {
  char* ll;
  char* plain;
  uint32_t* flags;  // one 128-byte line a block
};
constexpr int kFlagStride = 128 / sizeof(uint32_t);

template <class T, class W>
struct Exchange {
  static constexpr const char* kName = "exchange";
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
  Wire wire[kMaxRanks];
  // All rounds but the last hold blocks * share elements. The host divides, once: a 64-bit division costs a tenth of a
  // microsecond here.
  int64_t count;
  int64_t share, last_share;  // elements of one block in a full round and in the last
  int rounds;
  int64_t ll_bytes;  // of one block's slot
  int64_t plain_bytes;
  uint32_t* abort;   // this process's abort word
  uint32_t* aborts;  // those of all processes, 128 bytes apart
  uint64_t timeout_ns;
  Finish finish_;
  int world;
  int locals;
  int blocks;       // that take part, per rank
  int slot_blocks;  // that the regions are cut for
  int ll;
  int abort_words;
  uint32_t call;

  AR_DEVICE SpinLimit limit() const { return {abort, timeout_ns}; }

  AR_DEVICE void expire(Block& b, const Local& me, int block, Phase phase, int peer, uint32_t awaited,
                        uint32_t seen) const {
    const Vec16 record = {{static_cast<uint32_t>(phase) | static_cast<uint32_t>(peer) << 8, awaited, seen, call}};
    store_sys(b, me.records + block, record);
    AR_NO_UNROLL
    for (int p = 0; p < abort_words; p++) store_flag(b, Order::none, aborts + p * kFlagStride, 1);
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

  AR_DEVICE bool small_share(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch) const {
    constexpr int K = 8 / sizeof(typename W::Bits);
    const int64_t packs = (hi - lo + K - 1) / K;
    const int64_t slot = slot_turn(Order::internal_slot, epoch & 1u);
    const int64_t at = (slot * slot_blocks + block) * ll_bytes;
    Vec16* mine = reinterpret_cast<Vec16*>(wire[me.rank].ll + at);

    if (!me.absent) declare<T>(b, me.send, lo, hi, false);
    b.writes(mine, packs * 16);
    b.each(packs, [&](int64_t i) {
      float v[K];
      uint32_t w[2];
      own<K>(me, lo + i * K, hi, v);
      pack<W, K>(v, w);
      store_sys(b, mine + i, Vec16{{w[0], epoch, w[1], epoch}});
    });
    if ((epoch & (kScrub - 1)) < 2) {
      const int64_t rest = ll_bytes / 16 - packs;
      b.writes(mine + packs, rest * 16);
      b.each(rest, [&](int64_t i) { store_sys(b, mine + packs + i, Vec16{{0, epoch, 0, epoch}}); });
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
          const Vec16* p = reinterpret_cast<const Vec16*>(wire[r].ll + at) + i;
          Vec16 w;
          const Spin s = spin(b, Order::internal_ll_wait, limit(), p, [&] {
            w = load_sys(b, p);
            return w.w[1] == epoch && w.w[3] == epoch;
          });
          if (s != Spin::ready) {
            if (s == Spin::expired) expire(b, me, block, Phase::internal_data, r, epoch, w.w[1]);
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
      if (r != me.rank) b.reads_flagged(wire[r].ll + at, packs * 16);
    declare<T>(b, me.recv, lo, hi, true);
    return !b.any(!good);
  }

  // Sums the packs i that each_of hands out, at most kInFlight of them: loads from host memory take over a microsecond, so
  // as many are in flight. The first peer's are asked for before the own part, which comes from device memory.
  template <int K, class Each>
  AR_DEVICE void sum_packs(Block& b, const Local& me, int64_t at, int64_t lo, int64_t hi, int64_t first,
                           Each each) const {
    Vec16 w[kInFlight<W>], mine[kInFlight<W>];
    float acc[kInFlight<W>][K];
    const int first_peer = me.rank == 0 ? 1 : 0;
    each([&](int u, int64_t i) {
      w[u] = load_sys(b, reinterpret_cast<const Vec16*>(wire[first_peer].plain + at) + first + i);
    });
    each([&](int u, int64_t i) {
      float v[K];
      own<K>(me, lo + (first + i) * K, hi, v);
      pack<W, K>(v, mine[u].w);
    });
    AR_NO_UNROLL
    for (int r = 0; r < world; r++) {
      if (r != me.rank && r != first_peer)
        each([&](int u, int64_t i) {
          w[u] = load_sys(b, reinterpret_cast<const Vec16*>(wire[r].plain + at) + first + i);
        });
      each([&](int u, int64_t) {
        float v[K];
        const Vec16 x = r == me.rank ? mine[u] : w[u];
        unpack<W, K>(x.w, v);
        AR_UNROLL
        for (int k = 0; k < K; k++) acc[u][k] = r == 0 ? v[k] : add_rn(acc[u][k], v[k]);
      });
    }
    each([&](int u, int64_t i) {
      finish<W, K>(finish_, acc[u]);
      store_elements<T, K>(me.recv, lo + (first + i) * K, hi, acc[u]);
    });
  }

  AR_DEVICE bool large_share(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch) const {
    constexpr int K = kPerVec<W>;
    const int64_t packs = (hi - lo + K - 1) / K;
    const int64_t slot = slot_turn(Order::internal_slot, epoch & 1u);
    const int64_t at = (slot * slot_blocks + block) * plain_bytes;
    Vec16* mine = reinterpret_cast<Vec16*>(wire[me.rank].plain + at);

    if (!me.absent) declare<T>(b, me.send, lo, hi, false);
    b.writes(mine, packs * 16);
    b.each(packs, [&](int64_t i) {
      float v[K];
      Vec16 w;
      own<K>(me, lo + i * K, hi, v);
      pack<W, K>(v, w.w);
      store_sys(b, mine + i, w);
    });
    b.sync();
    b.lead([&] {
      fence_sys(b, Order::internal_fence);
      store_flag(b, Order::internal_flag, wire[me.rank].flags + block * kFlagStride, epoch);
    });

    bool good = true;
    b.each(world, [&](int64_t r) {
      if (r == me.rank) return;
      const uint32_t* flag = wire[r].flags + block * kFlagStride;
      uint32_t seen = 0;
      const Spin s = spin(b, Order::internal_wait, limit(), flag, [&] {
        seen = load_flag(b, flag);
        return static_cast<int32_t>(seen - epoch) >= 0;
      });
      if (s == Spin::ready) {
        fence_sys(b, Order::internal_wait_fence);
        return;
      }
      if (s == Spin::expired) expire(b, me, block, Phase::internal_flag, static_cast<int>(r), epoch, seen);
      good = false;
    });
    if (b.any(!good)) return false;

    AR_NO_UNROLL
    for (int r = 0; r < world; r++)
      if (r != me.rank) b.reads(wire[r].plain + at, packs * 16);
    declare<T>(b, me.recv, lo, hi, true);
    b.template groups<kInFlight<W>>(packs,
                                    [&](int64_t i, auto each_of) { sum_packs<K>(b, me, at, lo, hi, i, each_of); });
    b.sync();
    return true;
  }

  AR_DEVICE void operator()(Block& b) const {
    b.begin();
    const int l = locals == 1 ? 0 : b.index() / blocks;
    const Local& me = local[l];
    const int block = b.index() - l * blocks;
    b.reads(me.epochs + block, sizeof(uint32_t));
    uint32_t epoch = me.epochs[block];
    int64_t first = 0;
    if (me.signature.lines != nullptr && block == 0) b.lead([&] { me.signature.leave(b); });
    AR_NO_UNROLL
    for (int i = 0; i < rounds; i++) {
      const int64_t mine = i + 1 < rounds ? share : last_share;
      const int64_t lo = first + block * mine;
      if (lo >= count) break;
      const int64_t hi = lo + mine < count ? lo + mine : count;
      first += blocks * mine;
      epoch++;
      const bool good = ll ? small_share(b, me, block, lo, hi, epoch) : large_share(b, me, block, lo, hi, epoch);
      if (!good) break;
    }
    // Every share ended with a block barrier, so all threads have read the old epoch.
    b.writes(me.epochs + block, sizeof(uint32_t));
    b.lead([&] { me.epochs[block] = epoch; });
  }
};

}  // namespace AR_NS
