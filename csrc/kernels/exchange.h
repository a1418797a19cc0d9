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
//     every peer, and a peer sent e-1 only after its reads of e-2: data-dependent loads, then a block barrier or the end of
//     the launch before the flag. (LL: before the store, which carries its own flag.)
//   - Small (LL): 16-byte stores of {data, flag, data, flag}. Each 8-byte half carries its own flag, the platform keeps
//     aligned 8 bytes whole, so data and flag cannot part and no fence is needed.
//   - Large (plain): 16-byte stores, block barrier, one system fence, one flag per block on a line of its own; the reader
//     polls the flag, a fence and a block barrier, then loads past every cache. 64 KiB on the wire is where the doubled
//     bytes of LL cost more than the fence and the second trip. While a share is read the next one is stored: both directions
//     of the link at once.
//   - Flags are compared for equality (LL) or by signed difference (plain), so they may wrap. An LL word that was not
//     written for 2^32 epochs could be taken for new: every kScrub epochs a block writes its whole slot.
//   - LL words and plain payload have regions of their own: a payload may look like a flag.
// Every wait has a deadline from its own start and looks at the abort word; a block that expires leaves a record.
#pragma once

#include "shares.h"

namespace AR_NS {

// One rank's pinned memory, by its device-visible addresses. Regions are cut into kMaxBlocks-independent shares: block b's
// slot s starts at (s * blocks + b) * bytes per block.
struct Wire {
  char* ll;
  char* plain;
  uint32_t* flags;  // one 128-byte line a block
};

template <class T, class W>
struct Exchange : Shares<T, W> {
  using Base = Shares<T, W>;
  using Local = typename Base::Local;
  static constexpr const char* kName = "exchange";
  AR_DEVICE static FlagOrders flag_orders() {
    return {Order::internal_fence, Order::internal_flag, Order::internal_wait, Order::internal_wait_fence};
  }

  Wire wire[kMaxRanks];
  int64_t ll_bytes;  // of one block's slot
  int64_t plain_bytes;
  int slot_blocks;  // that the regions are cut for
  int ll;

  AR_DEVICE int64_t place(int block, uint32_t epoch, int64_t bytes) const {
    const int64_t slot = slot_turn(Order::internal_slot, epoch & 1u);
    return (slot * slot_blocks + block) * bytes;
  }

  AR_DEVICE bool small_share(Block& b, const Local& me, int block, int64_t lo, int64_t hi, uint32_t epoch) const {
    const int64_t at = place(block, epoch, ll_bytes);
    return this->ll_share(
        b, me, block, lo, hi, epoch, ll_bytes, Order::internal_ll_wait, Phase::internal_data, 1,
        [&](int) { return reinterpret_cast<Vec16*>(wire[me.rank].ll + at); },
        [&](int r) { return reinterpret_cast<const Vec16*>(wire[r].ll + at); });
  }

  AR_DEVICE Vec16* plain(int rank, int block, uint32_t epoch) const {
    return reinterpret_cast<Vec16*>(wire[rank].plain + place(block, epoch, plain_bytes));
  }

  // All shares of a block, from the one behind `epoch` on: the first is stored, then each is read while the next is stored.
  AR_DEVICE uint32_t large_shares(Block& b, const Local& me, int block, uint32_t epoch) const {
    constexpr int K = kPerVec<W>;
    int64_t lo, hi;
    bool more = this->range(0, block, &lo, &hi);
    if (more) {
      Vec16* const to = plain(me.rank, block, epoch + 1);
      this->put(b, me, lo, hi, 1, [&](int) { return to; });
    }
    AR_NO_UNROLL
    for (int i = 0; more; i++) {
      epoch++;
      this->raise(b, flag_orders(), epoch, 1, [&](int) { return wire[me.rank].flags + block * kFlagStride; });
      if (!this->await_flags(b, flag_orders(), me, block, epoch, Phase::internal_flag,
                             [&](int r) { return wire[r].flags + block * kFlagStride; }))
        break;
      int64_t next = 0, end = 0;
      more = i + 1 < this->rounds && this->range(i + 1, block, &next, &end);
      const int64_t packs = more ? (end - next + K - 1) / K : 0;
      Vec16* const to = plain(me.rank, block, epoch + 1);
      if (more) {
        if (!me.absent) declare<T>(b, me.send, next, end, false);
        b.writes(to, packs * 16);
      }
      this->sum_share(
          b, me, lo, hi, [&](int r) -> const Vec16* { return plain(r, block, epoch); }, [](int, const float*) {},
          [&](int first, auto each) {  // one after another: an array of them would spill registers
            each([&](int, int at) {
              if (first + at >= packs) return;
              float v[K];
              Vec16 w;
              this->template own<K>(me, next + (first + at) * K, end, v);
              pack<W, K>(v, w.w);
              store_sys(b, to + first + at, w);
            });
          });
      lo = next;
      hi = end;
    }
    b.sync();
    return epoch;
  }

  AR_DEVICE void operator()(Block& b) const {
    this->run(b, [&](const Local& me, int block, uint32_t epoch) {
      if (!ll) return large_shares(b, me, block, epoch);
      AR_NO_UNROLL
      for (int i = 0; i < this->rounds; i++) {
        int64_t lo, hi;
        if (!this->range(i, block, &lo, &hi)) break;
        epoch++;
        if (!small_share(b, me, block, lo, hi, epoch)) break;
      }
      return epoch;
    });
  }
};

}  // namespace AR_NS
