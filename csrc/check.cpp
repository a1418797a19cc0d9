// What a call must be before anything of it is enqueued. Included by all_*.cpp.
#include "comm.h"
#include "transports/transport.h"

namespace AR_NS {

namespace {

int64_t pitch_of(const ar_buffer& b, int64_t pitch) {
  const int64_t cols = b.rows > 1 ? b.count / b.rows : b.count;
  return b.rows > 1 && pitch != 0 ? pitch : cols * type_size(b.type);
}
// Bytes from the first to past the last element.
int64_t extent(const ar_buffer& b, int64_t pitch) {
  if (b.rows <= 1) return b.count * type_size(b.type);
  return pitch_of(b, pitch) * (b.rows - 1) + b.count / b.rows * type_size(b.type);
}

View view_of(const ar_buffer& b, ar_ptr ptr, int64_t pitch) {
  View v;
  v.base = reinterpret_cast<char*>(static_cast<uintptr_t>(ptr));
  v.cols = b.rows > 1 ? b.count / b.rows : b.count;
  v.pitch = pitch_of(b, pitch);
  v.contiguous = b.rows <= 1 || v.pitch == v.cols * type_size(b.type);
  v.vec = v.contiguous && ptr % 16 == 0;
  return v;
}

}  // namespace

int32_t Comm::check_buffer(const ar_buffer& b, int rank, ar_error* e) const {
  const Where where{rank, ranks_[static_cast<size_t>(rank)].device, 0};
  const int32_t size = type_size(b.type);
  if (b.rows < 0 || (b.rows > 1 && b.count % b.rows != 0))
    return fail(e, AR_ERR_ARGUMENT, where, "%d rows do not divide %lld elements", b.rows,
                static_cast<long long>(b.count));
  const struct {
    const char* name;
    ar_ptr ptr;
    int64_t pitch;
    bool used;
  } sides[] = {{"send", b.send, b.send_pitch, !b.absent}, {"recv", b.recv, b.recv_pitch, true}};
  for (const auto& side : sides) {
    if (!side.used) continue;
    if (side.ptr == 0) return fail(e, AR_ERR_ARGUMENT, where, "%s is 0", side.name);
    if (side.ptr % static_cast<uint64_t>(size) != 0)
      return fail(e, AR_ERR_ARGUMENT, where, "%s 0x%llx is not aligned to its elements of %d bytes", side.name,
                  static_cast<unsigned long long>(side.ptr), size);
    if (side.pitch != 0 && (side.pitch % size != 0 || side.pitch < b.count / (b.rows > 1 ? b.rows : 1) * size))
      return fail(e, AR_ERR_ARGUMENT, where, "%s_pitch %lld: allowed are 0 and multiples of %d from %lld on", side.name,
                  static_cast<long long>(side.pitch), size,
                  static_cast<long long>(b.count / (b.rows > 1 ? b.rows : 1) * size));
    if (!check_range(reinterpret_cast<void*>(static_cast<uintptr_t>(side.ptr)),
                     static_cast<size_t>(extent(b, side.pitch)), where.device))
      return fail(e, AR_ERR_ARGUMENT, where,
                  "%s 0x%llx: %lld bytes are not all in one allocation that device %d can reach", side.name,
                  static_cast<unsigned long long>(side.ptr), static_cast<long long>(extent(b, side.pitch)),
                  where.device);
  }
  if (!b.absent) {
    const uint64_t s0 = b.send, s1 = s0 + static_cast<uint64_t>(extent(b, b.send_pitch));
    const uint64_t r0 = b.recv, r1 = r0 + static_cast<uint64_t>(extent(b, b.recv_pitch));
    const bool same = s0 == r0 && pitch_of(b, b.send_pitch) == pitch_of(b, b.recv_pitch);
    if (!same && s0 < r1 && r0 < s1)
      return fail(e, AR_ERR_ARGUMENT, where,
                  "send [0x%llx, 0x%llx) and recv [0x%llx, 0x%llx) overlap in part: they must be equal or disjoint",
                  static_cast<unsigned long long>(s0), static_cast<unsigned long long>(s1),
                  static_cast<unsigned long long>(r0), static_cast<unsigned long long>(r1));
  }
  return AR_OK;
}

int32_t Comm::check(const ar_buffer* bufs, int32_t n, int32_t path, int32_t wire, ar_error* e) const {
  const int ranks = static_cast<int>(locals_.size());
  if (bufs == nullptr || n != ranks)
    return fail(e, AR_ERR_ARGUMENT, {}, "%d buffers for %d ranks%s: one per rank is needed", bufs == nullptr ? 0 : n,
                ranks, split() ? " of this process" : "");
  const ar_buffer& a = bufs[0];
  if (type_size(a.type) == 0) return fail(e, AR_ERR_ARGUMENT, {}, "type %d is unknown", a.type);
  if (a.op != AR_SUM && a.op != AR_AVG)
    return fail(e, AR_ERR_ARGUMENT, {}, "op %d: allowed are %d (sum) and %d (avg)", a.op, AR_SUM, AR_AVG);
  if (a.count < 0 || a.count > INT64_MAX / 8)
    return fail(e, AR_ERR_ARGUMENT, {}, "count %lld is out of range", static_cast<long long>(a.count));
  const int first = locals_[0];
  for (int i = 1; i < n; i++) {
    const ar_buffer& b = bufs[i];
    const int r = locals_[static_cast<size_t>(i)];
    const Where where{r, ranks_[static_cast<size_t>(r)].device, 0};
    if (b.count != a.count)
      return fail(e, AR_ERR_ARGUMENT, where, "count is %lld on rank %d and %lld on rank %d",
                  static_cast<long long>(a.count), first, static_cast<long long>(b.count), r);
    if (b.type != a.type)
      return fail(e, AR_ERR_ARGUMENT, where, "type is %s on rank %d and %s on rank %d", type_name(a.type), first,
                  type_name(b.type), r);
    if (b.op != a.op)
      return fail(e, AR_ERR_ARGUMENT, where, "op is %d on rank %d and %d on rank %d", a.op, first, b.op, r);
    if (b.rows != a.rows)
      return fail(e, AR_ERR_ARGUMENT, where, "rows is %d on rank %d and %d on rank %d", a.rows, first, b.rows, r);
  }
  if (path < 0 || path >= AR_PATHS) return fail(e, AR_ERR_ARGUMENT, {}, "path %d is unknown", path);
  if (path == AR_PATH_NONE && world_ > 1 && a.count > 0)
    return fail(e, AR_ERR_ARGUMENT, {}, "path none serves one rank or no elements, not %d ranks", world_);
  if (type_size(wire) == 0) return fail(e, AR_ERR_ARGUMENT, {}, "wire %d is unknown", wire);
  if (a.count == 0) return AR_OK;
  for (int i = 0; i < n; i++)
    if (const int32_t s = check_buffer(bufs[i], locals_[static_cast<size_t>(i)], e)) return s;
  return AR_OK;
}

void fill_parts(const ar_buffer* bufs, const std::vector<int>& locals, std::vector<Part>& parts, Call& call) {
  call.count = bufs[0].count;
  call.type = bufs[0].type;
  call.op = bufs[0].op;
  call.strided = false;
  for (size_t i = 0; i < locals.size(); i++) {
    const ar_buffer& b = bufs[i];
    Part& p = parts[static_cast<size_t>(locals[i])];
    p.stream = reinterpret_cast<Stream>(static_cast<uintptr_t>(b.stream));
    p.absent = b.absent != 0;
    p.send = view_of(b, p.absent ? 0 : b.send, b.send_pitch);
    p.recv = view_of(b, b.recv, b.recv_pitch);
    call.strided |= !p.recv.contiguous || (!p.absent && !p.send.contiguous);
  }
}

}  // namespace AR_NS
