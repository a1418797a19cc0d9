// The board and the staging of a communicator (shared.h): where they are, how ranks in all processes agree on one failure,
// and how the host finds ranks that disagree. Included by all_*.cpp.
#include "shared.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "comm.h"
#include "kernels/tell.h"
#include "transports/transport.h"

namespace AR_NS {

static_assert(kMaxRanks == 8 && kMaxBlocks == 128, "the board's lines");
constexpr uint32_t kStrided = 1 << 16;  // of a signature

int32_t Comm::map_board(const ar_options& o, ar_error* e) {
  void* host = nullptr;
  void* device = nullptr;
  if (!split() || o.shared_fd < 0) {
    if (const int32_t s = allocate_pinned(0, sizeof(Board), &host, &device, e)) return s;
    std::memset(host, 0, sizeof(Board));
  } else {
    shared_bytes_ = shared_bytes(o);
    struct stat st;
    if (fstat(o.shared_fd, &st) != 0 || st.st_size < shared_bytes_)
      return fail(e, AR_ERR_ARGUMENT, {}, "shared_fd %d: a file of at least %lld bytes is needed", o.shared_fd,
                  static_cast<long long>(shared_bytes_));
    const size_t bytes = static_cast<size_t>(shared_bytes_);
    host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, o.shared_fd, 0);
    if (host == MAP_FAILED)
      return fail(e, AR_ERR_ALLOC, {-1, -1, errno}, "mapping %lld bytes of shared memory: %s",
                  static_cast<long long>(shared_bytes_), std::strerror(errno));
    Code c = set_device(rank(locals_[0]).device);
    if (c == kOk) c = register_pinned(host, bytes);
    if (c != kOk) {
      munmap(host, bytes);
      if (!code_is_memory(c)) return runtime_error(c, locals_[0], "registering shared memory", e);
      return fail(e, AR_ERR_ALLOC, {locals_[0], -1, c}, "registering %lld bytes of shared memory: %s",
                  static_cast<long long>(shared_bytes_), code_text(c));
    }
    storage_->all.push_back({host, -1, shared_bytes_});
    c = host_to_device(&device, host);
    if (c != kOk) return runtime_error(c, locals_[0], "mapping shared memory", e);
    shared_ = static_cast<char*>(host);
    shared_device_ = static_cast<char*>(device);
  }
  board_ = static_cast<Board*>(host);
  board_device_ = static_cast<Board*>(device);
  return AR_OK;
}

int32_t Comm::staging(int path, int rank, int64_t at, int64_t bytes, void** host, void** device, ar_error* e) {
  if (!split()) return allocate_pinned(rank, bytes, host, device, e);
  if (shared_ == nullptr) return fail(e, AR_ERR_UNSUPPORTED, {}, "the ranks share no memory");
  const int64_t internal = kSharedBoard + world_ * kSharedInternal;
  const int64_t from = (path == AR_PATH_INTERNAL ? kSharedBoard : internal) + at;
  if (from + bytes > (path == AR_PATH_INTERNAL ? internal : shared_bytes_))
    return fail(e, AR_ERR_RUNTIME, {rank, -1, 0}, "path %s wants more staging than the shared file has",
                path_name(path));
  *host = shared_ + from;
  if (device != nullptr) *device = shared_device_ + from;
  return AR_OK;
}

void Comm::abort_own() { __atomic_store_n(&board_->abort[own_abort()].v, 1u, __ATOMIC_RELEASE); }

void Comm::abort_all() {
  for (int i = 0; i < aborts(); i++) __atomic_store_n(&board_->abort[i].v, 1u, __ATOMIC_RELEASE);
}

// The first process to see a failure decides what all report. mutex_ is held.
void Comm::latch(const ar_error& failure) {
  if (failed_) return;
  failed_ = true;
  failure_ = failure;
  uint32_t none = 0;
  if (__atomic_compare_exchange_n(&board_->latch.v, &none, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    board_->failure = failure;
    __atomic_store_n(&board_->latch.v, 2u, __ATOMIC_RELEASE);
  } else {
    // Whoever writes it needs a microsecond, or is dead.
    for (int i = 0; i < 100 && __atomic_load_n(&board_->latch.v, __ATOMIC_ACQUIRE) != 2; i++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (__atomic_load_n(&board_->latch.v, __ATOMIC_ACQUIRE) == 2) failure_ = board_->failure;
    failure_.message[sizeof(failure_.message) - 1] = failure_.phase[sizeof(failure_.phase) - 1] = 0;
  }
  abort_all();
}

int32_t Comm::lose(int r, const char* text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return AR_OK;
  ar_error gone;
  fail(&gone, AR_ERR_PEER_LOST, {r, -1, 0}, "%s; the communicator is unusable", text != nullptr ? text : "");
  latch(gone);
  return AR_OK;
}

// A rank that has closed the communicator and takes part in no more calls; -1: none.
int Comm::closed_peer() const {
  if (split())
    for (int r = 0; r < world_; r++)
      if (!local(r) && __atomic_load_n(&board_->closed[r].v, __ATOMIC_ACQUIRE) != 0) return r;
  return -1;
}

int32_t Comm::export_peer(int r, uint8_t* handle, ar_error* e) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (r < 0 || r >= world_ || !local(r))
    return fail(e, AR_ERR_ARGUMENT, {r, -1, 0}, "rank %d is not of this process", r);
  DeviceGuard guard;
  RelaxedCapture relaxed;
  return transports_[AR_PATH_PEER]->export_memory(r, handle, e);
}

int32_t Comm::import_peers(const uint8_t* handles, ar_error* e) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const int32_t s = latched(e)) return s;
  DeviceGuard guard;
  RelaxedCapture relaxed;
  return transports_[AR_PATH_PEER]->import_memory(handles, e);
}

int32_t Comm::check_peers(bool look, ar_error* e) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const int32_t s = latched(e)) return s;
  DeviceGuard guard;
  RelaxedCapture relaxed;
  return transports_[AR_PATH_PEER]->check_memory(look, e);
}

int32_t Comm::open_exported(int r, int of, const uint8_t* handle, void** out, ar_error* e) {
  const RankInfo& info = ranks_[static_cast<size_t>(r)];
  Code c = set_device(info.device);
  if (c == kOk) c = ipc_open(out, handle);
  if (c != kOk)
    return fail(e, AR_ERR_UNSUPPORTED, {r, info.device, c}, "rank %d cannot open the memory of rank %d: %s", r, of,
                code_text(c));
  Owned o;
  o.ptr = *out;
  o.device = info.device;
  o.opened = true;
  storage_->all.push_back(o);
  return AR_OK;
}

// From now on the memory that was exported is freed only after all have closed what they opened of it.
void Comm::note_opened() {
  for (int r = 0; r < world_; r++)
    (local(r) ? storage_->own_left : storage_->others_left).push_back(&board_->left[r].v);
}

int32_t Comm::publish(Mark& mark, Told what, int slot, int r, Stream stream, ar_error* e) {
  if (local(r))
    if (const int32_t s = record(mark, r, stream, e)) return s;
  if (!split()) return AR_OK;
  uint32_t* flag = &board_device_->told[r][static_cast<int>(what)][slot].v;
  const uint32_t value = ++told_[r][static_cast<int>(what)][slot];
  if (!local(r)) {
    mark.recorded = true;
    mark.told = flag;
    mark.value = value;
    mark.peer = r;
    return AR_OK;
  }
  const Code c = AR_NS::launch(Tell{flag, value}, 1, 32, stream);
  return c == kOk ? AR_OK : runtime_error(c, r, "raising a flag", e);
}

int32_t Comm::await_told(Order id, int r, Stream stream, const Mark& mark, ar_error* e) {
  const AwaitTold k{mark.told,
                    mark.value,
                    id,
                    abort_word(),
                    abort_base(),
                    aborts(),
                    timeout_ns_,
                    board_device_->records[r],
                    static_cast<uint32_t>(mark.peer),
                    static_cast<uint32_t>(calls_)};
  const Code c = AR_NS::launch(k, 1, 32, stream);
  return c == kOk ? AR_OK : runtime_error(c, r, "waiting for a flag", e);
}

int32_t Comm::sign(const Call& call, int path, ar_error* e) {
  for (int r : locals_) {
    const Signature s = signature(call, path, r);
    if (s.lines == nullptr) continue;
    Code c = set_device(rank(r).device);
    if (c == kOk) c = AR_NS::launch(Sign{s}, 1, 32, call.parts[static_cast<size_t>(r)].stream);
    if (c != kOk) return runtime_error(c, r, "leaving a signature", e);
  }
  return AR_OK;
}

Signature Comm::signature(const Call& call, int path, int r) const {
  Signature s{};
  if (counters_[r] == nullptr || (!split() && (!call.captured || call.one_capture))) return s;
  s.lines = board_device_->signatures[r];
  s.counter = counters_[r];
  s.what =
      static_cast<uint32_t>(call.type | call.wire << 4 | call.op << 8 | path << 12 | (call.captured ? 1 << 17 : 0)) |
      (call.strided ? kStrided : 0);
  s.call = static_cast<uint32_t>(call.number);
  s.count[0] = static_cast<uint32_t>(call.count);
  s.count[1] = static_cast<uint32_t>(call.count >> 32);
  return s;
}

namespace {

struct Signed {
  uint32_t w[8];  // kernels/sign.h
  bool whole() const { return w[0] != 0 && w[0] == w[4]; }
  bool same(const Signed& o) const {
    return (w[1] | kStrided) == (o.w[1] | kStrided) && w[2] == o.w[2] && w[3] == o.w[3] && w[5] == o.w[5];
  }
  std::string text() const {
    const uint32_t what = w[1];
    const uint64_t count = w[2] | static_cast<uint64_t>(w[3]) << 32;
    char t[160];
    std::snprintf(t, sizeof(t), "call %u, %s of %llu %s as %s, %s, %s%s", w[5],
                  (what >> 8 & 15) == AR_AVG ? "avg" : "sum", static_cast<unsigned long long>(count),
                  type_name(static_cast<int32_t>(what & 15)), type_name(static_cast<int32_t>(what >> 4 & 15)),
                  path_name(static_cast<int32_t>(what >> 12 & 15)), what >> 17 & 1 ? "captured" : "eager",
                  (what & kStrided) != 0 ? ", strided" : "");
    return t;
  }
};

Signed read_line(const SignatureLine& from) {
  Signed l;
  const auto word = [&](int i) { return __atomic_load_n(&from.w[i / 4].w[i % 4], __ATOMIC_ACQUIRE); };
  for (int i = 0; i < 8; i++) l.w[i] = word(i);
  // A device stores 16 bytes at once, this thread reads four: a half that was overwritten meanwhile has another count now.
  if (word(0) != l.w[0] || word(4) != l.w[4]) l.w[0] = 0;
  return l;
}

}  // namespace

// Compares what the ranks have signed; of the calls that are not over on all ranks no line is overwritten. Layout is each
// rank's own: strided or not may differ. mutex_ is held.
void Comm::find_mismatch() {
  if (failed_ || closed_) return;
  for (int slot = 0; slot < kSignatures; slot++) {
    Signed line[kMaxRanks];
    for (int r = 0; r < world_; r++) {
      line[r] = read_line(board_->signatures[r][slot]);
      for (int q = 0; q < r && line[r].whole(); q++) {
        if (!line[q].whole() || line[q].w[0] != line[r].w[0] || line[q].same(line[r])) continue;
        ar_error e;
        fail(&e, AR_ERR_MISMATCH, {r, rank(r).device, 0},
             "ranks disagree about a reduction: rank %d is in %s; rank %d is in %s; the communicator is unusable", q,
             line[q].text().c_str(), r, line[r].text().c_str());
        e.peer = q;
        e.call = line[r].w[5];
        latch(e);
        return;
      }
    }
  }
}

}  // namespace AR_NS
