// Two-shot of the copy engines, for three ranks and more: reduce-scatter and all-gather staged through the host, where each
// rank's values are uploaded once and each total is read by all. D2H traffic per GPU S, H2D 2(N-1)/N S (one-shot: S and
// (N-1) S; a ring: 2(N-1)/N S each).
//
// Protocol. A tensor is handled in chunks, each cut into one shard a rank, whole 16-byte packs, as equal as can be where the
// links are, else by their rates (share_out). Rank r owns shard r, which may be empty. Chunk i uses slot i % 2 of boxes and
// totals, counted on from call to call; chunks form pieces of at most one slot of the send and gather rings. Per rank, with S
// the caller's stream, U the upload and D the download stream:
//   convert  S: a piece as wire values into the send ring          (not where wire and tensor are alike: direct)
//   scatter  U: each shard of the chunk to its owner's box, where the ranks' values lie side by side; one event
//   collect  D: the own box, once all ranks' values are in it, in one copy
//   add      S: own and peers' values in rank order, rounded once, to the wire's type where that is narrower; the total
//               goes to the gather ring's place for it             (direct: into recv)
//   share    U: the total to its place among the chunk's totals
//   gather   D: the others' totals, which lie side by side, in two copies (one for the first and the last rank), to the
//               gather ring                                        (direct: into recv)
//   store    S: a piece of totals into recv                        (not where direct)
// The links are busy both ways because chunks overlap: U does scatter(i+1), share(i), D collect(i+1), gather(i).
// An absent rank scatters nothing, has no place in a box, and owns and adds its shard like any other.
//
// Order. What may be overwritten when (Order ids in brackets):
//   send place     by the conversion of piece p+2. Its uploads are done: the store of piece p came before on S, after totals
//                  that need this rank's values. After a one-shot call that does not hold        [two_convert_reuse]
//   box            by the scatter of i+2 after every rank's collect of i                         [two_box_free]
//   receive place  by the collect of i+2 after the add of i                                      [two_receive_reuse]
//   total          by the share of i+2 after every rank's gather of i                            [two_total_free]
//   gather place   by the add of p+2: the store of p came before on S, and the share of p too: every other rank's
//                  conversion of p+2, which the add needs, came after its store of p, which needed it.
//                  By the gather of p+2: that needs totals that need this rank's conversion of p+2, which came after its
//                  store of p. An absent rank converts nothing                                   [two_gather_reuse]
//   recv, direct   by the gather: in place the values there were scattered, for the totals need them; and they need S to
//                  have come to this call. Not for an absent rank                                [two_recv_ready]
//                  by the caller after the call: after the own share                             [two_recv_reuse]
// and what may be read when: [two_send_ready] [two_converted] [two_arrived] [two_collected] [two_added] [two_total_arrived]
// [two_gathered].
// A piece has at least two chunks (largest_chunk_ is half a slot), so its store is enqueued before the conversion of the
// piece after next.
//
// Constants: of the ring bytes, half are pinned: boxes and totals of two chunks of at most half a slot. Device: send and
// gather rings of ring bytes each, receive half.
// Included by all_*.cpp.
#include <functional>
#include <numeric>

#include "copy_engine.h"

namespace AR_NS {

bool CopyEngine::two_shot_wins(const Call& call, int64_t wire_bytes) const {
  int present = 0;
  for (int r = 0; r < n_; r++) present += !absent(call, r);
  // With one rank's values to move, both protocols move the same bytes.
  return n_ > 2 && present > 1 && wire_bytes > crossover_;
}

// Who owns how much. A rank uploads S whatever it owns, and downloads (1 + (N-2) w) S if it owns a part w: its values' totals
// and the others' values of what it owns. All downloads end at once if w = (T d - 1) / (N-2) with d its link's rate; a link
// too slow to download S in that time owns nothing. Seven PCIe 4 x16 cards and one 3 x4, 16 MiB: 10.0 ms with equal shards,
// 6.7 ms so (simulated).
void CopyEngine::share_out() {
  std::vector<double> rates;
  for (int r = 0; r < n_; r++) rates.push_back(comm_.rank(r).link_gbs);
  std::sort(rates.begin(), rates.end(), std::greater<double>());
  double sum = std::accumulate(rates.begin(), rates.end(), 0.0), time = 0;
  for (int owners = n_; owners > 0; owners--) {
    time = (n_ - 2 + owners) / sum;
    if (time * rates[static_cast<size_t>(owners) - 1] > 1) break;
    sum -= rates[static_cast<size_t>(owners) - 1];
  }
  const bool equal = rates.back() >= kUnequalLinks * rates.front();
  double upto = 0;
  for (int r = 0; r < n_; r++) {
    upto += equal ? 1.0 / n_ : std::fmax(0, (time * comm_.rank(r).link_gbs - 1) / (n_ - 2));
    shard_from_[r + 1] = r + 1 == n_ ? kShardParts : std::min<int64_t>(std::llround(upto * kShardParts), kShardParts);
  }
}

// Wire bytes of a chunk.
int64_t CopyEngine::shared_chunk(int64_t wire_bytes) const {
  const int64_t step = n_ * kPackBytes;
  int64_t chunk = comm_.chunk_bytes();
  if (chunk == 0) {
    // The download stream is the bottleneck, with kCopies copies a chunk; before its first comes one chunk's upload.
    const double us = static_cast<double>(wire_bytes) / (slowest_link() * 1e3);
    const int64_t count = std::max<int64_t>(1, std::llround(std::sqrt(us / (kChunkCopies * kCopyCostUs))));
    chunk = (wire_bytes + count - 1) / count;
    // The upload stream has N copies a chunk: smaller ones would make it the bottleneck.
    if (n_ > 3)
      chunk = std::max(chunk, static_cast<int64_t>(kCopyCostUs * slowest_link() * 1e3 * n_ * (n_ - 3) / (n_ - 2)));
  }
  chunk = std::min(std::max(chunk, kSmallestChunk), largest_chunk_);
  const int64_t count = (wire_bytes + chunk - 1) / chunk;
  return std::min(((wire_bytes + count - 1) / count + step - 1) / step * step, largest_chunk_);
}

CopyEngine::Shards CopyEngine::shards_of(const Call& call, int64_t wire_size, int64_t pack_elements) {
  Shards plan;
  plan.count = call.count;
  plan.pack_elements = pack_elements;
  plan.wire_size = wire_size;
  plan.packs = (call.count + pack_elements - 1) / pack_elements;
  const int64_t chunk = shared_chunk(plan.packs * kPackBytes);
  plan.chunk_packs = chunk / kPackBytes;
  plan.chunks = (plan.packs + plan.chunk_packs - 1) / plan.chunk_packs;
  plan.piece_chunks = slot_bytes_ / chunk;
  plan.direct = call.type == call.wire && !call.strided;
  plan.first_turn = turn_;
  plan.first_piece = piece_turn_;
  turn_ = static_cast<int>((turn_ + plan.chunks) & 1);
  piece_turn_ = static_cast<int>((piece_turn_ + (plan.chunks + plan.piece_chunks - 1) / plan.piece_chunks) & 1);
  plan.present = 0;
  for (int r = 0; r < n_; r++) {
    plan.place[r] = plan.present;
    plan.present += !absent(call, r);
    plan.last_gathered[r] = plan.last_shared[r] = -1;
  }
  comm_.note_chunk(chunk);
  return plan;
}

CopyEngine::Chunk CopyEngine::chunk_of(const Shards& plan, int64_t i) const {
  Chunk x;
  const int64_t piece = i / plan.piece_chunks;
  x.index = i;
  x.pack = i * plan.chunk_packs;
  x.packs = std::min(plan.chunk_packs, plan.packs - x.pack);
  x.slot = static_cast<int>((plan.first_turn + i) & 1);
  x.piece_slot = static_cast<int>((plan.first_piece + piece) & 1);
  x.piece_pack = piece * plan.piece_chunks * plan.chunk_packs;
  x.starts_piece = i % plan.piece_chunks == 0;
  x.ends_piece = (i + 1) % plan.piece_chunks == 0 || i + 1 == plan.chunks;
  return x;
}

CopyEngine::Span CopyEngine::span_of(const Shards& plan, int64_t pack, int64_t packs) {
  Span s;
  s.pack = pack;
  s.packs = packs;
  s.first = pack * plan.pack_elements;
  s.end = std::min(plan.count, (pack + packs) * plan.pack_elements);
  s.bytes = packs > 0 ? (s.end - s.first) * plan.wire_size : 0;
  return s;
}

CopyEngine::Span CopyEngine::shard_of(const Shards& plan, const Chunk& x, int owner) const {
  const auto at = [&](int r) { return (x.packs * shard_from_[r] + kShardParts - 1) / kShardParts; };
  return span_of(plan, x.pack + at(owner), at(owner + 1) - at(owner));
}

CopyEngine::Span CopyEngine::piece_of(const Shards& plan, const Chunk& x) const {
  return span_of(plan, x.piece_pack, std::min(plan.piece_chunks * plan.chunk_packs, plan.packs - x.piece_pack));
}

template <class T, class W>
int32_t CopyEngine::two_shot(Call& call, ar_error* e) {
  Shards plan = shards_of(call, sizeof(typename W::Bits), kPerVec<W>);
  for (int r : comm_.locals()) {
    Lane& lane = *call.lane[r];
    if (const int32_t s = use_device(r, e)) return s;
    if (const int32_t s = comm_.need_stream(lane.send, r, e)) return s;
    if (const int32_t s = comm_.need_stream(lane.receive, r, e)) return s;
    if (!plan.direct) continue;
    if (const int32_t s = comm_.record(lane.ready, r, call.parts[static_cast<size_t>(r)].stream, e)) return s;
  }
  call.enqueued = true;
  const auto each = [&](int64_t chunk, auto step) -> int32_t {
    const Chunk x = chunk_of(plan, chunk);
    for (int r = 0; r < n_; r++)
      if (const int32_t s = step(x, r)) return s;
    return AR_OK;
  };
  const auto stored = [&](int64_t chunk) {
    return each(chunk, [&](const Chunk& x, int r) {
      return x.ends_piece && !plan.direct ? store<T, W>(call, plan, x, r, e) : AR_OK;
    });
  };
  // Stores come one chunk late, so that S is not held up by totals on their way.
  for (int64_t i = 0; i <= plan.chunks; i++) {
    int32_t s = AR_OK;
    if (i < plan.chunks) {
      s = each(i, [&](const Chunk& x, int r) { return scatter<T, W>(call, plan, x, r, e); });
      if (s == AR_OK) s = each(i, [&](const Chunk& x, int r) { return collect(call, plan, x, r, e); });
    }
    if (s == AR_OK && i > 0) {
      s = each(i - 1, [&](const Chunk& x, int r) { return add<T, W>(call, plan, x, r, e); });
      if (s == AR_OK) s = each(i - 1, [&](const Chunk& x, int r) { return gather(call, plan, x, r, e); });
    }
    if (s == AR_OK && i > 1) s = stored(i - 2);
    if (s != AR_OK) return s;
  }
  if (!plan.direct) return stored(plan.chunks - 1);
  for (int r : comm_.locals()) {
    Lane& lane = *call.lane[r];
    const Stream stream = call.parts[static_cast<size_t>(r)].stream;
    if (const int32_t s = use_device(r, e)) return s;
    if (plan.last_gathered[r] >= 0)
      if (const int32_t s = comm_.await(Order::two_gathered, r, stream, lane.gathered[plan.last_gathered[r]], e))
        return s;
    if (plan.last_shared[r] >= 0)
      if (const int32_t s = comm_.await(Order::two_recv_reuse, r, stream, lane.shared[plan.last_shared[r]], e))
        return s;
  }
  return AR_OK;
}

// Before the first chunk of a piece its conversion; then every shard of the chunk to its owner's box.
template <class T, class W>
int32_t CopyEngine::scatter(Call& call, const Shards& plan, const Chunk& x, int r, ar_error* e) {
  const Part& part = call.parts[static_cast<size_t>(r)];
  if (absent(call, r)) return AR_OK;
  Lane& lane = *call.lane[r];
  if (!comm_.local(r)) {
    if (x.packs == shard_of(plan, x, r).packs) return AR_OK;
    return comm_.publish(lane.scattered[x.slot], Told::scattered, x.slot, r, nullptr, e);
  }
  const bool direct = plan.direct && !part.absent;
  if (const int32_t s = use_device(r, e)) return s;
  const char* from = nullptr;  // the chunk
  if (direct) {
    from = part.send.base + x.pack * kPackBytes;
  } else {
    char* place = ring_[r].send + x.piece_slot * slot_bytes_;
    from = place + (x.pack - x.piece_pack) * kPackBytes;
    if (x.starts_piece) {
      if (const int32_t s = comm_.await(Order::two_convert_reuse, r, part.stream, lane.uploaded[x.piece_slot], e))
        return s;
      const Span piece = piece_of(plan, x);
      if (const int32_t s = convert<T, W>(part, r, place, piece.first, piece.end, e)) return s;
      if (const int32_t s = comm_.record(lane.converted[x.piece_slot], r, part.stream, e)) return s;
    }
  }
  bool any = false;
  for (int i = 1; i < n_; i++) {
    const int owner = (r + i) % n_;  // each rank begins with another
    const Span shard = shard_of(plan, x, owner);
    if (shard.packs == 0) continue;
    if (!any) {
      any = true;
      if (direct && x.index == 0)
        if (const int32_t s = comm_.await(Order::two_send_ready, r, lane.send, lane.ready, e)) return s;
      if (!direct)
        if (const int32_t s = comm_.await(Order::two_converted, r, lane.send, lane.converted[x.piece_slot], e))
          return s;
      for (int q = 0; q < n_; q++)
        if (const int32_t s = comm_.await(Order::two_box_free, r, lane.send, call.lane[q]->downloaded[x.slot], e))
          return s;
    }
    char* box = ring_[owner].pinned + x.slot * pinned_slot_;
    const int64_t at = box_offset(plan, owner, absent(call, owner), r, shard.packs);
    const Code c = copy_async(box + at, from + (shard.pack - x.pack) * kPackBytes, static_cast<size_t>(shard.bytes),
                              CopyKind::device_to_host, lane.send);
    if (const int32_t s = good(c, r, "copying to the host", e)) return s;
  }
  return any ? comm_.publish(lane.scattered[x.slot], Told::scattered, x.slot, r, lane.send, e) : AR_OK;
}

int32_t CopyEngine::collect(Call& call, const Shards& plan, const Chunk& x, int r, ar_error* e) {
  const Span shard = shard_of(plan, x, r);
  const int sources = plan.present - !absent(call, r);
  if (shard.packs == 0) return AR_OK;
  Lane& lane = *call.lane[r];
  if (!comm_.local(r)) return comm_.publish(lane.downloaded[x.slot], Told::downloaded, x.slot, r, nullptr, e);
  if (const int32_t s = use_device(r, e)) return s;
  if (const int32_t s = comm_.await(Order::two_receive_reuse, r, lane.receive, lane.summed[x.slot], e)) return s;
  for (int q = 0; q < n_; q++) {
    if (q == r || absent(call, q)) continue;
    if (const int32_t s = comm_.await(Order::two_arrived, r, lane.receive, call.lane[q]->scattered[x.slot], e))
      return s;
  }
  const int64_t bytes = (sources - 1) * shard.packs * kPackBytes + shard.bytes;
  const Code c = copy_async(ring_[r].receive + x.slot * receive_slot_, ring_[r].pinned + x.slot * pinned_slot_,
                            static_cast<size_t>(bytes), CopyKind::host_to_device, lane.receive);
  if (const int32_t s = good(c, r, "copying from the host", e)) return s;
  return comm_.publish(lane.downloaded[x.slot], Told::downloaded, x.slot, r, lane.receive, e);
}

// Sums the own shard, and uploads the total.
template <class T, class W>
int32_t CopyEngine::add(Call& call, Shards& plan, const Chunk& x, int r, ar_error* e) {
  const Span shard = shard_of(plan, x, r);
  if (shard.packs == 0) return AR_OK;
  if (!comm_.local(r)) return comm_.publish(call.lane[r]->shared[x.slot], Told::shared, x.slot, r, nullptr, e);
  const Part& part = call.parts[static_cast<size_t>(r)];
  Lane& lane = *call.lane[r];
  if (const int32_t s = use_device(r, e)) return s;
  const auto sum = [&](auto kernel) -> int32_t {
    const char* values = ring_[r].receive + x.slot * receive_slot_;
    for (int q = 0; q < n_; q++)
      if (q != r && !absent(call, q))
        kernel.peer[q] = reinterpret_cast<const Vec16*>(values + box_offset(plan, r, absent(call, r), q, shard.packs));
    return good(launch(kernel, grid(shard.packs), kPieceThreads, part.stream), r, "launching the sum", e);
  };
  if (const int32_t s = comm_.await(Order::two_collected, r, part.stream, lane.downloaded[x.slot], e)) return s;
  const Finish finish = finish_for(call, n_);
  char* total = nullptr;
  int32_t s = AR_OK;
  if (plan.direct) {
    total = part.recv.base + shard.pack * kPackBytes;
    s = sum(SumPiece<T, W>{part.send, part.recv, {}, shard.first, shard.end, finish, r, n_, part.absent, nullptr});
  } else {
    total = gather_at(r, x, shard.pack);
    s = sum(SumPiece<T, W, true>{
        part.send, part.recv, {}, shard.first, shard.end, finish, r, n_, part.absent, reinterpret_cast<Vec16*>(total)});
  }
  if (s == AR_OK) s = comm_.record(lane.summed[x.slot], r, part.stream, e);
  if (s == AR_OK) s = comm_.await(Order::two_added, r, lane.send, lane.summed[x.slot], e);
  for (int q = 0; q < n_ && s == AR_OK; q++)
    s = comm_.await(Order::two_total_free, r, lane.send, call.lane[q]->gathered[x.slot], e);
  if (s != AR_OK) return s;
  const Code c =
      copy_async(total_at(x, shard), total, static_cast<size_t>(shard.bytes), CopyKind::device_to_host, lane.send);
  if (const int32_t bad = good(c, r, "copying to the host", e)) return bad;
  plan.last_shared[r] = x.slot;
  return comm_.publish(lane.shared[x.slot], Told::shared, x.slot, r, lane.send, e);
}

int32_t CopyEngine::gather(Call& call, Shards& plan, const Chunk& x, int r, ar_error* e) {
  const Part& part = call.parts[static_cast<size_t>(r)];
  Lane& lane = *call.lane[r];
  const Span own = shard_of(plan, x, r);
  const int64_t split = own.packs > 0 ? own.pack : x.pack + x.packs;
  const Span before = span_of(plan, x.pack, split - x.pack);
  const Span after = span_of(plan, split + own.packs, x.pack + x.packs - split - own.packs);
  if (before.packs + after.packs == 0) return AR_OK;
  if (!comm_.local(r)) return comm_.publish(lane.gathered[x.slot], Told::gathered, x.slot, r, nullptr, e);
  if (const int32_t s = use_device(r, e)) return s;
  if (absent(call, r)) {
    if (plan.direct && plan.last_gathered[r] < 0)
      if (const int32_t s = comm_.await(Order::two_recv_ready, r, lane.receive, lane.ready, e)) return s;
    if (!plan.direct)
      if (const int32_t s = comm_.await(Order::two_gather_reuse, r, lane.receive, lane.stored[x.piece_slot], e))
        return s;
  }
  for (const Span* part_of : {&before, &after}) {
    if (part_of->packs == 0) continue;
    for (int q = 0; q < n_; q++) {
      const Span theirs = shard_of(plan, x, q);
      if (q == r || theirs.packs == 0 || (theirs.pack < split) != (part_of == &before)) continue;
      if (const int32_t s = comm_.await(Order::two_total_arrived, r, lane.receive, call.lane[q]->shared[x.slot], e))
        return s;
    }
    char* to = plan.direct ? part.recv.base + part_of->pack * kPackBytes : gather_at(r, x, part_of->pack);
    const Code c = copy_async(to, total_at(x, *part_of), static_cast<size_t>(part_of->bytes), CopyKind::host_to_device,
                              lane.receive);
    if (const int32_t s = good(c, r, "copying from the host", e)) return s;
  }
  plan.last_gathered[r] = x.slot;
  return comm_.publish(lane.gathered[x.slot], Told::gathered, x.slot, r, lane.receive, e);
}

template <class T, class W>
int32_t CopyEngine::store(Call& call, const Shards& plan, const Chunk& x, int r, ar_error* e) {
  if (!comm_.local(r)) return AR_OK;
  const Part& part = call.parts[static_cast<size_t>(r)];
  Lane& lane = *call.lane[r];
  if (const int32_t s = use_device(r, e)) return s;
  const Span piece = piece_of(plan, x);
  // A last chunk of a few packs may hold nothing for this rank to gather: then the chunk before it counts.
  const int slot = x.packs > shard_of(plan, x, r).packs ? x.slot : x.slot ^ 1;
  if (const int32_t s = comm_.await(Order::two_gathered, r, part.stream, lane.gathered[slot], e)) return s;
  FromWire<T, W> k{reinterpret_cast<const Vec16*>(ring_[r].gather + x.piece_slot * slot_bytes_), part.recv, piece.first,
                   piece.end};
  const Code c = launch(k, grid(piece.packs), kPieceThreads, part.stream);
  if (const int32_t s = good(c, r, "launching the store", e)) return s;
  return comm_.record(lane.stored[x.piece_slot], r, part.stream, e);
}

}  // namespace AR_NS
