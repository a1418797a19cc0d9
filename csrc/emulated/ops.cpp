// Ops: what is enqueued, what it waits for, and what starting and ending it does.
#include <algorithm>

#include "world.h"

namespace AR_NS {

OpRef World::make_op(WorkRef work, int device, uint64_t stream, Timeline line) {
  OpRef op = std::make_shared<Op>();
  op->id = next_op++;
  op->work = std::move(work);
  op->device = device;
  op->stream = stream;
  op->line = line;
  op->clock = host;
  op->ready_us = now_us;
  tsan_release(&op->id);
  return op;
}

// An edge: `op` starts after `before` has ended. It joins times and clocks, here or in finish().
void World::need(const OpRef& op, const OpRef& before, double lag) {
  if (before == nullptr) return;
  if (kTsan && tsan_streams) op->after.push_back(before);
  if (before->state == OpState::done) {
    op->ready_us = std::max(op->ready_us, before->end_us + lag);
    op->clock.join(before->clock);
    return;
  }
  before->followers.emplace_back(op, lag);
  op->needs.push_back(before);
  op->missing++;
}

void World::submit(const OpRef& op) {
  devices[static_cast<size_t>(op->device)].unfinished.emplace(op->id, op);
  if (op->missing == 0) {
    op->state = OpState::ready;
    ready.push_back(op);
  }
  idle_queries = 0;
  last_progress = Clock::now();
  if (!stepped) {
    start_worker();
    work_cv.notify_one();
  } else if (waiters > 0) {
    host_cv.notify_all();
  }
}

Code World::enqueue(StreamState& s, WorkRef work, OpRef* made) {
  if (s.capture != nullptr) return capture_op(s, std::move(work));
  if (devices[static_cast<size_t>(s.device)].gone) return devices[static_cast<size_t>(s.device)].lost;
  OpRef op = make_op(std::move(work), s.device, s.handle, line_of_stream(s));
  need(op, s.tail, 0);
  s.tail = op;
  submit(op);
  if (made != nullptr) *made = op;
  return kOk;
}

static int engine_of(const Work& w) {
  if (w.kind != WorkKind::copy) return -1;
  return w.direction == CopyKind::host_to_device ? 0 : w.direction == CopyKind::device_to_host ? 1 : 2;
}

bool World::engine_free(const Op& op) const {
  const int e = engine_of(*op.work);
  return e < 0 || devices[static_cast<size_t>(op.device)].engine[e] == nullptr;
}

// What an op does to memory: a copy, or a fill where from is null.
void World::effect(const OpRef& op, void* to, const void* from, int byte, size_t bytes) {
  if (kTsan && tsan_streams) {
    std::vector<const void*> before = {&op->id};
    for (const OpRef& b : op->after) before.push_back(&b->state);
    tsan.run(op->line, before.data(), before.size(), &op->state, &devices[static_cast<size_t>(op->device)].done, to,
             from, byte, bytes);
  } else if (bytes > 0) {
    from != nullptr ? std::memcpy(to, from, bytes) : std::memset(to, byte, bytes);
  }
}

void World::start(Lock& l, const OpRef& op, double at) {
  ready.erase(std::find(ready.begin(), ready.end(), op));
  op->state = OpState::running;
  op->start_us = at;
  if (op->work->kind != WorkKind::marker) {
    op->step = ++steps[static_cast<size_t>(op->line)];
    op->clock.set(op->line, op->step);
  }
  Device& d = devices[static_cast<size_t>(op->device)];
  const Work& work = *op->work;
  if (d.lose_after >= 0 && work.kind != WorkKind::marker && d.lose_after-- == 0) lose(op->device, at);
  if (d.gone) {
    finish(op, at);
    return;
  }
  switch (work.kind) {
    case WorkKind::marker:
      finish(op, at);
      return;
    case WorkKind::host:
      unlocked(l, [&] { work.fn(work.arg); });
      version++;
      finish(op, at);
      return;
    case WorkKind::kernel: {
      op->kernel = std::make_unique<KernelRun>();
      KernelRun& k = *op->kernel;
      k.end_us = at + machine.launch_us;
      for (int i = 0; i < work.blocks; i++) k.order.push_back(work.blocks - 1 - i);
      if (schedule == AR_SCHEDULE_ADVERSARIAL) std::reverse(k.order.begin(), k.order.end());
      if (schedule == AR_SCHEDULE_RANDOM)
        for (size_t i = k.order.size(); i > 1; i--) std::swap(k.order[i - 1], k.order[random_below(i)]);
      kernels.push_back(op);
      d.admitting.push_back(op);
      admit(d, at + machine.launch_us);
      return;
    }
    case WorkKind::copy:
    case WorkKind::fill:
      break;
  }
  bool from = true, to = true;
  const bool host_source = work.kind == WorkKind::copy && work.direction == CopyKind::host_to_device;
  const bool host_target = work.kind == WorkKind::copy && work.direction == CopyKind::device_to_host;
  if (work.kind == WorkKind::copy) touch(*op, nullptr, work.from, work.bytes, Access::read, &from);
  touch(*op, nullptr, work.to, work.bytes, Access::write, &to);
  const Allocation* target = find(work.to, work.bytes);
  const Allocation* source = work.kind == WorkKind::copy ? find(work.from, work.bytes) : nullptr;
  // Pageable memory (copy_blocking's) is in no allocation, and a copy between devices needs no peer access.
  from = source != nullptr || work.kind == WorkKind::fill || (host_source && work.pageable);
  to = target != nullptr || (host_target && work.pageable);
  if (!from || !to) {
    misuse(op_text(*op) + " ran into " + describe(from ? work.to : work.from));
    d.lost = kIllegalAddress;
    finish(op, at);
    return;
  }
  op->flight = std::make_unique<Flight>();
  Flight& f = *op->flight;
  f.left = static_cast<double>(work.bytes);
  if (work.kind == WorkKind::fill) {
    f.phase = FlightPhase::timed;
    const double gbs = target->kind == MemoryKind::pinned ? d.spec.kernel_host_gbs : d.spec.memory_gbs;
    f.next_us = at + machine.launch_us + f.left / (gbs * 1e3);
  } else {
    f.next_us = at + machine.copy_us;
    f.engine = engine_of(work);
    d.engine[f.engine] = op;
    if (work.direction == CopyKind::host_to_device) {
      f.down_device = target->device;
    } else if (work.direction == CopyKind::device_to_host) {
      f.up_device = source->device;
    } else if (source->device == target->device) {
      f.own_limit = d.spec.memory_gbs * 1e3 / 2;
    } else if (machine.peer[op->device][source->device] || machine.peer[op->device][target->device]) {
      f.own_limit = peer_rate(op->device, target->device != op->device ? target->device : source->device) * 1e3;
    } else {  // staged through host memory by the driver
      f.up_device = source->device;
      f.down_device = target->device;
    }
  }
  // The destination holds nothing anyone may use until the end.
  if (work.to != work.from && !copy_goes_wrong(*op, false)) {
    unlocked(l, [&] { effect(op, work.to, nullptr, kPoison, work.bytes); });
    version++;
  }
  flights.push_back(op);
}

// As after a fault of a real GPU: what ran is gone, what waits for it goes on.
void World::lose(int device, double at) {
  Device& d = devices[static_cast<size_t>(device)];
  d.gone = true;
  d.lost = kLaunchFailure;
  d.admitting.clear();
  d.resident = 0;
  for (size_t i = 0; i < blocks.size();) {
    if (blocks[i]->op->device == device) {
      fibers.give(blocks[i]->fiber);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      i++;
    }
  }
  std::vector<OpRef> ended;
  for (auto* running : {&kernels, &flights})
    for (size_t i = 0; i < running->size();) {
      if ((*running)[i]->device == device) {
        ended.push_back((*running)[i]);
        running->erase(running->begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        i++;
      }
    }
  for (OpRef& e : d.engine) e = nullptr;
  for (const OpRef& op : ended) op->flight.reset();
  set_rates();
  for (const OpRef& op : ended) finish(op, at);
}

// The late effect: the source is read, and the bytes appear, only now.
void World::end_flight(Lock& l, const OpRef& op, double at) {
  flights.erase(std::find(flights.begin(), flights.end(), op));
  const Work& work = *op->work;
  const bool lost = copy_goes_wrong(*op, true);
  unlocked(l, [&] {
    if (lost) return;
    if (work.kind == WorkKind::fill || work.to != work.from)
      effect(op, work.to, work.kind == WorkKind::fill ? nullptr : work.from, work.byte, work.bytes);
  });
  version++;
  if (op->flight->engine >= 0) devices[static_cast<size_t>(op->device)].engine[op->flight->engine] = nullptr;
  op->flight.reset();
  set_rates();
  finish(op, at);
}

void World::finish(const OpRef& op, double at) {
  op->end_us = at;
  op->state = OpState::done;
  now_us = std::max(now_us, at);
  op->needs.clear();
  if (op->work->kind == WorkKind::marker) effect(op, nullptr, nullptr, 0, 0);
  op->after.clear();
  if (op->kernel != nullptr) op->clock.join(op->kernel->clock);
  if (!late.empty()) deliver(*op);
  op->kernel.reset();
  for (auto& f : op->followers) {
    Op& next = *f.first;
    next.ready_us = std::max(next.ready_us, at + f.second);
    next.clock.join(op->clock);
    if (--next.missing == 0) {
      next.state = OpState::ready;
      ready.push_back(f.first);
    }
  }
  op->followers.clear();
  op->keeps.clear();
  Device& device = devices[static_cast<size_t>(op->device)];
  device.unfinished.erase(op->id);
  device.done.join(op->clock);
  last_progress = Clock::now();
  if (!stepped && waiters > 0) host_cv.notify_all();
  if (op->work->kind == WorkKind::marker || std::find(traced.begin(), traced.end(), op->device) == traced.end()) return;
  ar_trace_record r{};
  const Work& w = *op->work;
  r.start_us = op->start_us;
  r.end_us = at;
  r.device = op->device;
  r.kind = w.kind == WorkKind::kernel ? 0 : w.kind != WorkKind::copy ? 4 : 1 + engine_of(w);
  r.stream = op->stream;
  r.bytes = static_cast<int64_t>(w.bytes);
  std::strncpy(r.name, w.name, sizeof(r.name) - 1);
  trace.push_back(r);
}

// ---- entry points -----------------------------------------------------------------------------------------------

static bool copy_pointers_good(World& w, const void* to, const void* from, size_t n, CopyKind k, bool pageable) {
  const auto fits = [&](const void* p, bool device) {
    const Allocation* a = w.find(p, n);
    if (a != nullptr) return (a->kind == MemoryKind::device) == device;
    if (device || !pageable) return false;
    // Pageable memory may be anywhere but in what is ours.
    return w.find(p, 0) == nullptr;
  };
  const bool to_good = fits(to, k != CopyKind::device_to_host), from_good = fits(from, k != CopyKind::host_to_device);
  if (!to_good || !from_good) {
    w.misuse("copy of " + std::to_string(n) + " bytes " + (to_good ? "from " : "to ") +
             w.describe(to_good ? from : to) + ": that range is not in one live allocation of the right kind");
    return false;
  }
  const uintptr_t a = reinterpret_cast<uintptr_t>(to), b = reinterpret_cast<uintptr_t>(from);
  if (a != b && a < b + n && b < a + n) {
    w.misuse("copy of " + std::to_string(n) + " bytes between overlapping ranges at " + w.describe(to));
    return false;
  }
  return true;
}

static WorkRef copy_work(void* to, const void* from, size_t n, CopyKind k, bool pageable) {
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::copy;
  work->name = "copy";
  work->to = to;
  work->from = from;
  work->bytes = n;
  work->direction = k;
  work->pageable = pageable;
  return work;
}

Code copy_async(void* dst, const void* src, size_t n, CopyKind k, Stream s) {
  Guard g;
  if (g.w.injected(AR_CALL_COPY)) return kInjectedFault;
  StreamState* st = g.w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (n == 0) return kOk;
  if (!copy_pointers_good(g.w, dst, src, n, k, false)) return kInvalidValue;
  return g.w.enqueue(*st, copy_work(dst, src, n, k, false));
}

Code copy_blocking(void* dst, const void* src, size_t n, CopyKind k) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_COPY)) return kInjectedFault;
  if (n == 0) return kOk;
  if (!copy_pointers_good(w, dst, src, n, k, true)) return kInvalidValue;
  OpRef op;
  StreamState* st = w.stream(nullptr);
  const int device = st->device;
  Code c = w.enqueue(*st, copy_work(dst, src, n, k, true), &op);
  if (c == kOk) c = w.wait(g.l, [op] { return op->state == OpState::done; });
  if (c == kOk) w.tell_host(op);
  return c != kOk ? c : w.devices[static_cast<size_t>(device)].lost;
}

Code fill_async(void* dst, int byte, size_t n, Stream s) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_COPY)) return kInjectedFault;
  StreamState* st = w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (n == 0) return kOk;
  const Allocation* a = w.find(dst, n);
  if (a == nullptr || !w.reaches(st->device, *a)) {
    w.misuse("fill of " + std::to_string(n) + " bytes at " + w.describe(dst));
    return kInvalidValue;
  }
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::fill;
  work->name = "fill";
  work->to = dst;
  work->bytes = n;
  work->byte = byte;
  return w.enqueue(*st, work);
}

Code host_call(Stream s, void (*fn)(void*), void* arg) {
  Guard g;
  StreamState* st = g.w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (fn == nullptr) return kInvalidValue;
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::host;
  work->name = "host call";
  work->fn = fn;
  work->arg = arg;
  return g.w.enqueue(*st, work);
}

Code launch_kernel(const KernelCode& k, int blocks, int threads, Stream s) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_LAUNCH)) return kInjectedFault;
  StreamState* st = w.stream(s);
  // Newer drivers launch on the stream's device whatever device is current; older ones refuse, and so do we.
  if (st == nullptr || st->device != current_device(w)) return kInvalidHandle;
  if (blocks < 1 || threads < 1 || threads > k.max_threads) return kInvalidValue;
  if (Code lost = w.devices[static_cast<size_t>(st->device)].lost) return lost;
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::kernel;
  work->name = k.name;
  work->params.reset(new unsigned char[k.bytes]);
  std::memcpy(work->params.get(), k.params, k.bytes);
  work->body = k.body;
  work->blocks = blocks;
  work->threads = threads;
  work->talks = k.talks;
  return w.enqueue(*st, work);
}

}  // namespace AR_NS
