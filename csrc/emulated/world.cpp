// The World itself: making and replacing the machine, host threads, the worker thread, devices as queries see them.
#include "world.h"

#include <cstdio>
#include <cstdlib>

#include "../thread.h"

namespace AR_NS {

OrderState g_orders;

void default_machine(ar_emulated_machine* m, int n) {
  std::memset(m, 0, sizeof(*m));
  m->size = sizeof(*m);
  m->devices = n;
  for (ar_emulated_device& d : m->device) {
    d.h2d_gbs = 55;
    d.d2h_gbs = 55;
    d.duplex_gbs = 48;
    d.memory_gbs = 4000;
    d.kernel_host_gbs = 44;
    d.sms = 132;
    d.resident_blocks = 132 * 2;
    d.cc_major = 9;
    d.uplink = -1;
    d.memory_bytes = int64_t{8} << 30;
  }
  m->host_gbs = 184;
  m->peer_gbs = 376;
  m->copy_us = 3;
  m->launch_us = 2;
  m->hop_us = 2.8;
  m->flag_us = 1.6;
  m->drive = AR_DRIVE_BACKGROUND;
  m->schedule = AR_SCHEDULE_FIFO;
  m->seed = 1;
}

// Never destroyed: static destructors elsewhere may still call in. The worker ends with the process's exit handlers.
World& world() {
  static World* w = [] {
    World* made = new World;
    ar_emulated_machine m;
    default_machine(&m, 8);
    made->build(m);
    std::atexit([] {
      World& x = world();
      Lock l(x.mu);
      x.ending = true;
      x.stop_worker(l);
    });
    return made;
  }();
  return *w;
}

uint64_t host_thread_id() {
  static std::atomic<uint64_t> next{1};
  thread_local uint64_t id = next.fetch_add(1);
  return id;
}

static thread_local int t_device = 0;
static thread_local uint64_t t_device_epoch = 0;

int current_device(World& w) { return t_device_epoch == w.epoch ? t_device : 0; }

Guard::Guard() : w(world()), l(w.mu) { w.hosts[host_thread_id()].last = Clock::now(); }
Guard::~Guard() { w.drop_released(l); }

// A user object's drop may take locks of the program's own: it runs without ours.
void World::drop_released(Lock& l) {
  while (!dropped.empty()) {
    std::vector<UserObject> drops;
    drops.swap(dropped);
    l.unlock();
    for (const UserObject& o : drops) o.drop(o.arg);
    l.lock();
  }
}

void World::build(const ar_emulated_machine& m) {
  machine = m;
  epoch++;
  stepped = m.drive == AR_DRIVE_STEPPED;
  schedule = m.schedule;
  weak = schedule != AR_SCHEDULE_FIFO;
  devices.clear();
  devices.resize(static_cast<size_t>(m.devices));
  for (int i = 0; i < m.devices; i++) {
    devices[static_cast<size_t>(i)].spec = m.device[i];
    devices[static_cast<size_t>(i)].legacy.device = i;
  }
  now_us = flow_us = 0;
  rng = m.seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  starved = static_cast<int>(random_below(static_cast<uint64_t>(m.devices)));
  priorities.clear();
  lowest = 0;
  choices.clear();
  scripted = 0;
  idle_queries = 0;
  reported_residency = false;
  for (int64_t& f : fault) f = 0;
  for (auto& row : peer_enabled) std::fill(std::begin(row), std::end(row), false);
  for (auto& row : peer_fault) std::fill(std::begin(row), std::end(row), AR_PEER_GOOD);
  g_peer_faults.store(false);
  mirrors.clear();
  late.clear();
  for (auto& p : g_orders.passes) p.store(0);
  for (auto& d : g_orders.drop) d.store(0);
  report.clear();
  trace.clear();
  hosts.clear();
  steps.clear();
  free_lines.clear();
  block_lines.clear();
  host = Knowledge();
  hazards = 0;
  undefined = 0;
}

void World::tear_down(Lock& l) {
  stop_worker(l);
  while (executing) host_cv.wait(l);
  for (const Device& d : devices) tsan_acquire(&d.done);
  // Chains of ops must not be destroyed recursively.
  std::vector<OpRef> all;
  for (Device& d : devices)
    for (auto& u : d.unfinished) all.push_back(u.second);
  for (const OpRef& op : all) {
    op->needs.clear();
    op->followers.clear();
  }
  ready.clear();
  flights.clear();
  kernels.clear();
  for (auto& b : blocks)
    if (b->fiber != nullptr) fibers.give(b->fiber);
  blocks.clear();
  devices.clear();
  all.clear();
  streams.clear();
  events.clear();
  execs.clear();
  graphs.clear();
  release_all();
  fibers.drain();
  tsan.forget();
}

bool World::start_worker() {
  if (ending) return false;
  if (worker_runs) return true;
  stop = false;
  worker_runs = true;
  worker = quiet_thread([this] { work_loop(); });
  return true;
}

void World::stop_worker(Lock& l) {
  if (!worker_runs) return;
  stop = true;
  work_cv.notify_all();
  std::thread t = std::move(worker);
  l.unlock();
  t.join();
  l.lock();
  worker_runs = false;
}

// Every other host thread waits, or has not called for so long that it counts as one that only will again after what
// it waits for elsewhere (Go moves goroutines between threads, so a thread's silence alone says nothing).
bool World::others_idle() {
  constexpr auto kSilence = std::chrono::milliseconds(50);
  const uint64_t self = host_thread_id();
  const auto now = Clock::now();
  for (auto it = hosts.begin(); it != hosts.end();) {
    const bool silent = it->second.waiting == 0 && now - it->second.last > kSilence;
    if (it->first == self || it->second.waiting > 0) {
      ++it;
    } else if (silent) {
      it = hosts.erase(it);
    } else {
      return false;
    }
  }
  return true;
}

bool World::injected(int call) {
  int64_t& n = fault[call];
  return n > 0 && --n == 0;
}

StreamState* World::stream(Stream s) {
  if (s == nullptr) return &devices[static_cast<size_t>(current_device(*this))].legacy;
  auto it = streams.find(handle_value(s));
  return it == streams.end() ? nullptr : &it->second;
}

EventState* World::event(Event e) {
  auto it = events.find(handle_value(e));
  return it == events.end() ? nullptr : &it->second;
}

// ---- devices ----------------------------------------------------------------------------------------------------

int runtime_version() { return 0; }

Code device_count(int* n) {
  Guard g;
  *n = g.w.machine.devices;
  return kOk;
}

Code set_device(int d) {
  Guard g;
  if (d < 0 || d >= g.w.machine.devices) return kInvalidDevice;
  t_device = d;
  t_device_epoch = g.w.epoch;
  return kOk;
}

Code get_device(int* d) {
  Guard g;
  *d = current_device(g.w);
  return kOk;
}

Code device_info(int d, DeviceInfo* out) {
  Guard g;
  if (d < 0 || d >= g.w.machine.devices) return kInvalidDevice;
  const ar_emulated_device& s = g.w.devices[static_cast<size_t>(d)].spec;
  std::memset(out, 0, sizeof(*out));
  std::snprintf(out->name, sizeof(out->name), "Emulated device %d", d);
  std::snprintf(out->uuid, sizeof(out->uuid), "GPU-e0000000-0000-0000-0000-%012d", d);
  std::snprintf(out->bus_id, sizeof(out->bus_id), "ffff:%02x:00.0", d + 1);
  out->cc_major = s.cc_major;
  out->cc_minor = s.cc_minor;
  out->sms = s.sms;
  out->copy_engines = 3;
  out->memory_bytes = s.memory_bytes;
  return kOk;
}

Code can_access_peer(int* can, int device, int peer) {
  Guard g;
  *can = 0;
  const int n = g.w.machine.devices;
  if (device < 0 || device >= n || peer < 0 || peer >= n) return kInvalidDevice;
  *can = device != peer && g.w.machine.peer[device][peer] ? 1 : 0;
  return kOk;
}

Code enable_peer(int device, int peer) {
  int can = 0;
  if (Code c = can_access_peer(&can, device, peer)) return c;
  if (!can) return kPeerUnsupported;
  Guard g;
  g.w.peer_enabled[device][peer] = true;
  return kOk;
}

Code resident_limit(int threads, int max_threads, int* blocks) {
  Guard g;
  *blocks = 0;
  if (threads < 1 || threads > max_threads) return kInvalidValue;
  *blocks = g.w.devices[static_cast<size_t>(current_device(g.w))].spec.resident_blocks;
  return kOk;
}

// clang-format off
const char* code_text(Code c) {
  switch (c) {
    case kOk: return "no error";
    case kInvalidValue: return "an argument is out of range, or a pointer lies in no live allocation of the right kind";
    case kMemory: return "out of memory";
    case kInvalidDevice: return "no such device";
    case kPeerUnsupported: return "peer access is not supported between these two devices";
    case kInvalidHandle: return "a stream, event or graph that does not exist here, or is on another device";
    case kIllegalState: return "not possible in the stream's present state";
    case kNotReady: return "not finished yet";
    case kIllegalAddress: return "a device used memory that is not allocated or not reachable from it";
    case kMisaligned: return "a device access at a misaligned address";
    case kLaunchFailure: return "a kernel failed";
    case kCaptureUnsupported: return "not allowed on a stream that is being captured";
    case kCaptureInvalidated: return "the capture was made invalid by an earlier error";
    case kCaptureMerge: return "two captures would be joined";
    case kCaptureUnmatched: return "the capture was begun on another stream";
    case kCaptureUnjoined: return "a stream forked into the capture was not joined to the stream where it began";
    case kCaptureIsolation: return "a captured stream cannot wait for work outside its capture";
    case kCaptureImplicit: return "the legacy default stream cannot depend on a capture";
    case kCapturedEvent: return "the event was last recorded in a capture";
    case kDeadlock: return "deadlock: nothing on the emulated machine can ever run again";
    case kInjectedFault: return "fault injected by ar_emulated_fail";
    case kHazard: return world().report.c_str();  // stays as it is from the first hazard on
    case kMachineReplaced: return "the emulated machine was replaced meanwhile";
    default: return "unknown code";
  }
}
// clang-format on

}  // namespace AR_NS
