// `nccl`: what the other paths do not serve, by a libnccl opened at run time.
//
// Every rank's call goes into one group, on the caller's stream. An F32 payload with a narrower wire is converted into a
// device buffer, reduced there and converted back; rows with a pitch are packed and unpacked the same way; an absent
// rank's part is zeroes. Bit-equality between ranks is NCCL's affair.
//
// Deadlines: communicators are made on a thread of their own, with a deadline. After that a watchdog times the host calls
// and the eager operations (by events of their own); what takes too long is ended with ncclCommAbort, which NCCL allows
// from another thread, and becomes the communicator's failure. Ranks of one call captured into one graph start together and
// need no deadline; captured into a graph per device they do, which is not there yet.
// ncclCommDestroy and ncclCommAbort return only when every graph that captured the communicator is gone: Close hands them
// to a thread of their own.
//
// Memory: none until the first converted or packed call; then one buffer per rank of the power of two that holds the wire
// values, at most 32 MiB (NCCL is within 3 % of its best rate there: 27.3 of 27.9 GB/s at 16 MiB, two H200 host-staged,
// NCCL 2.30.7, 2026-11-30); larger payloads in pieces. A larger buffer is made beside a smaller one, which a graph may use.
// Included by all_*.cpp.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "../kernels/pieces.h"
#include "nccl_library.h"
#include "transport.h"

namespace AR_NS {

namespace {

constexpr int64_t kLargestBuffer = 32 << 20;
constexpr int64_t kSmallestBuffer = 1 << 20;
constexpr auto kInitDeadline = std::chrono::seconds(60);

int nccl_type(int32_t t) {
  switch (t) {
    case AR_F32:
      return ar::nccl::kFloat32;
    case AR_F16:
      return ar::nccl::kFloat16;
    case AR_BF16:
      return ar::nccl::kBfloat16;
    case AR_F64:
      return ar::nccl::kFloat64;
    case AR_I64:
      return ar::nccl::kInt64;
    case AR_I32:
      return ar::nccl::kInt32;
    case AR_I8:
      return ar::nccl::kInt8;
    default:
      return ar::nccl::kUint8;
  }
}

// NCCL communicators of all ranks; shared with the threads that make and end them, which may outlive the transport.
struct NcclRanks {
  ar::nccl::Library lib;
  ar::nccl::Comm comm[kMaxRanks] = {};
  int device[kMaxRanks] = {};
  int n = 0;
  std::mutex mutex;
  std::condition_variable cv;
  bool made = false;
  int result = 0;
  std::string text;
  // The host call in flight, for the watchdog: when it began, 0 if none is. Nanoseconds of the steady clock.
  std::atomic<int64_t> since{0};
  std::atomic<bool> aborted{false};

  void abort() {
    if (aborted.exchange(true)) return;
    for (int r = 0; r < n; r++)
      if (comm[r] != nullptr) lib.api.CommAbort(comm[r]);
  }
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The whole of initialisation, on a thread of its own.
void make_ranks(std::shared_ptr<NcclRanks> x) {
  const ar::nccl::Api& api = x->lib.api;
  ar::nccl::UniqueId id;
  int result = api.GetUniqueId(&id);
  if (result == ar::nccl::kSuccess) result = api.GroupStart();
  for (int r = 0; r < x->n && result == ar::nccl::kSuccess; r++) {
    ar::nccl::Config config;
    set_device(x->device[r]);
    result = api.CommInitRankConfig(&x->comm[r], x->n, id, r, &config);
  }
  const int ended = api.GroupEnd();
  if (result == ar::nccl::kSuccess) result = ended;
  std::lock_guard<std::mutex> lock(x->mutex);
  x->result = result;
  if (result != ar::nccl::kSuccess) {
    const char* last = api.GetLastError(nullptr);
    x->text = std::string(api.GetErrorString(result)) + (last != nullptr && *last != 0 ? std::string(": ") + last : "");
  }
  x->made = true;
  x->cv.notify_all();
}

class Nccl final : public Transport {
 public:
  Nccl(Comm& comm, const NcclOptions& options) : comm_(comm), n_(comm.world()) {
    for (int r = 0; r < n_; r++)
      for (int q = 0; q < r; q++)
        if (comm.rank(q).device == comm.rank(r).device) {
          missing_ = "NCCL refuses two ranks on one GPU: ranks " + std::to_string(q) + " and " + std::to_string(r) +
                     " share device " + std::to_string(comm.rank(r).device);
          return;
        }
    if (options.path.empty()) {
      missing_ = kSimulated ? "emulated devices have no NCCL unless GGML_CUDA_NCCL_LIB names the emulated one"
                            : "no NCCL was named";
      return;
    }
    lib_ = ar::nccl::find(options.path, kSimulated, emulated_nccl_host(), options.p2p_disable);
    missing_ = lib_.missing;
  }
  ~Nccl() override {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      stop_ = true;
    }
    watch_cv_.notify_all();
    if (watchdog_.joinable()) watchdog_.join();
    if (ranks_ == nullptr) return;
    std::thread([ranks = std::move(ranks_)] {
      if (ranks->aborted) return;
      for (int r = 0; r < ranks->n; r++)
        if (ranks->comm[r] != nullptr) ranks->lib.api.CommDestroy(ranks->comm[r]);
    }).detach();
  }

  const std::string& missing() const override { return missing_; }
  int version() const override { return lib_.version; }
  const char* refuses(int32_t type, int32_t wire, int32_t op) const override {
    const bool real = type == AR_F32 || type == AR_F16 || type == AR_BF16;
    if (!real && op == AR_AVG) return "only sum exists for this type";
    if (type != wire && !with_types(type, wire, [](auto, auto) {})) return "there is no such conversion";
    return nullptr;
  }

  int32_t prepare(int64_t max_bytes, ar_error* e) override {
    if (max_bytes == 0 || n_ == 1) return AR_OK;
    if (const int32_t s = make(e)) return s;
    return need_buffer(std::min(max_bytes, kLargestBuffer), e);
  }

  int32_t enqueue(Call& call, ar_error* e) override {
    if (const int32_t s = make(e)) return s;
    const int64_t size = type_size(call.wire);
    const bool packed = call.wire != call.type || call.strided;
    if (packed)
      if (const int32_t s = need_buffer(std::min(call.count * size, kLargestBuffer), e)) return s;
    const int64_t step = packed ? kLargestBuffer / size : call.count;
    call.enqueued = true;
    if (!call.captured)
      if (const int32_t s = mark(call, begun_, e)) return s;
    for (int64_t first = 0; first < call.count; first += step) {
      const int64_t end = std::min(call.count, first + step);
      if (const int32_t s = piece(call, packed, first, end, e)) return s;
    }
    if (!call.captured) {
      if (const int32_t s = mark(call, ended_, e)) return s;
      watch();
    }
    return AR_OK;
  }

  void memory(int, int64_t* device, int64_t*) const override { *device = held_; }

 private:
  int32_t nccl_error(int result, int rank, const char* what, ar_error* e) const {
    const Where where{rank, rank >= 0 ? comm_.rank(rank).device : -1, result};
    if (ranks_ != nullptr && ranks_->aborted)
      return fail(e, AR_ERR_TIMEOUT, where, "NCCL took longer than %llu ms and was aborted (%s)",
                  static_cast<unsigned long long>(comm_.timeout_ns() / 1000000), what);
    const char* last = lib_.api.GetLastError(rank >= 0 && ranks_ != nullptr ? ranks_->comm[rank] : nullptr);
    return fail(e, AR_ERR_NCCL, where, "%s: %s (ncclResult %d)%s%s", what, lib_.api.GetErrorString(result), result,
                last != nullptr && *last != 0 ? ": " : "", last != nullptr ? last : "");
  }

  int32_t make(ar_error* e) {
    if (ranks_ != nullptr) return AR_OK;
    RelaxedCapture relaxed;
    auto x = std::make_shared<NcclRanks>();
    x->lib = lib_;
    x->n = n_;
    for (int r = 0; r < n_; r++) x->device[r] = comm_.rank(r).device;
    std::thread(make_ranks, x).detach();
    std::unique_lock<std::mutex> lock(x->mutex);
    if (!x->cv.wait_for(lock, kInitDeadline, [&] { return x->made; }))
      return fail(e, AR_ERR_TIMEOUT, {}, "NCCL %s was not ready after 60 s",
                  ar::nccl::version_text(lib_.version).c_str());
    if (x->result != ar::nccl::kSuccess)
      return fail(e, AR_ERR_NCCL, {-1, -1, x->result}, "starting NCCL %s: %s",
                  ar::nccl::version_text(lib_.version).c_str(), x->text.c_str());
    lock.unlock();
    ranks_ = std::move(x);
    comm_.note_allocation();
    return AR_OK;
  }

  int32_t need_buffer(int64_t bytes, ar_error* e) {
    if (bytes <= buffer_bytes_) return AR_OK;
    int64_t size = kSmallestBuffer;
    while (size < bytes) size *= 2;
    const size_t mark = comm_.storage_mark();
    void* made[kMaxRanks] = {};
    for (int r = 0; r < n_; r++)
      if (const int32_t s = comm_.allocate_device(r, size, &made[r], e)) {
        comm_.storage_rollback(mark);
        return s;
      }
    for (int r = 0; r < n_; r++) buffer_[r] = static_cast<char*>(made[r]);
    buffer_bytes_ = size;
    held_ += size;
    comm_.note_allocation();
    return AR_OK;
  }

  int32_t piece(Call& call, bool packed, int64_t first, int64_t end, ar_error* e) {
    const int64_t bytes = (end - first) * type_size(call.wire);
    for (int r = 0; r < n_; r++) {
      const Part& part = call.parts[static_cast<size_t>(r)];
      if (!packed && !part.absent) continue;
      Code c = set_device(comm_.rank(r).device);
      char* to = packed ? buffer_[r] : part.recv.base + first * type_size(call.type);
      if (c == kOk && part.absent) c = fill_async(to, 0, static_cast<size_t>(bytes), part.stream);
      if (c == kOk && packed && !part.absent) c = gather(call, part, to, first, end);
      if (c != kOk) return comm_.runtime_error(c, r, "packing for NCCL", e);
    }
    const ar::nccl::Api& api = lib_.api;
    ranks_->since = now_ns();
    int result = api.GroupStart();
    int at = -1;
    for (int r = 0; r < n_ && result == ar::nccl::kSuccess; r++) {
      const Part& part = call.parts[static_cast<size_t>(r)];
      char* recv = packed ? buffer_[r] : part.recv.base + first * type_size(call.type);
      const char* send = packed || part.absent ? recv : part.send.base + first * type_size(call.type);
      at = r;
      result = api.AllReduce(send, recv, static_cast<size_t>(end - first), nccl_type(call.wire),
                             call.op == AR_AVG ? ar::nccl::kAvg : ar::nccl::kSum, ranks_->comm[r], part.stream);
    }
    const int ended = api.GroupEnd();
    ranks_->since = 0;
    if (result != ar::nccl::kSuccess) return nccl_error(result, at, "ncclAllReduce", e);
    if (ended != ar::nccl::kSuccess) return nccl_error(ended, -1, "ncclGroupEnd", e);
    for (int r = 0; r < n_ && packed; r++) {
      Code c = set_device(comm_.rank(r).device);
      if (c == kOk) c = scatter(call, call.parts[static_cast<size_t>(r)], buffer_[r], first, end);
      if (c != kOk) return comm_.runtime_error(c, r, "unpacking for NCCL", e);
    }
    return AR_OK;
  }

  static int grid(int64_t packs) {
    return static_cast<int>(std::min<int64_t>((packs + kPieceThreads - 1) / kPieceThreads, kPieceBlocks));
  }
  // Elements [first, end) of the tensor to contiguous wire values, and back. Types without kernels go row by row.
  Code gather(const Call& call, const Part& part, char* to, int64_t first, int64_t end) const {
    Code c = kOk;
    const bool done = with_types(call.type, call.wire, [&](auto t, auto w) {
      using W = decltype(w);
      ToWire<decltype(t), W> k{part.send, reinterpret_cast<Vec16*>(to), first, end};
      c = launch(k, grid((end - first + kPerVec<W> - 1) / kPerVec<W>), kPieceThreads, part.stream);
    });
    return done ? c : rows(call, part.send, to, first, end, true, part.stream);
  }
  Code scatter(const Call& call, const Part& part, char* from, int64_t first, int64_t end) const {
    Code c = kOk;
    const bool done = with_types(call.type, call.wire, [&](auto t, auto w) {
      using W = decltype(w);
      FromWire<decltype(t), W> k{reinterpret_cast<const Vec16*>(from), part.recv, first, end};
      c = launch(k, grid((end - first + kPerVec<W> - 1) / kPerVec<W>), kPieceThreads, part.stream);
    });
    return done ? c : rows(call, part.recv, from, first, end, false, part.stream);
  }
  static Code rows(const Call& call, const View& v, char* flat, int64_t first, int64_t end, bool out, Stream stream) {
    const int64_t size = type_size(call.type);
    Code c = kOk;
    for (int64_t at = first; at < end && c == kOk;) {
      const int64_t row = at / v.cols, col = at % v.cols;
      const int64_t n = std::min(v.cols - col, end - at);
      char* tensor = v.base + row * v.pitch + col * size;
      char* packed = flat + (at - first) * size;
      c = copy_async(out ? packed : tensor, out ? tensor : packed, static_cast<size_t>(n * size),
                     CopyKind::device_to_device, stream);
      at += n;
    }
    return c;
  }

  // ---- the watchdog -------------------------------------------------------------------------------------------

  int32_t mark(Call& call, Mark* marks, ar_error* e) {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    for (int r = 0; r < n_; r++) {
      const Code c = set_device(comm_.rank(r).device);
      if (c != kOk) return comm_.runtime_error(c, r, "choosing the device", e);
      if (const int32_t s = comm_.record(marks[r], r, call.parts[static_cast<size_t>(r)].stream, e)) return s;
    }
    return AR_OK;
  }

  // In the emulator's stepped drive nothing runs by itself, so there is nothing for a thread to watch.
  void watch() {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      outstanding_ = true;
      if (!watchdog_.joinable() && !drive_is_stepped()) watchdog_ = std::thread([this] { watch_loop(); });
    }
    watch_cv_.notify_all();
  }
  void watch_loop() {
    std::unique_lock<std::mutex> lock(watch_mutex_);
    int64_t started[kMaxRanks] = {};
    for (;;) {
      watch_cv_.wait(lock, [&] { return stop_ || outstanding_; });
      if (stop_) return;
      const auto period =
          std::chrono::nanoseconds(std::min<int64_t>(static_cast<int64_t>(comm_.timeout_ns() / 8), 20000000));
      watch_cv_.wait_for(lock, period, [&] { return stop_; });
      if (stop_) return;
      RelaxedCapture relaxed;
      const int64_t now = now_ns(), limit = static_cast<int64_t>(comm_.timeout_ns());
      const int64_t since = ranks_->since;
      bool expired = since != 0 && now - since > limit, any = false;
      for (int r = 0; r < n_; r++) {
        bool begun = false, ended = false;
        if (event_query(begun_[r].event, &begun) != kOk || event_query(ended_[r].event, &ended) != kOk) continue;
        any |= !ended;
        if (!begun || ended) started[r] = 0;
        if (begun && !ended && started[r] == 0) started[r] = now;
        expired |= started[r] != 0 && now - started[r] > limit;
      }
      outstanding_ = any;
      if (!expired) continue;
      lock.unlock();
      comm_.expire_nccl();
      // On a thread of its own: it returns only when every graph that captured the communicator is gone.
      std::thread([ranks = ranks_] { ranks->abort(); }).detach();
      return;
    }
  }

  Comm& comm_;
  const int n_;
  ar::nccl::Library lib_;
  std::string missing_;
  std::shared_ptr<NcclRanks> ranks_;
  char* buffer_[kMaxRanks] = {};
  int64_t buffer_bytes_ = 0, held_ = 0;

  std::mutex watch_mutex_;
  std::condition_variable watch_cv_;
  std::thread watchdog_;
  bool stop_ = false, outstanding_ = false;
  Mark begun_[kMaxRanks], ended_[kMaxRanks];
};

}  // namespace

std::unique_ptr<Transport> make_nccl(Comm& comm, const NcclOptions& options) {
  return std::make_unique<Nccl>(comm, options);
}

}  // namespace AR_NS
