// Kernels without waiting: tensor to wire values and back, and the sum of a piece (copy-engine, nccl).
#pragma once

#include "types.h"

namespace AR_NS {

constexpr int kPieceThreads = 256;
// They run at memory speed from about this many blocks (two per SM of an H200); more would only be in the way.
constexpr int kPieceBlocks = 264;

// A block's share of elements [first, end), in packs of K: packs [lo, lo + n) from `first` on, which are elements
// [from, to). n is 0 or less where the block has none.
template <int K>
struct PackShare {
  int64_t lo, n, from, to;

  AR_DEVICE PackShare(const Block& b, int64_t first, int64_t end) {
    const int64_t packs = (end - first + K - 1) / K;
    const int64_t share = (packs + b.count() - 1) / b.count();
    lo = b.index() * share;
    n = packs - lo < share ? packs - lo : share;
    from = first + lo * K;
    to = from + n * K < end ? from + n * K : end;
  }
};

// Elements [first, end) of a rank's tensor as contiguous wire values.
template <class T, class W>
struct ToWire {
  static constexpr const char* kName = "convert";
  static constexpr int kMaxThreads = kPieceThreads;
  static constexpr bool kTalks = false;
  View from;
  Vec16* to;
  int64_t first, end;

  AR_DEVICE void operator()(Block& b) const {
    constexpr int K = kPerVec<W>;
    const PackShare<K> mine(b, first, end);
    if (mine.n <= 0) return;
    declare<T>(b, from, mine.from, mine.to, false);
    b.writes(to + mine.lo, mine.n * 16);
    b.each(mine.n, [&](int64_t i) {
      float v[K];
      Vec16 w;
      load_elements<T, K>(from, mine.from + i * K, end, v);
      pack<W, K>(v, w.w);
      to[mine.lo + i] = w;
    });
  }
};

// Contiguous wire values into elements [first, end) of a rank's tensor.
template <class T, class W>
struct FromWire {
  static constexpr const char* kName = "unpack";
  static constexpr int kMaxThreads = kPieceThreads;
  static constexpr bool kTalks = false;
  const Vec16* from;
  View to;
  int64_t first, end;

  AR_DEVICE void operator()(Block& b) const {
    constexpr int K = kPerVec<W>;
    const PackShare<K> mine(b, first, end);
    if (mine.n <= 0) return;
    b.reads(from + mine.lo, mine.n * 16);
    declare<T>(b, to, mine.from, mine.to, true);
    b.each(mine.n, [&](int64_t i) {
      float v[K];
      const Vec16 w = from[mine.lo + i];
      unpack<W, K>(w.w, v);
      store_elements<T, K>(to, mine.from + i * K, end, v);
    });
  }
};

// recv[first, end) = the ranks' wire values, added in rank order in F32. A null peer is absent: it adds +0 in its place.
// kTotal: the total goes to `total` as wire values instead, from element `first` on.
template <class T, class W, bool kTotal = false>
struct SumPiece {
  static constexpr const char* kName = "sum";
  static constexpr int kMaxThreads = kPieceThreads;
  static constexpr bool kTalks = false;
  View send, recv;
  const Vec16* peer[8];
  int64_t first, end;
  Finish finish_;
  int rank, world;
  int absent;
  Vec16* total;

  AR_DEVICE void operator()(Block& b) const {
    constexpr int K = kPerVec<W>;
    const PackShare<K> mine(b, first, end);
    if (mine.n <= 0) return;
    if (!absent) declare<T>(b, send, mine.from, mine.to, false);
    AR_NO_UNROLL
    for (int r = 0; r < world; r++)
      if (r != rank && peer[r] != nullptr) b.reads(peer[r] + mine.lo, mine.n * 16);
    if constexpr (kTotal)
      b.writes(total + mine.lo, mine.n * 16);
    else
      declare<T>(b, recv, mine.from, mine.to, true);
    b.each(mine.n, [&](int64_t i) {
      const int64_t e = mine.from + i * K;
      float acc[K];
      AR_NO_UNROLL
      for (int r = 0; r < world; r++) {
        float v[K];
        if (r == rank && !absent) {
          load_elements<T, K>(send, e, end, v);
          through_wire<W, K>(v);
        } else if (r != rank && peer[r] != nullptr) {
          const Vec16 w = peer[r][mine.lo + i];
          unpack<W, K>(w.w, v);
        } else {
          AR_UNROLL
          for (int k = 0; k < K; k++) v[k] = 0.0f;
        }
        AR_UNROLL
        for (int k = 0; k < K; k++) acc[k] = r == 0 ? v[k] : add_rn(acc[k], v[k]);
      }
      finish<W, K>(finish_, acc);
      if constexpr (kTotal) {
        Vec16 w;
        pack<W, K>(acc, w.w);
        total[mine.lo + i] = w;
      } else {
        store_elements<T, K>(recv, e, end, acc);
      }
    });
  }
};

}  // namespace AR_NS
