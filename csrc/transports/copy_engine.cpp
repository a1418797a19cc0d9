// `copy-engine`: large reductions moved by the copy engines through pinned host memory, both directions of every link at
// once, no SM in the transfer.
//
// Protocol. A tensor is handled in pieces of at most half the ring; piece p uses slot p % 2 of every ring, counted on
// from call to call. Per rank, with S the caller's stream, U the upload and D the download stream:
//   convert  S: the piece as wire values into the device send ring        (not for an F32 wire of contiguous F32: the upload
//               reads the caller's tensor)
//   upload   U: chunk by chunk to the rank's pinned ring, an event after each
//   download D: each peer's chunk to the device receive ring as soon as it has arrived
//   sum      S: own and peers' wire values in rank order, into recv
// The conversion of piece p+1 is enqueued before the sum of piece p, so S keeps the engines fed. A tensor of one piece is
// uploaded on S itself: S has nothing else to do then, and a change of streams costs some 3 us.
//
// Order: events only, so the host never waits. What may be overwritten when (Order ids in brackets):
//   send ring slot      by the conversion of p+2 after the upload of p                        [ce_convert_reuse]
//   pinned slot         by the upload of p+2 after every peer's download of p                 [ce_slot_free]
//   receive ring slot   by the download of p+2 after the sum of p                             [ce_receive_reuse]
//   the caller's tensor after its own uploads, where they read it directly                    [ce_send_reuse]
// and what may be read when: [ce_send_ready] [ce_converted] [ce_chunk_arrived] [ce_downloaded]. An event wait binds to the
// record made last before it was enqueued, and one host thread enqueues for all ranks, in the order uploads, downloads,
// sums of a piece: so no wait can bind to a later turn of its slot, and none can cycle.
// Two slots, so that a rank that has its result starts its next upload while a peer still downloads.
// Captured, a call needs no joins of its own: every upload is awaited by a download and every download by a sum on a
// caller's stream, and a graph has ended only when all its nodes have. So after a launch every slot is free.
//
// Constants: ring 8 MiB pinned per rank: it stays in the processor's last-level cache (all four flows 43-46 GB/s, 36 with
// 64 MiB; two H200, PCIe 5 x16, 2026-11-30). Device: a send ring and a receive ring of the same size. Each copy costs
// about 3 us beside its bytes: chunks follow c* = sqrt(S / (B o)) (research/peers.md 4.5).
// Included by all_*.cpp.
#include <algorithm>
#include <cmath>

#include "../kernels/pieces.h"
#include "transport.h"

namespace AR_NS {

namespace {

constexpr double kCopyCostUs = 3;
constexpr int64_t kSmallestChunk = 64 << 10;
constexpr int64_t kChunkAlign = 4 << 10;

class CopyEngine final : public Transport {
 public:
  explicit CopyEngine(Comm& comm) : comm_(comm), n_(comm.world()) {
    slot_bytes_ = comm.ring_bytes() / 2 / 4096 * 4096;
    // The receive ring holds one slot of each peer and is as large as the pinned ring.
    piece_bytes_ = n_ > 2 ? slot_bytes_ / (n_ - 1) / 4096 * 4096 : slot_bytes_;
  }

  const std::string& missing() const override { return missing_; }
  const char* refuses(int32_t type, int32_t wire, int32_t) const override {
    return with_types(type, wire, [](auto, auto) {}) ? nullptr : "there is no such kernel";
  }

  int32_t prepare(int64_t max_bytes, ar_error* e) override {
    if (!loaded_) {
      for (int r = 0; r < n_; r++) {
        Code c = set_device(comm_.rank(r).device);
        for_all_types([&](auto t, auto w) {
          if (c == kOk) c = load_kernel<ToWire<decltype(t), decltype(w)>>();
          if (c == kOk) c = load_kernel<SumPiece<decltype(t), decltype(w)>>();
        });
        if (c != kOk) return comm_.runtime_error(c, r, "loading the copy-engine kernels", e);
      }
      loaded_ = true;
    }
    return max_bytes > 0 ? allocate(e) : AR_OK;
  }

  int32_t enqueue(Call& call, ar_error* e) override {
    if (const int32_t s = allocate(e)) return s;
    int32_t status = AR_OK;
    with_types(call.type, call.wire, [&](auto t, auto w) { status = enqueue_as<decltype(t), decltype(w)>(call, e); });
    return status;
  }

  void memory(int, int64_t* device, int64_t* pinned) const override {
    if (!allocated_) return;
    *device = 4 * slot_bytes_;
    *pinned = 2 * slot_bytes_;
  }

 private:
  struct Ring {
    char* send = nullptr;     // device: wire values on their way out
    char* receive = nullptr;  // device: the peers' wire values
    char* pinned = nullptr;   // host
  };

  int32_t allocate(ar_error* e) {
    if (allocated_ || n_ == 1) return AR_OK;
    const size_t mark = comm_.storage_mark();
    for (int r = 0; r < n_; r++) {
      void *send = nullptr, *receive = nullptr, *pinned = nullptr;
      int32_t s = comm_.allocate_device(r, 2 * slot_bytes_, &send, e);
      if (s == AR_OK) s = comm_.allocate_device(r, 2 * slot_bytes_, &receive, e);
      if (s == AR_OK) s = comm_.allocate_pinned(r, 2 * slot_bytes_, &pinned, nullptr, e);
      if (s != AR_OK) {
        comm_.storage_rollback(mark);
        return s;
      }
      ring_[r] = {static_cast<char*>(send), static_cast<char*>(receive), static_cast<char*>(pinned)};
    }
    allocated_ = true;
    comm_.note_allocation();
    return AR_OK;
  }

  // Wire bytes of one copy, for a message of wire_bytes in pieces of piece bytes.
  int64_t chunk_for(int64_t wire_bytes, int64_t piece) const {
    int64_t chunk = comm_.chunk_bytes();
    if (chunk == 0) {
      double gbs = comm_.rank(0).link_gbs;
      for (int r = 1; r < n_; r++) gbs = std::fmin(gbs, comm_.rank(r).link_gbs);
      const double best = std::sqrt(static_cast<double>(wire_bytes) / (gbs * 1e3 * kCopyCostUs));
      const int64_t count = std::max<int64_t>(1, std::llround(best));
      chunk = (wire_bytes + count - 1) / count;
    }
    // At least two chunks a piece where there are several: with one, a slot's upload and its download never overlap
    // (256 MiB of F32 as BF16: 3427 us with 4 MiB chunks, 3109 with 2 MiB; two H200, 2026-11-30).
    if (wire_bytes > piece) chunk = std::min(chunk, piece / 2);
    chunk = std::max(chunk, kSmallestChunk);
    chunk = std::min(chunk, piece);
    // Chunks of one piece as equal as can be.
    const int64_t count = (piece + chunk - 1) / chunk;
    return ((piece + count - 1) / count + kChunkAlign - 1) / kChunkAlign * kChunkAlign;
  }

  char* receive_at(int rank, int slot, int peer) const {
    const int place = peer < rank ? peer : peer - 1;
    return ring_[rank].receive + slot * slot_bytes_ + place * piece_bytes_;
  }

  struct Plan {
    int64_t wire_size, piece_elements, chunk;
    int pieces;
    bool direct;     // uploads read the caller's tensor
    bool on_caller;  // uploads are on the caller's stream
    int first_turn;
  };
  struct Piece {
    int slot;
    int64_t first, end, bytes;
  };
  static Piece piece_of(const Plan& plan, const Call& call, int p) {
    Piece x;
    x.slot = (plan.first_turn + p) & 1;
    x.first = p * plan.piece_elements;
    x.end = std::min(call.count, x.first + plan.piece_elements);
    x.bytes = (x.end - x.first) * plan.wire_size;
    return x;
  }

  template <class T, class W>
  int32_t enqueue_as(Call& call, ar_error* e) {
    Plan plan;
    plan.wire_size = sizeof(typename W::Bits);
    const int64_t wire_bytes = call.count * plan.wire_size;
    plan.pieces = static_cast<int>((wire_bytes + piece_bytes_ - 1) / piece_bytes_);
    const int64_t even = (call.count + plan.pieces - 1) / plan.pieces;
    plan.piece_elements = (even + kPerVec<W> - 1) / kPerVec<W> * kPerVec<W>;
    plan.chunk = chunk_for(wire_bytes, std::min(plan.piece_elements * plan.wire_size, piece_bytes_));
    plan.direct = call.type == call.wire && !call.strided;
    plan.on_caller = plan.pieces == 1;
    plan.first_turn = turn_;
    turn_ = (turn_ + plan.pieces) & 1;
    comm_.note_chunk(plan.chunk);

    for (int r = 0; r < n_; r++) {
      Lane& lane = *call.lane[r];
      const Code c = set_device(comm_.rank(r).device);
      if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
      if (const int32_t s = comm_.need_stream(lane.send, r, e)) return s;
      if (const int32_t s = comm_.need_stream(lane.receive, r, e)) return s;
      if (plan.on_caller) continue;
      if (const int32_t s = comm_.record(lane.ready, r, call.parts[static_cast<size_t>(r)].stream, e)) return s;
    }
    call.enqueued = true;
    for (int p = 0; p < plan.pieces; p++) {
      const Piece piece = piece_of(plan, call, p);
      for (int r = 0; r < n_; r++)
        if (const int32_t s = upload<T, W>(call, plan, piece, r, e)) return s;
      for (int r = 0; r < n_; r++)
        if (const int32_t s = download(call, plan, piece, r, e)) return s;
      if (p == 0) continue;
      const Piece before = piece_of(plan, call, p - 1);
      for (int r = 0; r < n_; r++)
        if (const int32_t s = sum<T, W>(call, plan, before, r, e)) return s;
    }
    const Piece last = piece_of(plan, call, plan.pieces - 1);
    for (int r = 0; r < n_; r++)
      if (const int32_t s = sum<T, W>(call, plan, last, r, e)) return s;
    return AR_OK;
  }

  static int grid(int64_t packs) {
    const int64_t blocks = (packs + kPieceThreads - 1) / kPieceThreads;
    return static_cast<int>(std::min<int64_t>(blocks, kPieceBlocks));
  }

  template <class T, class W>
  int32_t upload(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e) {
    const Part& part = call.parts[static_cast<size_t>(r)];
    if (part.absent) return AR_OK;
    Lane& lane = *call.lane[r];
    Code c = set_device(comm_.rank(r).device);
    if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
    const Stream up = plan.on_caller ? part.stream : lane.send;
    const char* from = nullptr;
    if (plan.direct) {
      from = part.send.base + piece.first * plan.wire_size;
      if (piece.first == 0 && !plan.on_caller)
        if (const int32_t s = comm_.await(Order::ce_send_ready, r, up, lane.ready, e)) return s;
    } else {
      char* to = ring_[r].send + piece.slot * slot_bytes_;
      // The last chunk's event stands for the whole upload: one stream, in order.
      if (const int32_t s = comm_.await(Order::ce_convert_reuse, r, part.stream, lane.uploaded[piece.slot], e))
        return s;
      ToWire<T, W> k{part.send, reinterpret_cast<Vec16*>(to), piece.first, piece.end};
      c = launch(k, grid((piece.end - piece.first + kPerVec<W> - 1) / kPerVec<W>), kPieceThreads, part.stream);
      if (c != kOk) return comm_.runtime_error(c, r, "launching the conversion", e);
      if (!plan.on_caller) {
        if (const int32_t s = comm_.record(lane.converted[piece.slot], r, part.stream, e)) return s;
        if (const int32_t s = comm_.await(Order::ce_converted, r, up, lane.converted[piece.slot], e)) return s;
      }
      from = to;
    }
    for (int q = 0; q < n_; q++)
      if (q != r)
        if (const int32_t s = comm_.await(Order::ce_slot_free, r, up, call.lane[q]->downloaded[piece.slot], e))
          return s;
    char* to = ring_[r].pinned + piece.slot * slot_bytes_;
    size_t chunk = 0;
    for (int64_t at = 0; at < piece.bytes; at += plan.chunk, chunk++) {
      const int64_t bytes = std::min(plan.chunk, piece.bytes - at);
      c = copy_async(to + at, from + at, static_cast<size_t>(bytes), CopyKind::device_to_host, up);
      if (c != kOk) return comm_.runtime_error(c, r, "copying to the host", e);
      if (lane.chunk[piece.slot].size() <= chunk) lane.chunk[piece.slot].resize(chunk + 1);
      if (const int32_t s = comm_.record(lane.chunk[piece.slot][chunk], r, up, e)) return s;
    }
    lane.uploaded[piece.slot] = lane.chunk[piece.slot][chunk - 1];
    return AR_OK;
  }

  int32_t download(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e) {
    Lane& lane = *call.lane[r];
    Code c = set_device(comm_.rank(r).device);
    if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
    if (const int32_t s = comm_.await(Order::ce_receive_reuse, r, lane.receive, lane.summed[piece.slot], e)) return s;
    bool any = false;
    size_t chunk = 0;
    for (int64_t at = 0; at < piece.bytes; at += plan.chunk, chunk++) {
      const int64_t bytes = std::min(plan.chunk, piece.bytes - at);
      // Start with the next rank, so that not everybody reads the same one first.
      for (int i = 1; i < n_; i++) {
        const int q = (r + i) % n_;
        if (call.parts[static_cast<size_t>(q)].absent) continue;
        if (const int32_t s =
                comm_.await(Order::ce_chunk_arrived, r, lane.receive, call.lane[q]->chunk[piece.slot][chunk], e))
          return s;
        c = copy_async(receive_at(r, piece.slot, q) + at, ring_[q].pinned + piece.slot * slot_bytes_ + at,
                       static_cast<size_t>(bytes), CopyKind::host_to_device, lane.receive);
        if (c != kOk) return comm_.runtime_error(c, r, "copying from the host", e);
        any = true;
      }
    }
    return any ? comm_.record(lane.downloaded[piece.slot], r, lane.receive, e) : AR_OK;
  }

  template <class T, class W>
  int32_t sum(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e) {
    const Part& part = call.parts[static_cast<size_t>(r)];
    Lane& lane = *call.lane[r];
    Code c = set_device(comm_.rank(r).device);
    if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
    SumPiece<T, W> k{part.send, part.recv, {}, piece.first, piece.end, finish_for(call, n_), r, n_, part.absent};
    bool any = false;
    for (int q = 0; q < n_; q++) {
      if (q == r || call.parts[static_cast<size_t>(q)].absent) continue;
      k.peer[q] = reinterpret_cast<const Vec16*>(receive_at(r, piece.slot, q));
      any = true;
    }
    if (any)
      if (const int32_t s = comm_.await(Order::ce_downloaded, r, part.stream, lane.downloaded[piece.slot], e)) return s;
    // In place the sum overwrites what the upload reads; out of place the caller may do so next.
    if (plan.direct && !part.absent && !plan.on_caller)
      if (const int32_t s = comm_.await(Order::ce_send_reuse, r, part.stream, lane.uploaded[piece.slot], e)) return s;
    c = launch(k, grid((piece.end - piece.first + kPerVec<W> - 1) / kPerVec<W>), kPieceThreads, part.stream);
    if (c != kOk) return comm_.runtime_error(c, r, "launching the sum", e);
    return comm_.record(lane.summed[piece.slot], r, part.stream, e);
  }

  Comm& comm_;
  const int n_;
  std::string missing_;
  int64_t slot_bytes_ = 0, piece_bytes_ = 0;
  bool loaded_ = false, allocated_ = false;
  int turn_ = 0;
  Ring ring_[kMaxRanks];
};

}  // namespace

std::unique_ptr<Transport> make_copy_engine(Comm& comm) { return std::make_unique<CopyEngine>(comm); }

}  // namespace AR_NS
