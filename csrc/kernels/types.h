// Element types, and how tensors are read and written by the element.
//
// Rounding (docs/precision.md): to nearest even, subnormals kept, overflow to infinity. A NaN result is stored as one
// pattern on every platform: 7FFFFFFF for F32, 7FFF for F16 and BF16.
#pragma once

#include "../platform/platform.h"

namespace AR_NS {

struct F32 {
  using Bits = uint32_t;
  AR_DEVICE static float load(Bits b) { return bits_float(b); }
  AR_DEVICE static Bits store(float f) { return f != f ? 0x7FFFFFFFu : float_bits(f); }
};

struct F16 {
  using Bits = uint16_t;
  AR_DEVICE static float load(Bits b) { return half_bits_to_float(b); }
  AR_DEVICE static Bits store(float f) { return f != f ? static_cast<Bits>(0x7FFFu) : float_to_half_bits(f); }
};

struct BF16 {
  using Bits = uint16_t;
  AR_DEVICE static float load(Bits b) { return bits_float(static_cast<uint32_t>(b) << 16); }
  AR_DEVICE static Bits store(float f) {
    const uint32_t u = float_bits(f);
    return f != f ? static_cast<Bits>(0x7FFFu) : static_cast<Bits>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
};

// Elements in 16 bytes.
template <class W>
constexpr int kPerVec = static_cast<int>(16 / sizeof(typename W::Bits));

// A rank's tensor in its own device memory: `cols` elements a row, rows `pitch` bytes apart. vec: contiguous and 16-byte
// aligned, so that whole vectors may be read; any other layout goes element by element (slower, never refused).
struct View {
  char* base;
  int64_t cols;
  int64_t pitch;
  int vec;
  int contiguous;

  template <class T>
  AR_DEVICE typename T::Bits* at(int64_t i) const {
    return contiguous ? reinterpret_cast<typename T::Bits*>(base) + i : strided_at<T>(i);
  }
  template <class T>
  AR_NOINLINE typename T::Bits* strided_at(int64_t i) const {
    const int64_t row = i / cols;
    return reinterpret_cast<typename T::Bits*>(base + row * pitch) + (i - row * cols);
  }
};

// Declares what a phase touches of elements [first, end), row by row: the gaps between rows may be another tensor's.
template <class T>
AR_DEVICE void declare(Block& b, const View& v, int64_t first, int64_t end, bool write) {
  if constexpr (kSimulated) {
    while (first < end) {
      const int64_t row = v.contiguous ? end : (first / v.cols + 1) * v.cols;
      const int64_t next = row < end ? row : end;
      const int64_t bytes = (next - first) * static_cast<int64_t>(sizeof(typename T::Bits));
      write ? b.writes(v.at<T>(first), bytes) : b.reads(v.at<T>(first), bytes);
      first = next;
    }
  }
}

// K consecutive elements from first on, as F32; those at and past `end` read as +0. first is a multiple of K.
template <class T, int K>
AR_DEVICE void load_elements(const View& v, int64_t first, int64_t end, float* out) {
  using Bits = typename T::Bits;
  constexpr int kVecs = static_cast<int>(K * sizeof(Bits) / 16);
  if constexpr (kVecs >= 1) {
    if (v.vec && first + K <= end) {
      const Vec16* p = reinterpret_cast<const Vec16*>(reinterpret_cast<const Bits*>(v.base) + first);
      AR_UNROLL
      for (int i = 0; i < kVecs; i++) {
        const Vec16 w = p[i];
        AR_UNROLL
        for (int k = 0; k < kPerVec<T>; k++) {
          if constexpr (sizeof(Bits) == 4)
            out[i * kPerVec<T> + k] = T::load(w.w[k]);
          else
            out[i * kPerVec<T> + k] = T::load(static_cast<Bits>(w.w[k / 2] >> (16 * (k & 1))));
        }
      }
      return;
    }
  }
  AR_UNROLL
  for (int k = 0; k < K; k++) out[k] = first + k < end ? T::load(*v.at<T>(first + k)) : 0.0f;
}

template <class T, int K>
AR_DEVICE void store_elements(const View& v, int64_t first, int64_t end, const float* in) {
  using Bits = typename T::Bits;
  constexpr int kVecs = static_cast<int>(K * sizeof(Bits) / 16);
  if constexpr (kVecs >= 1) {
    if (v.vec && first + K <= end) {
      Vec16* p = reinterpret_cast<Vec16*>(reinterpret_cast<Bits*>(v.base) + first);
      AR_UNROLL
      for (int i = 0; i < kVecs; i++) {
        Vec16 w;
        AR_UNROLL
        for (int k = 0; k < 4; k++) {
          if constexpr (sizeof(Bits) == 4)
            w.w[k] = T::store(in[i * 4 + k]);
          else
            w.w[k] = static_cast<uint32_t>(T::store(in[i * 8 + 2 * k])) |
                     static_cast<uint32_t>(T::store(in[i * 8 + 2 * k + 1])) << 16;
        }
        p[i] = w;
      }
      return;
    }
  }
  AR_UNROLL
  for (int k = 0; k < K; k++)
    if (first + k < end) *v.at<T>(first + k) = T::store(in[k]);
}

// K wire values to K*sizeof(Bits)/4 words and back.
template <class W, int K>
AR_DEVICE void pack(const float* in, uint32_t* words) {
  if constexpr (sizeof(typename W::Bits) == 4) {
    AR_UNROLL
    for (int k = 0; k < K; k++) words[k] = W::store(in[k]);
  } else {
    AR_UNROLL
    for (int k = 0; k < K / 2; k++)
      words[k] = static_cast<uint32_t>(W::store(in[2 * k])) | static_cast<uint32_t>(W::store(in[2 * k + 1])) << 16;
  }
}
template <class W, int K>
AR_DEVICE void unpack(const uint32_t* words, float* out) {
  using Bits = typename W::Bits;
  AR_UNROLL
  for (int k = 0; k < K; k++) {
    if constexpr (sizeof(Bits) == 4)
      out[k] = W::load(words[k]);
    else
      out[k] = W::load(static_cast<Bits>(words[k / 2] >> (16 * (k & 1))));
  }
}

// The value as its peers see it: rounded to the wire and back.
template <class W, int K>
AR_DEVICE void through_wire(float* v) {
  AR_UNROLL
  for (int k = 0; k < K; k++) v[k] = W::load(W::store(v[k]));
}

// What a reduction does after the sum: divide (avg), and with three or more ranks and a wire narrower than the payload
// round to the wire, so that one-shot and two-shot give the same bits.
struct Finish {
  float divisor;  // 0: sum
  int to_wire;
};
template <class W, int K>
AR_DEVICE void finish(const Finish& f, float* acc) {
  if (f.divisor != 0.0f) {
    AR_UNROLL
    for (int k = 0; k < K; k++) acc[k] = div_rn(acc[k], f.divisor);
  }
  if (f.to_wire) through_wire<W, K>(acc);
}

}  // namespace AR_NS
