// `nccl`: what the other paths do not serve, by a libnccl opened at run time.
//
// Every rank's call goes into one group, on the caller's stream. An F32 payload with a narrower wire is converted into a
// device buffer, reduced there and converted back; rows with a pitch are packed and unpacked the same way; an absent
// rank's part is zeroes. Bit-equality between ranks is NCCL's affair.
//
// Deadlines: communicators are made on a thread of their own, with a deadline. After that a watchdog times the host calls,
// eager operations and replays; what takes too long is ended with ncclCommAbort, which NCCL allows from another thread, and
// becomes the communicator's failure. It times starts without ends. Eager ones are events: they cost the stream nothing, a
// mark is a launch of 2 us before NCCL and one after. An event of a graph cannot be asked about, so captured calls have
// marks (kernels/mark.h). A replay is not seen being launched, only its mark: while a graph holds the communicator the
// watchdog looks at them, a word per rank and at most 4 times a second with the default deadline of 10 s.
// ncclCommDestroy and ncclCommAbort return only when every graph that captured the communicator is gone: they run on
// threads of their own. Close aborts what graphs can still launch, so that a replay after it waits for nobody.
//
// Memory: a line of marks per rank, and from the first converted or packed call one buffer per rank of the power of two that
// holds the wire values, at most 32 MiB (NCCL is within 3 % of its best rate there: 27.3 of 27.9 GB/s at 16 MiB, two H200
// host-staged, NCCL 2.30.7, 2026-11-30); larger payloads in pieces. A larger buffer is made beside a smaller one, which a
// graph may use.
// Included by all_*.cpp.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>

#include "../kernels/mark.h"
#include "../kernels/pieces.h"
#include "../thread.h"
#include "nccl_library.h"
#include "transport.h"

namespace AR_NS {

namespace {

constexpr int64_t kLargestBuffer = 32 << 20;
constexpr int64_t kSmallestBuffer = 1 << 20;
constexpr int64_t kMarkBytes = 128;  // one line a rank
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
  int n = 0;                              // ranks in all
  std::vector<int> locals;                // of this process
  std::vector<void*> windows[kMaxRanks];  // NCCL's memory; freed after the communicator
  bool given = false;                     // the id is another process's, or for them
  ar::nccl::UniqueId id{};
  std::mutex mutex;
  std::condition_variable cv;
  bool made = false;
  int result = 0;
  std::string text;
  std::atomic<int64_t> since{0};  // of the host's call in flight, by now_ns; 0: none is
  std::atomic<bool> aborted{false};
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What the host is in, for the watchdog.
struct HostCall {
  explicit HostCall(NcclRanks& x) : ranks(x) { ranks.since = now_ns(); }
  ~HostCall() { ranks.since = 0; }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;
  NcclRanks& ranks;
};

void free_windows(NcclRanks& x, int r) {
  set_device(x.device[r]);
  for (void* p : x.windows[r]) x.lib.api.MemFree(p);
  x.windows[r].clear();
}

// A thread for each rank: every call returns only when the graphs are gone, and no rank may wait for another one's.
void abort_ranks(const std::shared_ptr<NcclRanks>& x) {
  if (x->aborted.exchange(true)) return;
  for (int r : x->locals)
    if (x->comm[r] != nullptr)
      quiet_thread([x, r] {
        x->lib.api.CommAbort(x->comm[r]);
        free_windows(*x, r);
      }).detach();
}

// The whole of initialisation, on a thread of its own.
void make_ranks(std::shared_ptr<NcclRanks> x) {
  const ar::nccl::Api& api = x->lib.api;
  int result = x->given ? ar::nccl::kSuccess : api.GetUniqueId(&x->id);
  if (result == ar::nccl::kSuccess) result = api.GroupStart();
  for (int r : x->locals) {
    if (result != ar::nccl::kSuccess) break;
    ar::nccl::Config config;
    set_device(x->device[r]);
    result = api.CommInitRankConfig(&x->comm[r], x->n, x->id, r, &config);
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
    for (int r : comm.locals())
      for (int q = 0; q < r; q++)
        if (comm.local(q) && comm.rank(q).device == comm.rank(r).device) {
          missing_ = "NCCL refuses two ranks on one GPU: ranks " + std::to_string(q) + " and " + std::to_string(r) +
                     " share device " + std::to_string(comm.rank(r).device);
          return;
        }
    if (options.path.empty()) {
      missing_ = kSimulated ? "emulated devices have no NCCL unless GGML_CUDA_NCCL_LIB names the emulated one"
                            : "no NCCL was named";
      return;
    }
    if (comm.split()) {
      if (kSimulated) missing_ = "the emulated NCCL serves one process";
      if (!kSimulated && options.id == nullptr) missing_ = "there is no NCCL id that the processes share";
      if (!missing_.empty()) return;
      std::memcpy(&id_, options.id, sizeof(id_));
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
    if (comm_.graphs() > 0 || eager_runs()) abort_ranks(ranks_);
    if (ranks_->aborted) return;
    quiet_thread([ranks = std::move(ranks_)] {
      for (int r : ranks->locals)
        if (ranks->comm[r] != nullptr) ranks->lib.api.CommDestroy(ranks->comm[r]);
      for (int r : ranks->locals) free_windows(*ranks, r);
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
    // Other processes pack or do not, by their layouts: all go in the same pieces.
    const int64_t step = packed || comm_.split() ? kLargestBuffer / size : call.count;
    call.enqueued = true;
    const HostCall timed(*ranks_);
    watch(call.captured);
    if (const int32_t s = comm_.sign(call, AR_PATH_NCCL, e)) return s;
    if (const int32_t s = mark(call, true, e)) return s;
    for (int64_t first = 0; first < call.count; first += step) {
      const int64_t end = std::min(call.count, first + step);
      if (const int32_t s = piece(call, packed, first, end, e)) return s;
    }
    return mark(call, false, e);
  }

  // All ranks register in one group: the call is collective.
  int32_t windows(int64_t bytes, ar_ptr* ptrs, ar_error* e) override {
    if (!missing_.empty()) return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing_.c_str());
    if (lib_.api.CommWindowRegister == nullptr)
      return fail(e, AR_ERR_UNSUPPORTED, {}, "NCCL %s has no symmetric windows: 2.27 or later has them",
                  ar::nccl::version_text(lib_.version).c_str());
    if (const int32_t s = make(e)) return s;
    const HostCall timed(*ranks_);
    watch(false);
    const ar::nccl::Api& api = lib_.api;
    void* made[kMaxRanks] = {};
    int result = ar::nccl::kSuccess, at = -1;
    const char* step = "ncclMemAlloc";
    for (int r : comm_.locals()) {
      at = r;
      if (const Code c = set_device(comm_.rank(r).device); c != kOk)
        return comm_.runtime_error(c, r, "choosing the device", e);
      if (result = api.MemAlloc(&made[r], static_cast<size_t>(bytes)); result != ar::nccl::kSuccess) break;
      ranks_->windows[r].push_back(made[r]);
    }
    if (result == ar::nccl::kSuccess) {
      step = "ncclCommWindowRegister";
      result = api.GroupStart();
      void* handle[kMaxRanks] = {};  // the communicator keeps what is behind it
      for (int r : comm_.locals()) {
        if (result != ar::nccl::kSuccess) break;
        at = r;
        set_device(comm_.rank(r).device);
        result = api.CommWindowRegister(ranks_->comm[r], made[r], static_cast<size_t>(bytes), &handle[r],
                                        ar::nccl::kWindowSymmetric);
      }
      const int ended = api.GroupEnd();
      if (result == ar::nccl::kSuccess) result = ended;
    }
    // What was allocated goes with the communicator.
    if (result != ar::nccl::kSuccess) return nccl_error(result, at, step, e);
    for (size_t i = 0; i < comm_.locals().size(); i++)
      ptrs[i] = static_cast<ar_ptr>(reinterpret_cast<uintptr_t>(made[comm_.locals()[i]]));
    held_ += bytes;
    comm_.note_allocation();
    return AR_OK;
  }

  void memory(int, int64_t* device, int64_t* pinned) const override {
    *device = held_;
    *pinned = marks_ != nullptr ? kMarkBytes : 0;
  }

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
    x->locals = comm_.locals();
    x->given = comm_.split();
    x->id = id_;
    for (int r : x->locals) x->device[r] = comm_.rank(r).device;
    if (marks_ == nullptr)
      if (const int32_t s = make_marks(e)) return s;
    quiet_thread([x] { make_ranks(x); }).detach();
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

  int32_t make_marks(ar_error* e) {
    void *host = nullptr, *device = nullptr;
    if (const int32_t s = comm_.allocate_pinned(comm_.locals()[0], n_ * kMarkBytes, &host, &device, e)) return s;
    std::memset(host, 0, static_cast<size_t>(n_ * kMarkBytes));
    for (int r : comm_.locals()) {
      Code c = set_device(comm_.rank(r).device);
      if (c == kOk) c = load_kernel<StreamMark>();
      if (c != kOk) return comm_.runtime_error(c, r, "loading the mark kernel", e);
    }
    marks_ = static_cast<char*>(host);
    marks_device_ = static_cast<char*>(device);
    return AR_OK;
  }

  int32_t need_buffer(int64_t bytes, ar_error* e) {
    if (bytes <= buffer_bytes_) return AR_OK;
    int64_t size = kSmallestBuffer;
    while (size < bytes) size *= 2;
    const size_t mark = comm_.storage_mark();
    void* made[kMaxRanks] = {};
    for (int r : comm_.locals())
      if (const int32_t s = comm_.allocate_device(r, size, &made[r], e)) {
        comm_.storage_rollback(mark);
        return s;
      }
    for (int r : comm_.locals()) buffer_[r] = static_cast<char*>(made[r]);
    buffer_bytes_ = size;
    held_ += size;
    comm_.note_allocation();
    return AR_OK;
  }

  int32_t piece(Call& call, bool packed, int64_t first, int64_t end, ar_error* e) {
    const int64_t bytes = (end - first) * type_size(call.wire);
    for (int r : comm_.locals()) {
      const Part& part = call.parts[static_cast<size_t>(r)];
      if (!packed && !part.absent) continue;
      Code c = set_device(comm_.rank(r).device);
      char* to = packed ? buffer_[r] : part.recv.base + first * type_size(call.type);
      if (c == kOk && part.absent) c = fill_async(to, 0, static_cast<size_t>(bytes), part.stream);
      if (c == kOk && packed && !part.absent) c = gather(call, part, to, first, end);
      if (c != kOk) return comm_.runtime_error(c, r, "packing for NCCL", e);
    }
    const ar::nccl::Api& api = lib_.api;
    int result = api.GroupStart();
    int at = -1;
    for (int r : comm_.locals()) {
      if (result != ar::nccl::kSuccess) break;
      const Part& part = call.parts[static_cast<size_t>(r)];
      char* recv = packed ? buffer_[r] : part.recv.base + first * type_size(call.type);
      const char* send = packed || part.absent ? recv : part.send.base + first * type_size(call.type);
      at = r;
      result = api.AllReduce(send, recv, static_cast<size_t>(end - first), nccl_type(call.wire),
                             call.op == AR_AVG ? ar::nccl::kAvg : ar::nccl::kSum, ranks_->comm[r], part.stream);
    }
    const int ended = api.GroupEnd();
    if (result != ar::nccl::kSuccess) return nccl_error(result, at, "ncclAllReduce", e);
    if (ended != ar::nccl::kSuccess) return nccl_error(ended, -1, "ncclGroupEnd", e);
    for (int r : comm_.locals()) {
      if (!packed) break;
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

  int32_t mark(Call& call, bool start, ar_error* e) {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    for (int r : comm_.locals()) {
      const Stream stream = call.parts[static_cast<size_t>(r)].stream;
      Code c = set_device(comm_.rank(r).device);
      if (c == kOk && call.captured) {
        auto* word = reinterpret_cast<uint32_t*>(marks_device_ + r * kMarkBytes);
        c = launch(StreamMark{word, start ? 1 : 0}, 1, StreamMark::kMaxThreads, stream);
      }
      if (c != kOk) return comm_.runtime_error(c, r, "marking the stream", e);
      if (call.captured) continue;
      if (const int32_t s = comm_.record(start ? begun_[r] : ended_[r], r, stream, e)) return s;
    }
    return AR_OK;
  }
  uint32_t replay_runs(int r) const { return *reinterpret_cast<const volatile uint32_t*>(marks_ + r * kMarkBytes); }
  bool eager_runs() const {
    for (const Mark& m : ended_) {
      bool ended = true;
      if (m.recorded && event_query(m.event, &ended) == kOk && !ended) return true;
    }
    return false;
  }

  // In the emulator's stepped drive nothing runs by itself, so there is nothing for a thread to watch.
  void watch(bool captured) {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      (captured ? captured_ : outstanding_) = true;
      if (!watchdog_.joinable() && !drive_is_stepped()) watchdog_ = quiet_thread([this] { watch_loop(); });
    }
    watch_cv_.notify_all();
  }

  // How long one thing has been seen running; 0 is nothing.
  struct Running {
    uint32_t what = 0;
    int64_t since = 0;
    bool longer_than(int64_t limit, uint32_t now_is, int64_t now) {
      if (now_is != what) since = now;
      what = now_is;
      return what != 0 && now - since > limit;
    }
  };

  void watch_loop() {
    const int64_t limit = static_cast<int64_t>(comm_.timeout_ns());
    const auto period = std::chrono::nanoseconds(std::clamp<int64_t>(limit / 32, 1000000, 250000000));
    Running eager[kMaxRanks], replay[kMaxRanks];
    std::unique_lock<std::mutex> lock(watch_mutex_);
    for (;;) {
      watch_cv_.wait(lock, [&] { return stop_ || outstanding_ || captured_; });
      watch_cv_.wait_for(lock, period, [&] { return stop_; });
      if (stop_) return;
      RelaxedCapture relaxed;
      const int64_t now = now_ns(), since = ranks_->since;
      bool expired = since != 0 && now - since > limit, any_eager = since != 0, any_replay = comm_.graphs() > 0;
      uint32_t running = 0;  // ranks, by bit
      for (int r : comm_.locals()) {
        bool begun = false, ended = true;
        if (outstanding_ &&
            (event_query(begun_[r].event, &begun) != kOk || event_query(ended_[r].event, &ended) != kOk))
          ended = true;
        any_eager |= !ended;
        expired |= eager[r].longer_than(limit, begun && !ended, now);
        const uint32_t stamp = replay_runs(r);
        any_replay |= stamp != 0;
        expired |= replay[r].longer_than(limit, stamp, now);
        if (eager[r].what != 0 || stamp != 0) running |= 1u << r;
      }
      outstanding_ = any_eager;
      captured_ = any_replay;
      if (!expired) continue;
      lock.unlock();
      comm_.expire_nccl(running);
      abort_ranks(ranks_);
      return;
    }
  }

  Comm& comm_;
  const int n_;
  ar::nccl::UniqueId id_{};
  ar::nccl::Library lib_;
  std::string missing_;
  std::shared_ptr<NcclRanks> ranks_;
  char* buffer_[kMaxRanks] = {};
  int64_t buffer_bytes_ = 0, held_ = 0;

  std::mutex watch_mutex_;
  std::condition_variable watch_cv_;
  std::thread watchdog_;
  bool stop_ = false;
  bool outstanding_ = false;  // an eager call may run
  bool captured_ = false;     // a graph may be launched
  char *marks_ = nullptr, *marks_device_ = nullptr;
  Mark begun_[kMaxRanks], ended_[kMaxRanks];
};

}  // namespace

static_assert(sizeof(ar::nccl::UniqueId) == AR_NCCL_ID_BYTES, "ncclUniqueId");

int32_t nccl_id(const char* path, int32_t p2p_disable, uint8_t* out, ar_error* e) {
  if (kSimulated) return fail(e, AR_ERR_UNSUPPORTED, {}, "the emulated NCCL serves one process");
  if (path == nullptr || *path == 0) return fail(e, AR_ERR_UNSUPPORTED, {}, "no NCCL was named");
  const ar::nccl::Library lib = ar::nccl::find(path, kSimulated, emulated_nccl_host(), p2p_disable != 0);
  if (!lib.missing.empty()) return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", lib.missing.c_str());
  ar::nccl::UniqueId id;
  const int result = lib.api.GetUniqueId(&id);
  if (result != ar::nccl::kSuccess)
    return fail(e, AR_ERR_NCCL, {-1, -1, result}, "ncclGetUniqueId: %s", lib.api.GetErrorString(result));
  std::memcpy(out, &id, sizeof(id));
  return AR_OK;
}

std::unique_ptr<Transport> make_nccl(Comm& comm, const NcclOptions& options) {
  return std::make_unique<Nccl>(comm, options);
}

}  // namespace AR_NS
