// `copy-engine`: large reductions moved by the copy engines through pinned host memory, both directions of every link at
// once, no SM in the transfer. Two protocols over the same rings and events:
//   one-shot (copy_engine.cpp)            every rank uploads its values once, and downloads and sums every peer's
//   two-shot (copy_engine_two_shot.cpp)   every rank sums a shard and uploads its total: from three ranks on, above a
//                                         crossover
// What both share is here: memory, and who may use it when. A call of one protocol may follow one of the other.
//
// Memory. `slot` is 0 or 1 everywhere, counted on from call to call. Per rank:
//   send     device, 2 slots: wire values on their way out, a piece each
//   receive  device, 2 slots: peers' wire values
//   pinned   host, 2 slots: one-shot: the rank's own values; two-shot: the rank's box, the others' values of its shard
// and from three ranks on:
//   gather   device, 2 slots: totals as wire values, a piece each
//   totals   host, 2 slots, one for all ranks: the totals of a chunk, shard after shard
//
// Order: events only, so the host never waits. Every use of a place waits for the event of its last use, whichever
// protocol that was: `uploaded` (send), `summed` (receive), every rank's `downloaded` (pinned), `stored` (gather), every
// rank's `gathered` (totals). An event wait binds to the record made last before it was enqueued, and one host thread
// enqueues for all ranks, step by step: so no wait can bind to a later turn of its slot, and none can cycle.
// Across processes the waits for other ranks' marks are flags that a kernel of one block raises or waits for (Comm::publish):
// the steps below are gone through for every rank in every process, and enqueue nothing for ranks that are not here.
// Captured, a call needs no joins of its own: every operation on a stream of ours is awaited, through others, by one on a
// caller's stream, and a graph has ended only when all its nodes have. So after a launch every slot is free.
#pragma once

#include <algorithm>
#include <cmath>

#include "../kernels/pieces.h"
#include "../kernels/tell.h"
#include "transport.h"

namespace AR_NS {

// Each copy costs about 3 us beside its bytes.
constexpr double kCopyCostUs = 3;
constexpr int64_t kSmallestChunk = 64 << 10;
constexpr int64_t kChunkAlign = 4 << 10;
constexpr int64_t kPackBytes = 16;
// Copies of a chunk on a two-shot download stream: the box, and the totals before and after the own one.
constexpr int kChunkCopies = 3;
// Bounds of shards are in parts of a chunk: a multiple of every number of ranks.
constexpr int64_t kShardParts = 840 << 10;
// Links that differ by less have equal shards.
constexpr double kUnequalLinks = 0.9;
// What two-shot costs beside its bytes more than one-shot: three copies, a sum and the way of its event.
constexpr double kTwoShotExtraUs = 5 * kCopyCostUs;

class CopyEngine final : public Transport {
 public:
  explicit CopyEngine(Comm& comm);

  const std::string& missing() const override { return missing_; }
  const char* refuses(int32_t type, int32_t wire, int32_t op) const override;
  int32_t prepare(int64_t max_bytes, ar_error* e) override;
  int32_t enqueue(Call& call, ar_error* e) override;
  void memory(int rank, int64_t* device, int64_t* pinned) const override;

 private:
  struct Ring {
    char* send = nullptr;     // device
    char* receive = nullptr;  // device
    char* gather = nullptr;   // device
    char* pinned = nullptr;   // host
  };

  int32_t allocate(ar_error* e);
  // Whether a rank's values are left out. What other processes' ranks do is not known here, so there all take part, and an
  // absent one sends zeroes.
  bool absent(const Call& call, int r) const { return call.parts[static_cast<size_t>(r)].absent && !comm_.split(); }
  // Wire values of elements [first, end), zeroes of an absent rank, into the send ring, on the caller's stream.
  template <class T, class W>
  int32_t convert(const Part& part, int r, char* to, int64_t first, int64_t end, ar_error* e);
  double slowest_link() const;
  void share_out();
  static int grid(int64_t packs) {
    const int64_t blocks = (packs + kPieceThreads - 1) / kPieceThreads;
    return static_cast<int>(std::min<int64_t>(blocks, kPieceBlocks));
  }
  int32_t use_device(int r, ar_error* e) const {
    return good(set_device(comm_.rank(r).device), r, "choosing the device", e);
  }
  int32_t good(Code c, int r, const char* what, ar_error* e) const {
    return c == kOk ? AR_OK : comm_.runtime_error(c, r, what, e);
  }

  // ---- one-shot ----
  struct Plan {
    int64_t wire_size, piece_elements;
    int64_t chunk[kMaxRanks];  // wire bytes of one copy, by the rank that uploads
    int pieces;
    bool direct;     // uploads read the caller's tensor
    bool on_caller;  // uploads are on the caller's stream
    int first_turn;
  };
  struct Piece {
    int slot;
    int64_t first, end, bytes;
  };
  static Piece piece_of(const Plan& plan, const Call& call, int p);
  int64_t chunk_for(int rank, int64_t wire_bytes, int64_t piece) const;
  char* receive_at(int rank, int slot, int peer) const {
    const int place = peer < rank ? peer : peer - 1;
    return ring_[rank].receive + slot * receive_slot_ + place * piece_bytes_;
  }
  template <class T, class W>
  int32_t one_shot(Call& call, ar_error* e);
  template <class T, class W>
  int32_t upload(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e);
  int32_t download(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e);
  template <class T, class W>
  int32_t sum(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e);

  // ---- two-shot ----
  struct Shards {
    int64_t count, packs;  // of the whole tensor
    int64_t pack_elements, wire_size;
    int64_t chunk_packs;
    int64_t chunks;
    int64_t piece_chunks;  // chunks in a piece
    bool direct;           // uploads and downloads of totals touch the callers' tensors
    int first_turn, first_piece;
    int present;
    int place[kMaxRanks];          // of a present rank among the present ones
    int last_gathered[kMaxRanks];  // slot of the rank's last download of totals in this call, -1: none
    int last_shared[kMaxRanks];    // slot of the rank's last upload of a total in this call, -1: none
  };
  // Packs of the tensor; bytes are exact, as the last pack may be partial.
  struct Span {
    int64_t pack, packs, first, end, bytes;  // elements [first, end)
  };
  struct Chunk {
    int64_t index, pack, packs;
    int slot;            // of boxes and totals
    int piece_slot;      // of send and gather
    int64_t piece_pack;  // where its piece begins
    bool starts_piece, ends_piece;
  };
  bool two_shot_wins(const Call& call, int64_t wire_bytes) const;
  Shards shards_of(const Call& call, int64_t wire_size, int64_t pack_elements);
  int64_t shared_chunk(int64_t wire_bytes) const;
  Chunk chunk_of(const Shards& plan, int64_t i) const;
  static Span span_of(const Shards& plan, int64_t pack, int64_t packs);
  Span shard_of(const Shards& plan, const Chunk& x, int owner) const;
  Span piece_of(const Shards& plan, const Chunk& x) const;
  // Where rank `from`'s values of an owner's shard are in the owner's box, on either side: only present ranks have a
  // place, so that a box is one copy.
  int64_t box_offset(const Shards& plan, int owner, bool owner_absent, int from, int64_t shard_packs) const {
    const int place = plan.place[from] - (!owner_absent && from > owner ? 1 : 0);
    return place * shard_packs * kPackBytes;
  }
  char* total_at(const Chunk& x, const Span& shard) const {
    return totals_ + x.slot * totals_slot_ + (shard.pack - x.pack) * kPackBytes;
  }
  char* gather_at(int r, const Chunk& x, int64_t pack) const {
    return ring_[r].gather + x.piece_slot * slot_bytes_ + (pack - x.piece_pack) * kPackBytes;
  }
  template <class T, class W>
  int32_t two_shot(Call& call, ar_error* e);
  template <class T, class W>
  int32_t scatter(Call& call, const Shards& plan, const Chunk& x, int r, ar_error* e);
  int32_t collect(Call& call, const Shards& plan, const Chunk& x, int r, ar_error* e);
  template <class T, class W>
  int32_t add(Call& call, Shards& plan, const Chunk& x, int r, ar_error* e);
  int32_t gather(Call& call, Shards& plan, const Chunk& x, int r, ar_error* e);
  template <class T, class W>
  int32_t store(Call& call, const Shards& plan, const Chunk& x, int r, ar_error* e);

  Comm& comm_;
  const int n_;
  std::string missing_;
  int64_t slot_bytes_ = 0;                  // of send and gather, and of a piece there
  int64_t receive_slot_ = 0;                // of receive
  int64_t pinned_slot_ = 0;                 // of pinned
  int64_t totals_slot_ = 0;                 // of totals
  int64_t piece_bytes_ = 0;                 // one-shot: of a piece
  int64_t largest_chunk_ = 0;               // two-shot
  int64_t shard_from_[kMaxRanks + 1] = {};  // two-shot: rank r owns [r], [r + 1) of each chunk's kShardParts
  int64_t crossover_ = 0;                   // wire bytes up to which one-shot is faster
  bool loaded_ = false, allocated_ = false;
  int turn_ = 0, piece_turn_ = 0;
  char* totals_ = nullptr;  // host
  Ring ring_[kMaxRanks];
};

}  // namespace AR_NS
