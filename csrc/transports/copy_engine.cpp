// One-shot, and the copy-engine transport itself (copy_engine.h: memory and order).
//
// Protocol. A tensor is handled in pieces of at most one slot; piece p uses slot p % 2 of every ring, counted on from call
// to call. Per rank, with S the caller's stream, U the upload and D the download stream:
//   convert  S: the piece as wire values into the device send ring        (not for an F32 wire of contiguous F32: the upload
//               reads the caller's tensor)
//   upload   U: chunk by chunk to the rank's pinned ring, an event after each
//   download D: each peer's chunk to the device receive ring as soon as it has arrived
//   sum      S: own and peers' wire values in rank order, into recv
// The conversion of piece p+1 is enqueued before the sum of piece p, so S keeps the engines fed. A tensor of one piece is
// uploaded on S itself: S has nothing else to do then, and a change of streams costs some 3 us.
//
// What may be overwritten when (Order ids in brackets):
//   send ring slot      by the conversion of p+2 after the upload of p                        [ce_convert_reuse]
//   pinned slot         by the upload of p+2 after every peer's download of p                 [ce_slot_free]
//   receive ring slot   by the download of p+2 after the sum of p                             [ce_receive_reuse]
//   the caller's tensor after its own uploads, where they read it directly                    [ce_send_reuse]
// and what may be read when: [ce_send_ready] [ce_converted] [ce_chunk_arrived] [ce_downloaded].
// Two slots, so that a rank that has its result starts its next upload while a peer still downloads.
//
// Constants: ring 8 MiB pinned per rank: it stays in the processor's last-level cache (all four flows 43-46 GB/s, 36 with
// 64 MiB; two H200, PCIe 5 x16, 2026-11-30). Device: a send ring and a receive ring of the same size. Chunks follow
// c* = sqrt(S / (B o)) (research/peers.md 4.5), with B of the faster link of the two that a chunk crosses: the slower one is
// busy all the time, and a chunk's time on the faster one comes before the first or after the last.
// Included by all_*.cpp.
#include "copy_engine.h"

namespace AR_NS {

CopyEngine::CopyEngine(Comm& comm) : comm_(comm), n_(comm.world()) {
  if (comm.far()) missing_ = "path copy-engine goes through memory of one host, and the ranks are on several";
  slot_bytes_ = comm.ring_bytes() / 2 / 4096 * 4096;
  if (n_ <= 2) {
    receive_slot_ = pinned_slot_ = piece_bytes_ = slot_bytes_;
    return;
  }
  share_out();
  int64_t widest = 0;
  for (int r = 0; r < n_; r++) widest = std::max(widest, shard_from_[r + 1] - shard_from_[r]);
  // A chunk and a box of it have half a slot each.
  const double boxes = static_cast<double>((n_ - 1) * widest) / kShardParts;
  const int64_t step = n_ * kPackBytes;
  largest_chunk_ = static_cast<int64_t>(static_cast<double>(slot_bytes_ / 2) / std::fmax(1, boxes)) / step * step;
  const int64_t shard = (largest_chunk_ / kPackBytes * widest / kShardParts + 1) * kPackBytes;
  receive_slot_ = pinned_slot_ = (n_ - 1) * ((shard + 255) / 256 * 256);
  totals_slot_ = (largest_chunk_ + 255) / 256 * 256;
  // The receive ring holds one piece of each peer.
  piece_bytes_ = receive_slot_ / (n_ - 1) / 4096 * 4096;
  crossover_ = static_cast<int64_t>(kTwoShotExtraUs * 1e3 * slowest_link() / ((n_ - 1) * (1 - 2.0 / n_)));
}

double CopyEngine::slowest_link() const {
  double gbs = comm_.rank(0).link_gbs;
  for (int r = 1; r < n_; r++) gbs = std::fmin(gbs, comm_.rank(r).link_gbs);
  return gbs;
}

const char* CopyEngine::refuses(int32_t type, int32_t wire, int32_t) const {
  return with_types(type, wire, [](auto, auto) {}) ? nullptr : "there is no such kernel";
}

int32_t CopyEngine::prepare(int64_t max_bytes, ar_error* e) {
  if (!loaded_) {
    for (int r : comm_.locals()) {
      Code c = set_device(comm_.rank(r).device);
      if (c == kOk && comm_.split()) c = load_kernel<Tell>();
      if (c == kOk && comm_.split()) c = load_kernel<AwaitTold>();
      if (c == kOk && comm_.split()) c = load_kernel<Sign>();
      for_all_types([&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        if (c == kOk) c = load_kernel<ToWire<T, W>>();
        if (c == kOk) c = load_kernel<SumPiece<T, W>>();
        if (n_ <= 2) return;
        if (c == kOk) c = load_kernel<SumPiece<T, W, true>>();
        if (c == kOk) c = load_kernel<FromWire<T, W>>();
      });
      if (c != kOk) return comm_.runtime_error(c, r, "loading the copy-engine kernels", e);
    }
    loaded_ = true;
  }
  return max_bytes > 0 ? allocate(e) : AR_OK;
}

int32_t CopyEngine::enqueue(Call& call, ar_error* e) {
  if (const int32_t s = allocate(e)) return s;
  if (const int32_t s = comm_.sign(call, AR_PATH_COPY_ENGINE, e)) return s;
  int32_t status = AR_OK;
  with_types(call.type, call.wire, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    const int64_t wire_bytes = call.count * static_cast<int64_t>(sizeof(typename W::Bits));
    status = two_shot_wins(call, wire_bytes) ? two_shot<T, W>(call, e) : one_shot<T, W>(call, e);
  });
  return status;
}

void CopyEngine::memory(int, int64_t* device, int64_t* pinned) const {
  if (!allocated_) return;
  *device = 2 * (slot_bytes_ + receive_slot_ + (n_ > 2 ? slot_bytes_ : 0));
  *pinned = 2 * (pinned_slot_ + totals_slot_ / n_);
}

int32_t CopyEngine::allocate(ar_error* e) {
  if (allocated_ || n_ == 1) return AR_OK;
  const size_t mark = comm_.storage_mark();
  int32_t s = AR_OK;
  for (int r = 0; r < n_ && s == AR_OK; r++) {
    void *send = nullptr, *receive = nullptr, *gather = nullptr, *pinned = nullptr;
    if (comm_.local(r)) {
      s = comm_.allocate_device(r, 2 * slot_bytes_, &send, e);
      if (s == AR_OK) s = comm_.allocate_device(r, 2 * receive_slot_, &receive, e);
      if (s == AR_OK && n_ > 2) s = comm_.allocate_device(r, 2 * slot_bytes_, &gather, e);
    }
    if (s == AR_OK)
      s = comm_.staging(AR_PATH_COPY_ENGINE, r, r * 2 * pinned_slot_, 2 * pinned_slot_, &pinned, nullptr, e);
    ring_[r] = {static_cast<char*>(send), static_cast<char*>(receive), static_cast<char*>(gather),
                static_cast<char*>(pinned)};
  }
  void* totals = nullptr;
  if (s == AR_OK && n_ > 2)
    s = comm_.staging(AR_PATH_COPY_ENGINE, 0, n_ * 2 * pinned_slot_, 2 * totals_slot_, &totals, nullptr, e);
  if (s != AR_OK) {
    comm_.storage_rollback(mark);
    return s;
  }
  totals_ = static_cast<char*>(totals);
  allocated_ = true;
  comm_.note_allocation();
  return AR_OK;
}

// Wire bytes of one copy of this rank's, for a message of wire_bytes in pieces of piece bytes.
int64_t CopyEngine::chunk_for(int rank, int64_t wire_bytes, int64_t piece) const {
  int64_t chunk = comm_.chunk_bytes();
  if (chunk == 0) {
    double gbs = 1e300;  // of the slowest peer
    for (int r = 0; r < n_; r++)
      if (r != rank) gbs = std::fmin(gbs, comm_.rank(r).link_gbs);
    gbs = std::fmax(gbs, comm_.rank(rank).link_gbs);
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

CopyEngine::Piece CopyEngine::piece_of(const Plan& plan, const Call& call, int p) {
  Piece x;
  x.slot = (plan.first_turn + p) & 1;
  x.first = p * plan.piece_elements;
  x.end = std::min(call.count, x.first + plan.piece_elements);
  x.bytes = (x.end - x.first) * plan.wire_size;
  return x;
}

template <class T, class W>
int32_t CopyEngine::one_shot(Call& call, ar_error* e) {
  Plan plan;
  plan.wire_size = sizeof(typename W::Bits);
  const int64_t wire_bytes = call.count * plan.wire_size;
  plan.pieces = static_cast<int>((wire_bytes + piece_bytes_ - 1) / piece_bytes_);
  const int64_t even = (call.count + plan.pieces - 1) / plan.pieces;
  plan.piece_elements = (even + kPerVec<W> - 1) / kPerVec<W> * kPerVec<W>;
  int64_t chunk = 0;
  for (int r = 0; r < n_; r++) {
    plan.chunk[r] = chunk_for(r, wire_bytes, std::min(plan.piece_elements * plan.wire_size, piece_bytes_));
    chunk = std::max(chunk, plan.chunk[r]);
  }
  plan.direct = call.type == call.wire && !call.strided;
  plan.on_caller = plan.pieces == 1;
  plan.first_turn = turn_;
  turn_ = (turn_ + plan.pieces) & 1;
  comm_.note_chunk(chunk);

  for (int r : comm_.locals()) {
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

template <class T, class W>
int32_t CopyEngine::convert(const Part& part, int r, char* to, int64_t first, int64_t end, ar_error* e) {
  const int64_t packs = (end - first + kPerVec<W> - 1) / kPerVec<W>;
  if (part.absent)
    return good(fill_async(to, 0, static_cast<size_t>(packs * kPackBytes), part.stream), r, "clearing", e);
  const ToWire<T, W> k{part.send, reinterpret_cast<Vec16*>(to), first, end};
  return good(launch(k, grid(packs), kPieceThreads, part.stream), r, "launching the conversion", e);
}

template <class T, class W>
int32_t CopyEngine::upload(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e) {
  const Part& part = call.parts[static_cast<size_t>(r)];
  if (absent(call, r)) return AR_OK;
  Lane& lane = *call.lane[r];
  const int64_t chunks = (piece.bytes + plan.chunk[r] - 1) / plan.chunk[r];
  if (static_cast<int64_t>(lane.chunk[piece.slot].size()) < chunks)
    lane.chunk[piece.slot].resize(static_cast<size_t>(chunks));
  if (!comm_.local(r)) {
    for (int64_t i = 0; i < chunks; i++)
      if (const int32_t s =
              comm_.publish(lane.chunk[piece.slot][static_cast<size_t>(i)], Told::uploaded, piece.slot, r, nullptr, e))
        return s;
    return AR_OK;
  }
  Code c = set_device(comm_.rank(r).device);
  if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
  const Stream up = plan.on_caller ? part.stream : lane.send;
  const char* from = nullptr;
  if (plan.direct && !part.absent) {
    from = part.send.base + piece.first * plan.wire_size;
    if (piece.first == 0 && !plan.on_caller)
      if (const int32_t s = comm_.await(Order::ce_send_ready, r, up, lane.ready, e)) return s;
  } else {
    char* to = ring_[r].send + piece.slot * slot_bytes_;
    // The last chunk's event stands for the whole upload: one stream, in order.
    if (const int32_t s = comm_.await(Order::ce_convert_reuse, r, part.stream, lane.uploaded[piece.slot], e)) return s;
    if (const int32_t s = convert<T, W>(part, r, to, piece.first, piece.end, e)) return s;
    if (!plan.on_caller) {
      if (const int32_t s = comm_.record(lane.converted[piece.slot], r, part.stream, e)) return s;
      if (const int32_t s = comm_.await(Order::ce_converted, r, up, lane.converted[piece.slot], e)) return s;
    }
    from = to;
  }
  // With three and more ranks the place may have been this rank's box, which it read itself.
  for (int q = 0; q < n_; q++)
    if (q != r || n_ > 2)
      if (const int32_t s = comm_.await(Order::ce_slot_free, r, up, call.lane[q]->downloaded[piece.slot], e)) return s;
  char* to = ring_[r].pinned + piece.slot * pinned_slot_;
  size_t chunk = 0;
  for (int64_t at = 0; at < piece.bytes; at += plan.chunk[r], chunk++) {
    const int64_t bytes = std::min(plan.chunk[r], piece.bytes - at);
    c = copy_async(to + at, from + at, static_cast<size_t>(bytes), CopyKind::device_to_host, up);
    if (c != kOk) return comm_.runtime_error(c, r, "copying to the host", e);
    if (const int32_t s = comm_.publish(lane.chunk[piece.slot][chunk], Told::uploaded, piece.slot, r, up, e)) return s;
  }
  lane.uploaded[piece.slot] = lane.chunk[piece.slot][chunk - 1];
  return AR_OK;
}

int32_t CopyEngine::download(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e) {
  Lane& lane = *call.lane[r];
  if (!comm_.local(r)) return comm_.publish(lane.downloaded[piece.slot], Told::downloaded, piece.slot, r, nullptr, e);
  Code c = set_device(comm_.rank(r).device);
  if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
  bool any = false, more = true;
  for (size_t chunk = 0; more; chunk++) {
    more = false;
    // Start with the next rank, so that not everybody reads the same one first.
    for (int i = 1; i < n_; i++) {
      const int q = (r + i) % n_;
      const int64_t at = static_cast<int64_t>(chunk) * plan.chunk[q];
      if (absent(call, q) || at >= piece.bytes) continue;
      const int64_t bytes = std::min(plan.chunk[q], piece.bytes - at);
      // Not without a copy after it: a wait would leave the stream in a capture that nothing joins it back to.
      if (!any)
        if (const int32_t s = comm_.await(Order::ce_receive_reuse, r, lane.receive, lane.summed[piece.slot], e))
          return s;
      if (const int32_t s =
              comm_.await(Order::ce_chunk_arrived, r, lane.receive, call.lane[q]->chunk[piece.slot][chunk], e))
        return s;
      c = copy_async(receive_at(r, piece.slot, q) + at, ring_[q].pinned + piece.slot * pinned_slot_ + at,
                     static_cast<size_t>(bytes), CopyKind::host_to_device, lane.receive);
      if (c != kOk) return comm_.runtime_error(c, r, "copying from the host", e);
      any = more = true;
    }
  }
  return any ? comm_.publish(lane.downloaded[piece.slot], Told::downloaded, piece.slot, r, lane.receive, e) : AR_OK;
}

template <class T, class W>
int32_t CopyEngine::sum(Call& call, const Plan& plan, const Piece& piece, int r, ar_error* e) {
  if (!comm_.local(r)) return AR_OK;
  const Part& part = call.parts[static_cast<size_t>(r)];
  Lane& lane = *call.lane[r];
  Code c = set_device(comm_.rank(r).device);
  if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
  SumPiece<T, W> k{part.send, part.recv, {}, piece.first, piece.end, finish_for(call, n_), r, n_, part.absent, nullptr};
  bool any = false;
  for (int q = 0; q < n_; q++) {
    if (q == r || absent(call, q)) continue;
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

std::unique_ptr<Transport> make_copy_engine(Comm& comm) { return std::make_unique<CopyEngine>(comm); }

}  // namespace AR_NS
