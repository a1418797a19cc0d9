// Memory, streams and events of a communicator, and the reaper that frees them when nothing uses them any more.
// Included by all_*.cpp.
#include "comm.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "thread.h"
#include "transports/transport.h"

namespace AR_NS {

namespace {
// Storage of closed communicators. A graph that captured one may hold it for as long as it likes.
struct Reaper {
  std::mutex mutex;
  std::vector<std::shared_ptr<Storage>> waiting;
  std::mutex freeing;   // held while something is freed
  bool runs = false;    // the thread lives; under mutex
  bool ending = false;  // the process's exit handlers have run; under freeing
};
Reaper& reaper() {
  static Reaper* r = [] {
    auto* made = new Reaper;  // never destroyed: a graph may drop its storage after main
    std::atexit([] {
      std::lock_guard<std::mutex> lock(reaper().freeing);
      reaper().ending = true;
    });
    return made;
  }();
  return *r;
}

void free_owned(const Owned& a) {
  if (a.device >= 0) {
    set_device(a.device);
    if (a.opened)
      ipc_close(a.ptr);
    else
      free_device(a.ptr);
  } else if (a.mapped > 0) {
    unregister_pinned(a.ptr);
    munmap(a.ptr, static_cast<size_t>(a.mapped));
  } else {
    free_pinned(a.ptr);
  }
}

void free_all(Storage& s) {
  DeviceGuard guard;
  RelaxedCapture relaxed;
  for (size_t i = 0; i < s.events.size(); i++) {
    set_device(s.event_device[i]);
    event_destroy(s.events[i]);
  }
  for (size_t i = 0; i < s.streams.size(); i++) {
    set_device(s.stream_device[i]);
    stream_destroy(s.streams[i]);
  }
  for (const Owned& a : s.all) {
    free_owned(a);
  }
  s = Storage{};
}

// How long memory that other processes have opened waits for them, before they count as dead.
constexpr std::chrono::seconds kLeavePatience{5};

// Whether no other process has memory of it open any more; closes what it has of theirs first. Nothing enqueued uses it.
bool left_by_all(Storage& s) {
  if (s.own_left.empty()) return true;
  const auto now = std::chrono::steady_clock::now();
  if (s.left == std::chrono::steady_clock::time_point()) {
    DeviceGuard guard;
    RelaxedCapture relaxed;
    for (Owned& a : s.all)
      if (a.opened) free_owned(a);
    s.all.erase(std::remove_if(s.all.begin(), s.all.end(), [](const Owned& a) { return a.opened; }), s.all.end());
    for (uint32_t* w : s.own_left) __atomic_store_n(w, 1u, __ATOMIC_RELEASE);
    s.left = now;
  }
  for (const uint32_t* w : s.others_left)
    if (__atomic_load_n(w, __ATOMIC_ACQUIRE) == 0 && now - s.left < kLeavePatience) return false;
  return true;
}
}  // namespace

// Whether nothing enqueued uses it any more.
bool passed(const Storage& s) {
  for (const Mark& m : s.ends) {
    if (!m.recorded) continue;
    bool done = false;
    const Code c = event_query(m.event, &done);
    if (c == kOk && !done) return false;  // an error means a lost device: nothing will ever pass, free it
  }
  // A call that failed half-way left work on streams of our own that no end event stands for. A stream in a capture has
  // none, may not be asked, and belongs to a graph that holds the storage: Close need not wait for it.
  for (Stream stream : s.streams) {
    CaptureInfo info;
    bool done = false;
    if (capture_info(stream, &info) != kOk || info.state != Capturing::none) continue;
    if (stream_query(stream, &done) == kOk && !done) return false;
  }
  return true;
}

void reap_later(std::shared_ptr<Storage> s) {
  std::lock_guard<std::mutex> lock(reaper().mutex);
  reaper().waiting.push_back(std::move(s));
}

size_t reap() {
  std::vector<std::shared_ptr<Storage>> dead;
  size_t left = 0;
  {
    std::lock_guard<std::mutex> lock(reaper().mutex);
    auto& all = reaper().waiting;
    for (size_t i = 0; i < all.size();) {
      if (all[i].use_count() == 1 && passed(*all[i]) && left_by_all(*all[i])) {
        dead.push_back(std::move(all[i]));
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        i++;
      }
    }
    left = all.size();
  }
  if (!dead.empty()) {
    std::lock_guard<std::mutex> lock(reaper().freeing);
    for (auto& s : dead)
      if (!reaper().ending) free_all(*s);
  }
  return left;
}

// Lives while something waits to be freed, and looks at it with growing pauses. Not under the emulator's stepped drive,
// where a look is a step of the schedule: there the next communicator that is made, closed or freed takes its place.
static void reap_until_done() {
  using namespace std::chrono_literals;
  auto pause = 10ms;
  for (;;) {
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::milliseconds>(2 * pause, 1000ms);
    reap();
    std::lock_guard<std::mutex> lock(reaper().mutex);
    if (!reaper().waiting.empty()) continue;
    reaper().runs = false;
    return;
  }
}

void reap_in_background() {
  if (reap() == 0 || drive_is_stepped()) return;
  std::lock_guard<std::mutex> lock(reaper().mutex);
  if (reaper().runs || reaper().waiting.empty()) return;
  reaper().runs = true;
  ar::quiet_thread(reap_until_done).detach();
}

int32_t Comm::runtime_error(Code code, int rank, const char* what, ar_error* e) const {
  Where where;
  where.rank = rank;
  where.device = rank >= 0 ? ranks_[static_cast<size_t>(rank)].device : -1;
  where.code = code;
  const int32_t status = code_is_lost(code)       ? AR_ERR_DEVICE_LOST
                         : code_is_deadlock(code) ? AR_ERR_DEADLOCK
                         : code_is_hazard(code)   ? AR_ERR_HAZARD
                                                  : AR_ERR_RUNTIME;
  return fail(e, status, where, "%s: %s", what, code_text(code));
}

int32_t Comm::allocate_device(int rank, int64_t bytes, void** out, ar_error* e, bool exported) {
  RelaxedCapture relaxed;
  const RankInfo& info = ranks_[static_cast<size_t>(rank)];
  const size_t size = static_cast<size_t>(bytes);
  Code c = set_device(info.device);
  if (c == kOk) c = exported ? malloc_exported(out, size) : malloc_device(out, size);
  if (c != kOk) {
    Where where{rank, info.device, c};
    if (code_is_memory(c))
      return fail(e, AR_ERR_ALLOC, where, "%lld bytes of device memory: %s", static_cast<long long>(bytes),
                  code_text(c));
    return runtime_error(c, rank, "allocating device memory", e);
  }
  storage_->all.push_back({*out, info.device});
  return AR_OK;
}

int32_t Comm::allocate_pinned(int rank, int64_t bytes, void** host, void** device, ar_error* e) {
  RelaxedCapture relaxed;
  const RankInfo& info = ranks_[static_cast<size_t>(rank)];
  Code c = set_device(info.device);
  if (c == kOk) c = malloc_pinned(host, static_cast<size_t>(bytes));
  if (c != kOk) {
    Where where{rank, info.device, c};
    if (code_is_memory(c))
      return fail(e, AR_ERR_ALLOC, where, "%lld bytes of pinned memory: %s", static_cast<long long>(bytes),
                  code_text(c));
    return runtime_error(c, rank, "allocating pinned memory", e);
  }
  storage_->all.push_back({*host, -1});
  if (device != nullptr) {
    c = host_to_device(device, *host);
    if (c != kOk) return runtime_error(c, rank, "mapping pinned memory", e);
  }
  return AR_OK;
}

void Comm::storage_rollback(size_t mark) {
  RelaxedCapture relaxed;
  while (storage_->all.size() > mark) {
    const Owned a = storage_->all.back();
    storage_->all.pop_back();
    free_owned(a);
  }
}

int32_t Comm::need_stream(Stream& stream, int rank, ar_error* e) {
  if (stream != nullptr) return AR_OK;
  RelaxedCapture relaxed;
  const Code c = stream_create(&stream);
  if (c != kOk) return runtime_error(c, rank, "making a stream", e);
  storage_->streams.push_back(stream);
  storage_->stream_device.push_back(ranks_[static_cast<size_t>(rank)].device);
  return AR_OK;
}

int32_t Comm::need(Mark& mark, int rank, ar_error* e) {
  if (mark.event != nullptr) return AR_OK;
  RelaxedCapture relaxed;
  const Code c = event_create(&mark.event, false);
  if (c != kOk) return runtime_error(c, rank, "making an event", e);
  storage_->events.push_back(mark.event);
  storage_->event_device.push_back(ranks_[static_cast<size_t>(rank)].device);
  return AR_OK;
}

int32_t Comm::record(Mark& mark, int rank, Stream stream, ar_error* e) {
  if (const int32_t s = need(mark, rank, e)) return s;
  const Code c = event_record(mark.event, stream);
  if (c != kOk) return runtime_error(c, rank, "recording an event", e);
  mark.recorded = true;
  return AR_OK;
}

int32_t Comm::await(Order id, int rank, Stream stream, const Mark& mark, ar_error* e) {
  if (!mark.recorded) return AR_OK;
  if (mark.told != nullptr) return await_told(id, rank, stream, mark, e);
  const Code c = order_wait(id, stream, mark.event);
  return c == kOk ? AR_OK : runtime_error(c, rank, "waiting for an event", e);
}

void Lanes::forget() {
  capture = 0;
  graph_gone.reset();
  for (Lane& l : lane) {
    l.end.recorded = l.ready.recorded = false;
    l.last = 0;
    for (int s = 0; s < 2; s++) {
      l.converted[s].recorded = l.summed[s].recorded = l.downloaded[s].recorded = l.uploaded[s].recorded = false;
      l.scattered[s].recorded = l.shared[s].recorded = l.gathered[s].recorded = l.stored[s].recorded = false;
      for (Mark& m : l.chunk[s]) m.recorded = false;
    }
  }
}

}  // namespace AR_NS
