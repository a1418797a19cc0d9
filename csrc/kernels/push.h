// The kernels of the `peer` path: one launch per GPU pushes this rank's wire values into its peers' rings and polls its own.
//
// Protocol. A ring is device memory of the library's own, one per receiver, with a lane for every sender: ranks write into
// their peers' rings and read only their own, and user tensors are touched by their own rank's kernel alone. Everything
// below is said of one block number: blocks exchange shares with the block of the same number on every peer only.
// Epochs are counted by each block, in device memory, one count for each of the three ways; a captured launch replays.
//   - LL (Push, ll = 1; up to 64 KiB on the wire): as in exchange.h, words that carry their flags, two slots.
//   - One-shot (Push, ll = 0): plain 16-byte stores of the whole share to every peer, one flag per block, then the sum in
//     rank order. Pipelined: share e+1 is pushed before share e is awaited, so the links carry both directions while this
//     block waits and sums. Four slots: when a block pushes e+1 it has e-1 from every peer, which a peer pushed only after
//     it had summed e-3; so e-3's slot is free, and no other is sure to be.
//   - Two-shot (PushTwo; three ranks and more): a share is cut into one part per rank. Scatter: each part goes to its
//     owner. The owner sums it in rank order, rounds once, stores its own part and pushes the total to everyone (gather).
//     Also pipelined by one share. Two slots each are enough: a block scatters e+1 once it has every total of e-1, which
//     owners pushed after reading their scattered parts of e-1; it pushes the total of e once it has every scatter of e,
//     which peers pushed after they had stored the totals of e-2.
// The two ways never share memory or epochs, so calls of all kinds may follow each other.
//
// Memory order (PTX model). A sender's stores are volatile (relaxed, system scope); the block barrier orders all threads'
// stores before thread 0's fence.sys, which is cumulative, and that before its flag store. The reader's volatile poll of the
// flag, its fence.sys and a block barrier order every thread's later loads behind them, so payload stores happen before
// payload loads. Loads of the ring are volatile: they pass by the L1, whose lines remote stores do not invalidate. Reads of a
// slot are over before the flag that frees it, by the same barrier and fence. LL words need neither: aligned 8 bytes travel
// whole on every link this runs on. Flags and LL words wrap as in exchange.h. No atomics, remote or local.
//
// A variant without the ring (peers' registered tensors) and one with copy engines would be further kernels and modes here
// and in transports/peer.cpp; neither is there until measured better.
#pragma once

#include "shares.h"

namespace AR_NS {

constexpr int kOneShotSlots = 4;
constexpr int kTwoShotSlots = 2;
// Flags of a ring: kind, then lane, then block.
enum FlagKind { kFlagOneShot = 0, kFlagScatter = 1, kFlagGather = 2, kFlagKinds = 3 };

// One receiver's ring, by its address on every device.
struct PeerRing {
  char* ll;       // [2 slots][lanes][ll_blocks] of ll_bytes
  char* one;      // [kOneShotSlots][lanes][one_blocks] of one_bytes
  char* scatter;  // [kTwoShotSlots][lanes][two_blocks] of two_bytes, with one part of a share each
  char* gather;   // the same
  uint32_t* flags;
};
struct RingShape {
  int64_t ll_bytes, one_bytes, two_bytes;  // of one block's share in one slot
  int ll_blocks, one_blocks, two_blocks;
};

// A receiver has no lane for itself.
AR_HOST_DEVICE int ring_lane(int receiver, int sender) { return sender < receiver ? sender : sender - 1; }

template <class T, class W>
struct Pushing : Shares<T, W> {
  PeerRing ring[kMaxRanks];
  RingShape shape;

  AR_DEVICE int lanes() const { return this->world - 1; }
  // The kth peer of a rank: the next one first, so that the ranks begin at different links.
  AR_DEVICE int peer(int rank, int k) const {
    const int r = rank + 1 + k;
    return r < this->world ? r : r - this->world;
  }
  AR_DEVICE int64_t place(int receiver, int sender, uint32_t slot, int block, int of_blocks, int64_t bytes) const {
    return ((static_cast<int64_t>(slot) * lanes() + ring_lane(receiver, sender)) * of_blocks + block) * bytes;
  }
  AR_DEVICE uint32_t* flag(FlagKind kind, int receiver, int sender, int block) const {
    return ring[receiver].flags + ((kind * lanes() + ring_lane(receiver, sender)) * kMaxBlocks + block) * kFlagStride;
  }
};

template <class T, class W>
struct Push : Pushing<T, W> {
  using Local = typename Shares<T, W>::Local;
  static constexpr const char* kName = "push";
  AR_DEVICE static FlagOrders flag_orders() {
    return {Order::peer_fence, Order::peer_flag, Order::peer_wait, Order::peer_wait_fence};
  }
  int ll;

  AR_DEVICE Vec16* ll_place(int receiver, int sender, uint32_t slot, int block) const {
    return reinterpret_cast<Vec16*>(this->ring[receiver].ll + this->place(receiver, sender, slot, block,
                                                                          this->shape.ll_blocks, this->shape.ll_bytes));
  }
  AR_DEVICE Vec16* one_place(int receiver, int sender, uint32_t slot, int block) const {
    return reinterpret_cast<Vec16*>(this->ring[receiver].one + this->place(receiver, sender, slot, block,
                                                                           this->shape.one_blocks,
                                                                           this->shape.one_bytes));
  }

  AR_DEVICE bool small_share(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch) const {
    const uint32_t slot = slot_turn(Order::peer_ll_slot, epoch & 1u);
    return this->ll_share(
        b, me, block, lo, hi, epoch, this->shape.ll_bytes, Order::peer_ll_wait, Phase::peer_data, this->lanes(),
        [&](int k) { return ll_place(this->peer(me.rank, k), me.rank, slot, block); },
        [&](int r) -> const Vec16* { return ll_place(me.rank, r, slot, block); });
  }

  AR_DEVICE void send(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch) const {
    const uint32_t slot = slot_turn(Order::peer_slot, epoch & (kOneShotSlots - 1u));
    this->put(b, me, lo, hi, this->lanes(),
              [&](int k) { return one_place(this->peer(me.rank, k), me.rank, slot, block); });
    this->raise(b, flag_orders(), epoch, this->lanes(),
                [&](int k) { return this->flag(kFlagOneShot, this->peer(me.rank, k), me.rank, block); });
  }
  AR_DEVICE bool receive(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch) const {
    if (!this->await_flags(b, flag_orders(), me, block, epoch, Phase::peer_flag,
                           [&](int r) { return this->flag(kFlagOneShot, me.rank, r, block); }))
      return false;
    const uint32_t slot = slot_turn(Order::peer_slot, epoch & (kOneShotSlots - 1u));
    this->sum_share(
        b, me, lo, hi, [&](int r) -> const Vec16* { return one_place(me.rank, r, slot, block); },
        [](int, const float*) {});
    return true;
  }

  AR_DEVICE void operator()(Block& b) const {
    this->run(b, [&](const Local& me, int block, uint32_t epoch) {
      int64_t lo, hi, next_lo = 0, next_hi = 0;
      bool more = this->range(0, block, &lo, &hi);
      if (!ll && more) send(b, me, block, lo, hi, epoch + 1);
      AR_NO_UNROLL
      for (int i = 0; more; i++) {
        epoch++;
        more = i + 1 < this->rounds && this->range(i + 1, block, &next_lo, &next_hi);
        if (ll) {
          if (!small_share(b, me, block, lo, hi, epoch)) break;
        } else {
          if (more) send(b, me, block, next_lo, next_hi, epoch + 1);
          if (!receive(b, me, block, lo, hi, epoch)) break;
        }
        lo = next_lo;
        hi = next_hi;
      }
      b.sync();
      return epoch;
    });
  }
};

template <class T, class W>
struct PushTwo : Pushing<T, W> {
  using Local = typename Shares<T, W>::Local;
  static constexpr const char* kName = "push two-shot";
  AR_DEVICE static FlagOrders scatter_orders() {
    return {Order::peer_scatter_fence, Order::peer_scatter_flag, Order::peer_scatter_wait,
            Order::peer_scatter_wait_fence};
  }
  AR_DEVICE static FlagOrders gather_orders() {
    return {Order::peer_gather_fence, Order::peer_gather_flag, Order::peer_gather_wait, Order::peer_gather_wait_fence};
  }
  int64_t part, last_part;  // elements of a share that one rank owns

  // One share of a block, and what a rank owns of it.
  struct Span {
    int64_t lo, hi, part;
    AR_DEVICE int64_t from(int r) const { return lo + r * part; }
    AR_DEVICE int64_t to(int r) const { return from(r + 1) < hi ? from(r + 1) : hi; }
  };
  AR_DEVICE bool span(int i, int block, Span* s) const {
    s->part = i + 1 < this->rounds ? part : last_part;
    return this->range(i, block, &s->lo, &s->hi);
  }
  AR_DEVICE Vec16* two_place(char* area, int receiver, int sender, uint32_t slot, int block) const {
    return reinterpret_cast<Vec16*>(
        area + this->place(receiver, sender, slot, block, this->shape.two_blocks, this->shape.two_bytes));
  }

  AR_DEVICE void scatter(Block& b, const Local& me, int block, const Span& s, uint32_t epoch) const {
    const uint32_t slot = slot_turn(Order::peer_scatter_slot, epoch & (kTwoShotSlots - 1u));
    AR_NO_UNROLL
    for (int k = 0; k < this->lanes(); k++) {
      const int q = this->peer(me.rank, k);
      this->put(b, me, s.from(q), s.to(q), 1,
                [&](int) { return two_place(this->ring[q].scatter, q, me.rank, slot, block); });
    }
    this->raise(b, scatter_orders(), epoch, this->lanes(),
                [&](int k) { return this->flag(kFlagScatter, this->peer(me.rank, k), me.rank, block); });
  }

  // Sums the own part and pushes the total.
  AR_DEVICE bool reduce(Block& b, const Local& me, int block, const Span& s, uint32_t epoch) const {
    if (!this->await_flags(b, scatter_orders(), me, block, epoch, Phase::peer_scatter,
                           [&](int r) { return this->flag(kFlagScatter, me.rank, r, block); }))
      return false;
    constexpr int K = kPerVec<W>;
    const uint32_t slot = slot_turn(Order::peer_scatter_slot, epoch & (kTwoShotSlots - 1u));
    const uint32_t out = slot_turn(Order::peer_gather_slot, epoch & (kTwoShotSlots - 1u));
    const int64_t packs = (s.to(me.rank) - s.from(me.rank) + K - 1) / K;
    AR_NO_UNROLL
    for (int k = 0; k < this->lanes() && packs > 0; k++) {
      const int q = this->peer(me.rank, k);
      b.writes(two_place(this->ring[q].gather, q, me.rank, out, block), packs * 16);
    }
    this->template sum_share<2>(  // with four F32 packs in flight registers spill
        b, me, s.from(me.rank), s.to(me.rank),
        [&](int r) -> const Vec16* { return two_place(this->ring[me.rank].scatter, me.rank, r, slot, block); },
        [&](int i, const float* total) {
          Vec16 w;
          pack<W, K>(total, w.w);
          AR_NO_UNROLL
          for (int k = 0, q = me.rank; k < this->lanes(); k++) {
            q = q + 1 < this->world ? q + 1 : 0;
            store_sys(b, two_place(this->ring[q].gather, q, me.rank, out, block) + i, w);
          }
        });
    this->raise(b, gather_orders(), epoch, this->lanes(),
                [&](int k) { return this->flag(kFlagGather, this->peer(me.rank, k), me.rank, block); });
    return true;
  }

  AR_DEVICE bool gather(Block& b, const Local& me, int block, const Span& s, uint32_t epoch) const {
    if (!this->await_flags(b, gather_orders(), me, block, epoch, Phase::peer_gather,
                           [&](int r) { return this->flag(kFlagGather, me.rank, r, block); }))
      return false;
    constexpr int K = kPerVec<W>;
    const uint32_t slot = slot_turn(Order::peer_gather_slot, epoch & (kTwoShotSlots - 1u));
    AR_NO_UNROLL
    for (int k = 0; k < this->lanes(); k++) {
      const int q = this->peer(me.rank, k);
      const int64_t lo = s.from(q), hi = s.to(q), packs = (hi - lo + K - 1) / K;
      if (packs <= 0) continue;
      const Vec16* from = two_place(this->ring[me.rank].gather, me.rank, q, slot, block);
      b.reads(from, packs * 16);
      declare<T>(b, me.recv, lo, hi, true);
      b.template groups<kInFlight<W>>(packs, [&](int i, auto each) {
        Vec16 w[kInFlight<W>];
        each([&](int u, int at) { w[u] = load_sys(b, from + i + at); });
        each([&](int u, int at) {
          float v[K];
          unpack<W, K>(w[u].w, v);
          store_elements<T, K>(me.recv, lo + (i + at) * K, hi, v);
        });
      });
    }
    return true;
  }

  AR_DEVICE void operator()(Block& b) const {
    this->run(b, [&](const Local& me, int block, uint32_t epoch) {
      Span now, next = {0, 0, 0};
      bool more = span(0, block, &now);
      if (more) scatter(b, me, block, now, epoch + 1);
      AR_NO_UNROLL
      for (int i = 0; more; i++) {
        epoch++;
        more = i + 1 < this->rounds && span(i + 1, block, &next);
        if (more) scatter(b, me, block, next, epoch + 1);
        if (!reduce(b, me, block, now, epoch) || !gather(b, me, block, now, epoch)) break;
        now = next;
      }
      b.sync();
      return epoch;
    });
  }
};

}  // namespace AR_NS
