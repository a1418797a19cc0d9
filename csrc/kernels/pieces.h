// Kernels without waiting: tensor to wire values and back, and the sum of a piece (copy-engine, nccl).
#pragma once

#include "types.h"

namespace AR_NS {

constexpr int kPieceThreads = 256;
// They run at memory speed from about this many blocks (two per SM of an H200); more would only be in the way.
constexpr int kPieceBlocks = 264;

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
    const int64_t packs = (end - first + K - 1) / K;
    const int64_t share = (packs + b.count() - 1) / b.count();
    const int64_t lo = b.index() * share;
    const int64_t n = packs - lo < share ? packs - lo : share;
    if (n <= 0) return;
    const int64_t most = first + (lo + n) * K;
    declare<T>(b, from, first + lo * K, most < end ? most : end, false);
    b.writes(to + lo, n * 16);
    b.each(n, [&](int64_t i) {
      float v[K];
      Vec16 w;
      load_elements<T, K>(from, first + (lo + i) * K, end, v);
      pack<W, K>(v, w.w);
      to[lo + i] = w;
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
    const int64_t packs = (end - first + K - 1) / K;
    const int64_t share = (packs + b.count() - 1) / b.count();
    const int64_t lo = b.index() * share;
    const int64_t n = packs - lo < share ? packs - lo : share;
    if (n <= 0) return;
    b.reads(from + lo, n * 16);
    const int64_t most = first + (lo + n) * K;
    declare<T>(b, to, first + lo * K, most < end ? most : end, true);
    b.each(n, [&](int64_t i) {
      float v[K];
      const Vec16 w = from[lo + i];
      unpack<W, K>(w.w, v);
      store_elements<T, K>(to, first + (lo + i) * K, end, v);
    });
  }
};

// recv[first, end) = the ranks' wire values, added in rank order in F32. A null peer is absent: it adds +0 in its place.
template <class T, class W>
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

  AR_DEVICE void operator()(Block& b) const {
    constexpr int K = kPerVec<W>;
    const int64_t packs = (end - first + K - 1) / K;
    const int64_t share = (packs + b.count() - 1) / b.count();
    const int64_t lo = b.index() * share;
    const int64_t n = packs - lo < share ? packs - lo : share;
    if (n <= 0) return;
    const int64_t most = first + (lo + n) * K;
    if (!absent) declare<T>(b, send, first + lo * K, most < end ? most : end, false);
    AR_NO_UNROLL
    for (int r = 0; r < world; r++)
      if (r != rank && peer[r] != nullptr) b.reads(peer[r] + lo, n * 16);
    declare<T>(b, recv, first + lo * K, most < end ? most : end, true);
    b.each(n, [&](int64_t i) {
      const int64_t e = first + (lo + i) * K;
      float acc[K];
      AR_NO_UNROLL
      for (int r = 0; r < world; r++) {
        float v[K];
        if (r == rank && !absent) {
          load_elements<T, K>(send, e, end, v);
          through_wire<W, K>(v);
        } else if (r != rank && peer[r] != nullptr) {
          const Vec16 w = peer[r][lo + i];
          unpack<W, K>(w.w, v);
        } else {
          AR_UNROLL
          for (int k = 0; k < K; k++) v[k] = 0.0f;
        }
        AR_UNROLL
        for (int k = 0; k < K; k++) acc[k] = r == 0 ? v[k] : add_rn(acc[k], v[k]);
      }
      finish<W, K>(finish_, acc);
      store_elements<T, K>(recv, e, end, acc);
    });
  }
};

}  // namespace AR_NS
