// The communicator (comm.h): making it, one call from the check to the end events, failures, the end.
// Included by all_*.cpp.
#include "comm.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "transports/transport.h"

namespace AR_NS {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDefaultLinkGbs = 25;  // PCIe 4 x16
constexpr int kDefaultTimeoutMs = 10000;

struct Held {
  std::shared_ptr<Storage> storage;
  std::shared_ptr<std::atomic<bool>> gone;
  std::shared_ptr<std::atomic<int>> graphs;  // of the communicator
};
// Runs when a graph that captured the communicator ends, maybe on the driver's thread: no runtime call, no free.
void drop_held(void* arg) {
  Held* held = static_cast<Held*>(arg);
  held->gone->store(true);
  held->graphs->fetch_sub(1);
  delete held;
}

const char* phase_name(uint32_t phase) {
  switch (static_cast<Phase>(phase)) {
    case Phase::internal_data:
      return "internal data";
    case Phase::internal_flag:
      return "internal flag";
    case Phase::peer_data:
      return "peer data";
    case Phase::peer_flag:
      return "peer flag";
    case Phase::peer_scatter:
      return "two-shot scatter";
    case Phase::peer_gather:
      return "two-shot gather";
    case Phase::told:
      return "copy-engine flag";
    default:
      return "unknown";
  }
}

}  // namespace

Comm::Comm() = default;
Comm::~Comm() = default;

int32_t Comm::create(const ar_options& o, ar_comm** out, ar_error* e) {
  reap();
  if (o.world < 1 || o.world > AR_MAX_RANKS)
    return fail(e, AR_ERR_ARGUMENT, {}, "%d ranks: 1 to %d are allowed", o.world, AR_MAX_RANKS);
  if (o.ring_bytes != 0 && (o.ring_bytes < (1 << 20) || o.ring_bytes > (256 << 20)))
    return fail(e, AR_ERR_ARGUMENT, {}, "ring_bytes %lld: 1 MiB to 256 MiB are allowed",
                static_cast<long long>(o.ring_bytes));
  const int64_t ring = o.ring_bytes != 0 ? o.ring_bytes : kDefaultRing;
  if (o.chunk_bytes != 0 && (o.chunk_bytes < (64 << 10) || o.chunk_bytes > ring / 2))
    return fail(e, AR_ERR_ARGUMENT, {}, "chunk_bytes %lld: 64 KiB to half the ring (%lld) are allowed",
                static_cast<long long>(o.chunk_bytes), static_cast<long long>(ring / 2));
  if (o.blocks < 0 || o.blocks > kMaxBlocks)
    return fail(e, AR_ERR_ARGUMENT, {}, "blocks %d: 1 to %d are allowed, 0 is the default", o.blocks, kMaxBlocks);
  if (o.spin_timeout_ms < 0 || o.spin_timeout_ms > 3600000)
    return fail(e, AR_ERR_ARGUMENT, {}, "spin_timeout_ms %d: 1 to 3600000 are allowed, 0 is the default",
                o.spin_timeout_ms);
  if (o.locals < 0 || o.locals > o.world || (o.locals > 0 && o.ranks == nullptr))
    return fail(e, AR_ERR_ARGUMENT, {}, "locals %d: 0 (all) to world (%d) are allowed, with their numbers", o.locals,
                o.world);
  for (int i = 0; i < o.locals; i++)
    if (o.ranks[i] < 0 || o.ranks[i] >= o.world || (i > 0 && o.ranks[i] <= o.ranks[i - 1]))
      return fail(e, AR_ERR_ARGUMENT, {}, "ranks[%d] is %d: ascending numbers below %d are allowed", i, o.ranks[i],
                  o.world);
  std::unique_ptr<Comm> c(new (std::nothrow) Comm);
  if (c == nullptr) return fail(e, AR_ERR_ALLOC, {}, "no host memory");
  c->backend = AR_NS::backend();
  DeviceGuard guard;
  const int32_t s = c->setup(o, e);
  if (s != AR_OK) {
    for (auto& t : c->transports_) t.reset();
    if (c->storage_ != nullptr) reap_later(std::move(c->storage_));
    reap();
    return s;
  }
  *out = c.release();
  return AR_OK;
}

int32_t Comm::setup(const ar_options& o, ar_error* e) {
  world_ = o.world;
  ring_bytes_ = o.ring_bytes != 0 ? o.ring_bytes : kDefaultRing;
  chunk_bytes_ = o.chunk_bytes;
  blocks_ = o.blocks;
  timeout_ns_ = static_cast<uint64_t>(o.spin_timeout_ms != 0 ? o.spin_timeout_ms : kDefaultTimeoutMs) * 1000000u;
  noop_ = o.noop != 0;
  first_epoch_ = o.first_epoch;
  storage_ = std::make_shared<Storage>();
  parts_.resize(static_cast<size_t>(world_));
  for (int i = 0; i < (o.locals > 0 ? o.locals : world_); i++) locals_.push_back(o.locals > 0 ? o.ranks[i] : i);
  int count = 0;
  Code c = device_count(&count);
  if (c != kOk) return runtime_error(c, -1, "counting devices", e);
  if (count == 0) return fail(e, AR_ERR_NO_DEVICE, {}, "there is no device");
  ranks_.resize(static_cast<size_t>(world_));
  for (int r = 0; r < world_; r++) {
    RankInfo& info = ranks_[static_cast<size_t>(r)];
    info.device = o.devices != nullptr ? o.devices[r] : r;
    info.local = std::find(locals_.begin(), locals_.end(), r) != locals_.end();
    info.link_gbs = o.link_gbs != nullptr && o.link_gbs[r] > 0 ? o.link_gbs[r] : kDefaultLinkGbs;
    if (!info.local) continue;
    if (info.device < 0 || info.device >= count)
      return fail(e, AR_ERR_NO_DEVICE, {r, info.device, 0}, "rank %d asks for device %d: there are %d", r, info.device,
                  count);
    c = set_device(info.device);
    if (c == kOk) c = device_info(info.device, &info.info);
    if (c != kOk) return runtime_error(c, r, "looking at a device", e);
  }

  if (const int32_t s = map_board(o, e)) return s;

  // The table of transports: one line each.
  transports_[AR_PATH_INTERNAL] = make_internal(*this);
  transports_[AR_PATH_COPY_ENGINE] = make_copy_engine(*this);
  transports_[AR_PATH_PEER] = make_peer(*this, o.peer != 0);
  NcclOptions nccl;
  nccl.path = o.nccl_lib != nullptr ? o.nccl_lib : "";
  nccl.p2p_disable = o.nccl_p2p_disable != 0;
  nccl.id = o.nccl_id;
  transports_[AR_PATH_NCCL] = make_nccl(*this, nccl);
  for (auto& t : transports_) {
    if (t == nullptr || !t->missing().empty()) continue;
    if (const int32_t s = t->prepare(0, e)) return s;
  }
  return AR_OK;
}

int32_t Comm::has_path(int32_t path, char* reason, size_t n) const {
  std::string why;
  if (path < 0 || path >= AR_PATHS)
    why = "no such path";
  else if (path != AR_PATH_NONE && transports_[path] == nullptr)
    why = std::string("this version has no ") + path_name(path) + " path";
  else if (path != AR_PATH_NONE)
    why = transports_[path]->missing();
  if (reason != nullptr && n > 0) std::snprintf(reason, n, "%s", why.c_str());
  return why.empty();
}

int32_t Comm::allreduce(const ar_buffer* bufs, int32_t n, int32_t path, int32_t wire, ar_error* e) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const int32_t s = latched(e)) return s;
  if (const int r = closed_peer(); r >= 0)
    return fail(e, AR_ERR_CLOSED, {r, -1, 0}, "rank %d has closed the communicator", r);
  if (const int32_t s = check(bufs, n, path, wire, e)) return s;
  if (bufs[0].count == 0) {
    path_calls_[AR_PATH_NONE]++;
    return AR_OK;
  }
  Call call{parts_};
  fill_parts(bufs, locals_, parts_, call);
  call.wire = wire;
  call.number = calls_;
  if (path != AR_PATH_NONE) {
    char reason[256];
    if (!has_path(path, reason, sizeof(reason))) return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", reason);
    if (const char* why = transports_[path]->refuses(call.type, wire, call.op))
      return fail(e, AR_ERR_UNSUPPORTED, {}, "path %s does not serve type %s with wire %s: %s", path_name(path),
                  type_name(call.type), type_name(wire), why);
  }
  DeviceGuard guard;
  if (const int32_t s = look_at_captures(call, e)) return s;
  if (path == AR_PATH_COPY_ENGINE && call.captured && !call.one_capture)
    return fail(e, AR_ERR_NOT_CAPTURABLE, {},
                "path copy-engine can be captured into one graph over all devices, not into one graph per %s",
                split() ? "process" : "device");

  int32_t s = AR_OK;
  ar_error local;
  clear(&local);
  if (!noop_) {
    s = begin(call, &local);
    if (s == AR_OK) s = path == AR_PATH_NONE ? copy_alone(call, &local) : transports_[path]->enqueue(call, &local);
    if (s == AR_OK) s = end(call, &local);
  }
  if (s != AR_OK) {
    if (call.enqueued && call.captured) {
      std::string text = local.message;
      std::snprintf(local.message, sizeof(local.message), "%.400s; part of the call is in the capture: abandon it",
                    text.c_str());
    } else if (call.enqueued) {
      // Peers would wait for what will never come: end them now.
      latch(local);
      local = failure_;
    }
    if (e != nullptr) *e = local;
    return s;
  }
  calls_++;
  path_calls_[path]++;
  path_bytes_[path] += static_cast<uint64_t>(call.count * type_size(call.type));
  return AR_OK;
}

// All streams eager, or all captured: into one graph, or into several with all ranks of a device in the same one.
int32_t Comm::look_at_captures(Call& call, ar_error* e) {
  CaptureInfo info[kMaxRanks];
  int captured = 0;
  for (int r : locals_) {
    const Stream stream = parts_[static_cast<size_t>(r)].stream;
    Code c = stream == nullptr ? set_device(rank(r).device) : kOk;
    if (c == kOk) c = capture_info(stream, &info[r]);
    if (c != kOk) return runtime_error(c, r, "asking whether the stream is being captured", e);
    if (info[r].state == Capturing::invalidated)
      return fail(e, AR_ERR_RUNTIME, {r, rank(r).device, 0}, "the capture of the stream of rank %d is no longer valid",
                  r);
    captured += info[r].state == Capturing::active;
  }
  for (int r = 0; r < world_; r++) call.lane[r] = &eager_.lane[r];
  if (captured == 0) return AR_OK;
  const int streams = static_cast<int>(locals_.size());
  if (captured != streams)
    return fail(e, AR_ERR_CAPTURE_MIXED, {}, "%d of %d streams are being captured: all or none must be", captured,
                streams);
  call.captured = true;
  call.one_capture = !split();
  for (int r : locals_) {
    call.one_capture &= info[r].id == info[locals_[0]].id;
    for (int q = 0; q < r; q++)
      if (local(q) && rank(q).device == rank(r).device && info[q].id != info[r].id)
        return fail(e, AR_ERR_CAPTURE_MIXED, {r, rank(r).device, 0},
                    "ranks %d and %d share device %d but are captured into different graphs", q, r, rank(r).device);
  }
  for (int r : locals_)
    if (const int32_t s = lanes_for(info[r], r, &call.lane[r], e)) return s;
  return AR_OK;
}

int32_t Comm::lanes_for(const CaptureInfo& info, int rank, Lane** lane, ar_error* e) {
  Lanes* found = nullptr;
  for (auto& l : captures_)
    if (l->capture == info.id) found = l.get();
  for (auto& l : captures_) {
    if (found != nullptr) break;
    bool over = l->graph_gone == nullptr || l->graph_gone->load();
    for (int r : locals_) {
      if (over) break;
      // Streams that a capture pulled in stay in it until it ends; a recorded download says that this one was.
      CaptureInfo now;
      const Lane& lane = l->lane[r];
      if ((lane.downloaded[0].recorded || lane.downloaded[1].recorded) && capture_info(lane.receive, &now) == kOk)
        over = now.state == Capturing::none;
    }
    if (over) {
      l->forget();
      found = l.get();
    }
  }
  if (found == nullptr) {
    captures_.push_back(std::make_unique<Lanes>());
    found = captures_.back().get();
  }
  if (found->capture != info.id) {
    auto held = std::make_unique<Held>();
    held->storage = storage_;
    held->gone = std::make_shared<std::atomic<bool>>(false);
    held->graphs = graphs_;
    found->graph_gone = held->gone;
    const Code c = graph_retain(info, held.get(), drop_held);
    if (c != kOk) {
      found->graph_gone.reset();
      return runtime_error(c, rank, "tying memory to the graph", e);
    }
    held.release();
    graphs_->fetch_add(1);
    found->capture = info.id;
  }
  *lane = &found->lane[rank];
  return AR_OK;
}

int32_t Comm::begin(Call& call, ar_error* e) {
  for (int r : locals_) {
    Lane& lane = *call.lane[r];
    const Stream stream = parts_[static_cast<size_t>(r)].stream;
    // A handle may be used again after its stream was destroyed, an identity is not. Asking a stream in capture for its
    // identity ends the capture (two H200, CUDA 13.0); there a wait is an edge of the graph and costs nothing.
    const uint64_t id = call.captured ? 0 : stream_identity(stream);
    if (lane.end.recorded && (id == 0 || id != lane.last)) {
      const Code c = stream == nullptr ? set_device(rank(r).device) : kOk;
      if (c != kOk) return runtime_error(c, r, "choosing the device", e);
      if (const int32_t s = await(Order::call_order, r, stream, lane.end, e)) return s;
    }
    lane.last = id;
  }
  return AR_OK;
}

int32_t Comm::end(Call& call, ar_error* e) {
  for (int r : locals_) {
    const Stream stream = parts_[static_cast<size_t>(r)].stream;
    // Making the event, and the legacy stream, need the rank's device to be current.
    const bool needed = stream == nullptr || call.lane[r]->end.event == nullptr;
    const Code c = needed ? set_device(rank(r).device) : kOk;
    if (c != kOk) return runtime_error(c, r, "choosing the device", e);
    if (const int32_t s = record(call.lane[r]->end, r, stream, e)) return s;
  }
  return AR_OK;
}

// One rank: a bit-for-bit copy, nothing in place; an absent rank's total is zero.
int32_t Comm::copy_alone(Call& call, ar_error* e) {
  const Part& p = parts_[0];
  Code c = set_device(rank(0).device);
  const int64_t rows = p.recv.contiguous && (p.absent || p.send.contiguous) ? 1 : call.count / p.recv.cols;
  const int64_t bytes = call.count / rows * type_size(call.type);
  for (int64_t i = 0; i < rows && c == kOk; i++) {
    char* to = p.recv.base + i * p.recv.pitch;
    const char* from = p.send.base + i * p.send.pitch;
    if (p.absent)
      c = fill_async(to, 0, static_cast<size_t>(bytes), p.stream);
    else if (to != from)
      c = copy_async(to, from, static_cast<size_t>(bytes), CopyKind::device_to_device, p.stream);
  }
  return c == kOk ? AR_OK : runtime_error(c, 0, "copying", e);
}

int32_t Comm::nccl_windows(int64_t bytes, ar_ptr* ptrs, ar_error* e) {
  if (bytes <= 0) return fail(e, AR_ERR_ARGUMENT, {}, "windows of %lld bytes", static_cast<long long>(bytes));
  std::lock_guard<std::mutex> lock(mutex_);
  if (const int32_t s = latched(e)) return s;
  DeviceGuard guard;
  RelaxedCapture relaxed;
  return transports_[AR_PATH_NCCL]->windows(bytes, ptrs, e);
}

int32_t Comm::prepare(int64_t max_bytes, int32_t path, ar_error* e) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const int32_t s = latched(e)) return s;
  if (max_bytes < 0)
    return fail(e, AR_ERR_ARGUMENT, {}, "max_bytes %lld is negative", static_cast<long long>(max_bytes));
  if (path == AR_PATH_NONE) return AR_OK;
  char reason[256];
  if (!has_path(path, reason, sizeof(reason))) return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", reason);
  DeviceGuard guard;
  return transports_[path]->prepare(max_bytes, e);
}

// Whether every eager call made so far has ended. A runtime error is latched: the device or its context is gone.
bool Comm::ends_passed(ar_error* e) {
  for (int r : locals_) {
    const Mark& m = eager_.lane[r].end;
    if (!m.recorded) continue;
    bool done = false;
    const Code c = event_query(m.event, &done);
    if (c != kOk) {
      runtime_error(c, r, "the device reports", e);
      latch(*e);
      return true;
    }
    if (!done) return false;
  }
  return true;
}

int32_t Comm::wait(int64_t timeout_us, ar_error* e) {
  const auto start = Clock::now();
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ar_error local;
      clear(&local);
      if (closed_) return fail(e, AR_ERR_CLOSED, {}, "the communicator is closed");
      RelaxedCapture relaxed;
      if (drive_is_stepped())
        for (int r : locals_)
          if (eager_.lane[r].end.recorded) event_synchronize(eager_.lane[r].end.event);
      if (ends_passed(&local)) return latched(e);
      find_mismatch();
    }
    const auto passed = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
    if (timeout_us >= 0 && passed >= timeout_us)
      return fail(e, AR_ERR_PENDING, {}, "not finished after %lld us", static_cast<long long>(passed));
    // Small reductions end within microseconds; a waiter of milliseconds need not hold a core.
    if (passed > 200) std::this_thread::sleep_for(std::chrono::microseconds(passed > 10000 ? 500 : 20));
  }
}

int32_t Comm::error(ar_error* e) {
  std::lock_guard<std::mutex> lock(mutex_);
  find_mismatch();
  return latched(e);
}

// The communicator's failure, if it has one. mutex_ is held.
int32_t Comm::latched(ar_error* e) {
  if (!failed_ && !closed_ && __atomic_load_n(&board_->abort[own_abort()].v, __ATOMIC_ACQUIRE) != 0) collect_records();
  if (failed_) {
    if (e != nullptr) *e = failure_;
    return failure_.status;
  }
  if (closed_) return fail(e, AR_ERR_CLOSED, {}, "the communicator is closed");
  return AR_OK;
}

// An expired wait set the abort word. Others may be about to leave records: give them until all calls have ended, at most
// 100 ms, then choose the lowest epoch, then the lowest rank, so that every rank tells the same story.
void Comm::collect_records() {
  const auto start = Clock::now();
  ar_error ignored;
  // Of other processes' calls the end cannot be seen, but what one of them decided can.
  while ((split() ? board_->latch.v != 2 : !ends_passed(&ignored)) &&
         Clock::now() - start < std::chrono::milliseconds(100))
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  find_mismatch();
  if (failed_) return;
  ar_error failure;
  clear(&failure);
  bool any = false;
  for (int r = 0; r < world_; r++) {
    for (int b = 0; b < kMaxBlocks; b++) {
      const volatile uint32_t* w = board_->records[r][b].w;
      if (w[0] == 0) continue;
      if (any && static_cast<int32_t>(w[1] - failure.awaited) >= 0) continue;
      any = true;
      const int peer = static_cast<int>(w[0] >> 8);
      const uint32_t awaited = w[1], seen = w[2], call = w[3];
      fail(&failure, AR_ERR_TIMEOUT, {r, rank(r).device, 0},
           "rank %d waited %llu ms for rank %d (call %u, %s: epoch %u awaited, %u seen); the communicator is unusable",
           r, static_cast<unsigned long long>(timeout_ns_ / 1000000), peer, call, phase_name(w[0] & 0xFF), awaited,
           seen);
      failure.call = call;
      failure.peer = peer;
      failure.awaited = awaited;
      failure.seen = seen;
      std::snprintf(failure.phase, sizeof(failure.phase), "%s", phase_name(w[0] & 0xFF));
    }
  }
  if (!any && nccl_expired_) {
    // A rank without a start is the one to look for: a graph that was not launched, a stream that is stuck before it.
    const auto list = [&](bool begun) {
      std::string text;
      for (int r : locals_)
        if ((nccl_running_ >> r & 1) == (begun ? 1u : 0u)) text += (text.empty() ? "" : ", ") + std::to_string(r);
      return text.empty() ? std::string("none") : text;
    };
    fail(&failure, AR_ERR_TIMEOUT, {},
         "an NCCL operation took longer than %llu ms and was aborted (ranks that had begun it: %s; not: %s); the "
         "communicator is unusable",
         static_cast<unsigned long long>(timeout_ns_ / 1000000), list(true).c_str(), list(false).c_str());
    std::snprintf(failure.phase, sizeof(failure.phase), "nccl");
  } else if (!any)
    fail(&failure, AR_ERR_TIMEOUT, {}, "the abort word was set and no rank left a record");
  latch(failure);
}

void Comm::stats(ar_stats* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::memset(out, 0, sizeof(*out));
  out->ranks = static_cast<int32_t>(locals_.size());
  out->allocations = allocations_;
  out->chunk_bytes = static_cast<int32_t>(last_chunk_);
  if (!closed_ && transports_[AR_PATH_NCCL] != nullptr) out->nccl_version = transports_[AR_PATH_NCCL]->version();
  for (int p = 0; p < AR_PATHS; p++) {
    out->calls[p] = path_calls_[p];
    out->bytes[p] = path_bytes_[p];
  }
  for (size_t i = 0; i < locals_.size(); i++) {
    ar_rank_stats& held = out->rank[i];
    held.rank = locals_[i];
    held.device = rank(locals_[i]).device;
    if (closed_) continue;
    for (int p = 0; p < AR_PATHS; p++)
      if (transports_[p] != nullptr) transports_[p]->memory(locals_[i], &held.device_bytes[p], &held.pinned_bytes[p]);
  }
}

int32_t Comm::close(ar_error*) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return AR_OK;
  DeviceGuard guard;
  RelaxedCapture relaxed;
  latched(nullptr);  // keep a failure that is already there: Close's own abort must not hide it
  for (int r : locals_) storage_->ends.push_back(eager_.lane[r].end);
  const auto settle = [&](std::chrono::milliseconds most) {
    const auto from = Clock::now();
    while (!passed(*storage_) && Clock::now() - from < most) std::this_thread::sleep_for(std::chrono::microseconds(50));
  };
  settle(std::chrono::milliseconds(failed_ ? 0 : 1000));
  closed_ = true;
  if (split() && !failed_) {
    if (passed(*storage_)) {
      // Everybody has what this rank had to give: the others may still be reading it.
      for (int r : locals_) __atomic_store_n(&board_->closed[r].v, 1u, __ATOMIC_RELEASE);
    } else {
      ar_error gone;
      fail(&gone, AR_ERR_CLOSED, {locals_[0], -1, 0}, "rank %d closed the communicator in the middle of a reduction",
           locals_[0]);
      latch(gone);
    }
  }
  abort_own();
  settle(std::chrono::milliseconds(200));
  for (auto& t : transports_) t.reset();
  reap_later(std::move(storage_));
  reap_in_background();
  return AR_OK;
}

// ---- the backend's entry points -----------------------------------------------------------------------------

namespace {
Comm* self(ar_comm* c) { return static_cast<Comm*>(c); }
const Comm* self(const ar_comm* c) { return static_cast<const Comm*>(c); }
}  // namespace

int32_t comm_create(const ar_options* o, ar_comm** out, ar_error* e) { return Comm::create(*o, out, e); }
int32_t comm_has_path(const ar_comm* c, int32_t p, char* reason, size_t n) { return self(c)->has_path(p, reason, n); }
int32_t allreduce(ar_comm* c, const ar_buffer* b, int32_t n, int32_t path, int32_t wire, ar_error* e) {
  return self(c)->allreduce(b, n, path, wire, e);
}
int32_t comm_prepare(ar_comm* c, int64_t bytes, int32_t path, ar_error* e) { return self(c)->prepare(bytes, path, e); }
int32_t comm_wait(ar_comm* c, int64_t us, ar_error* e) { return self(c)->wait(us, e); }
int32_t comm_error(ar_comm* c, ar_error* e) { return self(c)->error(e); }
int32_t comm_stats(ar_comm* c, ar_stats* out) {
  self(c)->stats(out);
  return AR_OK;
}
int32_t comm_close(ar_comm* c, ar_error* e) { return self(c)->close(e); }
int32_t comm_export_peer(ar_comm* c, int32_t r, uint8_t* handle, ar_error* e) {
  return self(c)->export_peer(r, handle, e);
}
int32_t comm_import_peers(ar_comm* c, const uint8_t* handles, ar_error* e) { return self(c)->import_peers(handles, e); }
int32_t comm_nccl_windows(ar_comm* c, int64_t bytes, ar_ptr* ptrs, ar_error* e) {
  return self(c)->nccl_windows(bytes, ptrs, e);
}
int32_t comm_check_peers(ar_comm* c, int32_t look, ar_error* e) { return self(c)->check_peers(look != 0, e); }
int32_t comm_lose(ar_comm* c, int32_t rank, const char* text, ar_error*) { return self(c)->lose(rank, text); }
int32_t comm_free(ar_comm* c) {
  self(c)->close(nullptr);
  delete self(c);
  reap_in_background();
  return AR_OK;
}

}  // namespace AR_NS
