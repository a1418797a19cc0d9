// What the ranks of a communicator share beside payload: the board. In one process it is pinned memory; over several
// processes it is the beginning of one file that each maps and registers, with the transports' staging behind it.
#pragma once

#include <cstdint>

#include "include/allreduce.h"
#include "platform/platform.h"

namespace ar {

constexpr int64_t kSharedBoard = 64 << 10;
constexpr int64_t kSharedInternal = 4 << 20;  // of each rank
constexpr int64_t kDefaultRing = 8 << 20;

// Bytes of the file: the board, then the staging of internal, then that of the copy engines, by rank.
inline int64_t shared_bytes(const ar_options& o) {
  const int64_t ring = o.ring_bytes != 0 ? o.ring_bytes : kDefaultRing;
  return kSharedBoard + o.world * (kSharedInternal + ring);
}

// Counters that tell ranks of other processes what events cannot: by the slot of the copy engines' rings.
enum class Told : int { uploaded, downloaded, scattered, shared, gathered, count };

constexpr int kSignatures = 4;  // no rank is so many calls ahead of another

// A word on a 128-byte line of its own.
struct alignas(128) Word {
  uint32_t v;
};
struct alignas(128) SignatureLine {
  Vec16 w[2];  // kernels/sign.h
};

struct Board {
  Vec16 records[8][128];  // of failed waits, by rank and block (kernels/shares.h)
  Word abort[8];          // by the first rank of a process; a kernel polls its own
  Word closed[8];         // by rank: its process has closed the communicator in peace
  Word left[8];           // by rank: it has closed the memory that others gave it
  Word told[8][static_cast<int>(Told::count)][2];
  SignatureLine signatures[8][kSignatures];
  Word latch;        // 0: no failure yet, 1: being written, 2: `failure` is the one that all ranks report
  ar_error failure;  // of the first process to see one
};
static_assert(sizeof(Board) <= kSharedBoard, "the file is cut for a smaller board");

}  // namespace ar
