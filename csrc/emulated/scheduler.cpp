// Which action comes next. FIFO is a discrete-event simulation: always the earliest simulated time, so times mean
// something. The seeded schedules take any possible action; their times are only book-keeping.
#include <algorithm>
#include <tuple>

#include "world.h"

namespace AR_NS {

enum class Act { none, end_flight, flow, end_kernel, run_block, poll, flush, start, expire };

// splitmix64
uint64_t World::random() {
  uint64_t z = (rng += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

bool World::step(Lock& l) { return schedule == AR_SCHEDULE_FIFO ? step_fifo(l) : step_seeded(l); }

// Every waiting block whose memory may have changed looks again.
bool World::poll_waiters(Lock& l) {
  bool any = false;
  for (size_t i = 0; i < blocks.size();) {
    BlockRun& r = *blocks[i];
    const uint64_t id = r.id;
    if (r.state == BlockState::spinning && r.seen_version != version && poll(l, r, false)) any = true;
    if (i < blocks.size() && blocks[i]->id == id) i++;  // a poll can retire its block
  }
  return any;
}

static double deadline_us(const BlockRun& r) {
  if (r.state != BlockState::spinning || r.limit.timeout_ns == UINT64_MAX) return kNever;
  return r.wait_us + static_cast<double>(r.limit.timeout_ns) / 1e3;
}

bool World::step_fifo(Lock& l) {
  poll_waiters(l);
  // Of actions at the same time: ends first, then blocks, then starts, each in the order they came.
  using Key = std::tuple<double, int, double, uint64_t>;
  Key best{kNever, 0, 0, 0};
  Act act = Act::none;
  OpRef op;
  BlockRun* run = nullptr;
  const auto offer = [&](const Key& key, Act a, const OpRef* o, BlockRun* r) {
    if (!(key < best)) return;
    best = key;
    act = a;
    op = o != nullptr ? *o : nullptr;
    run = r;
  };
  for (const OpRef& o : flights) {
    const Flight& f = *o->flight;
    if (f.phase == FlightPhase::flowing) {
      offer({std::max(now_us, flow_us + f.left / f.rate), 0, 0, o->id}, Act::end_flight, &o, nullptr);
    } else {
      offer({f.next_us, 0, 0, o->id}, f.phase == FlightPhase::timed ? Act::end_flight : Act::flow, &o, nullptr);
    }
  }
  for (const OpRef& o : kernels)
    if (o->kernel->ending) offer({std::max(now_us, o->kernel->end_us), 0, 0, o->id}, Act::end_kernel, &o, nullptr);
  for (const auto& b : blocks)
    if (b->state == BlockState::runnable)
      offer({std::max(now_us, b->block.core.clock_us), 1, 0, b->id}, Act::run_block, nullptr, b.get());
  for (const OpRef& o : ready)
    if (engine_free(*o)) offer({std::max(now_us, o->ready_us), 2, o->ready_us, o->id}, Act::start, &o, nullptr);
  if (act == Act::none) return false;
  // A deadline that comes before anything else is time passing like the rest; one beyond all else is jump()'s.
  if (stepped)
    for (const auto& b : blocks)
      if (const double at = deadline_us(*b); at < kNever)
        offer({std::max(now_us, at), -1, 0, b->id}, Act::expire, nullptr, b.get());
  const double at = std::get<0>(best);
  now_us = std::max(now_us, at);
  switch (act) {
    case Act::flow:
      flow_to(at);
      op->flight->phase = FlightPhase::flowing;
      set_rates();
      break;
    case Act::end_flight:
      flow_to(at);
      end_flight(l, op, at);
      break;
    case Act::end_kernel:
      kernels.erase(std::find(kernels.begin(), kernels.end(), op));
      finish(op, at);
      break;
    case Act::run_block:
      run_block(l, *run);
      break;
    case Act::expire:
      poll(l, *run, true);
      break;
    case Act::start:
      start(l, op, at);
      break;
    default:
      break;
  }
  return true;
}

struct Choice {
  Act act;
  size_t index;
  int rank;  // adversarial: lower comes first
  uint64_t newness;
  int device;
};

bool World::step_seeded(Lock& l) {
  std::vector<Choice> choices;
  for (size_t i = 0; i < blocks.size(); i++) {
    const BlockRun& r = *blocks[i];
    const bool looks = r.state == BlockState::spinning && r.seen_version != version;
    if (r.state == BlockState::runnable) choices.push_back({Act::run_block, i, 0, r.id, r.op->device});
    if (looks) choices.push_back({Act::poll, i, 0, r.id, r.op->device});
    if (!r.block.core.stores.empty()) choices.push_back({Act::flush, i, 2, r.id, r.op->device});
  }
  for (size_t i = 0; i < ready.size(); i++)
    if (engine_free(*ready[i])) choices.push_back({Act::start, i, 1, ready[i]->id, ready[i]->device});
  for (size_t i = 0; i < kernels.size(); i++)
    if (kernels[i]->kernel->ending) choices.push_back({Act::end_kernel, i, 3, kernels[i]->id, kernels[i]->device});
  for (size_t i = 0; i < flights.size(); i++)
    choices.push_back({Act::end_flight, i, 4, flights[i]->id, flights[i]->device});
  if (choices.empty()) return false;
  size_t pick = random_below(choices.size());
  if (schedule == AR_SCHEDULE_ADVERSARIAL) {
    // Newest first, copies last, one device (another from time to time) only when nothing else can run; now and then
    // anything, so that seeds differ.
    if (random_below(256) == 0) starved = static_cast<int>(random_below(devices.size()));
    const auto key = [&](const Choice& c) { return std::make_tuple(c.device == starved, c.rank, ~c.newness); };
    if (random_below(16) != 0)
      for (size_t i = 0; i < choices.size(); i++)
        if (key(choices[i]) < key(choices[pick])) pick = i;
  }
  const Choice c = choices[pick];
  switch (c.act) {
    case Act::run_block:
      now_us = std::max(now_us, blocks[c.index]->block.core.clock_us);
      run_block(l, *blocks[c.index]);
      break;
    case Act::poll:
      if (poll(l, *blocks[c.index], false) && c.index < blocks.size() &&
          blocks[c.index]->state == BlockState::runnable && blocks[c.index]->id == c.newness)
        run_block(l, *blocks[c.index]);
      break;
    case Act::flush:
      flush_one(*blocks[c.index], schedule == AR_SCHEDULE_ADVERSARIAL);
      break;
    case Act::start: {
      OpRef op = ready[c.index];
      start(l, op, std::max(now_us, op->ready_us));
      break;
    }
    case Act::end_kernel: {
      OpRef op = kernels[c.index];
      kernels.erase(kernels.begin() + static_cast<std::ptrdiff_t>(c.index));
      finish(op, std::max(now_us, op->kernel->end_us));
      break;
    }
    case Act::end_flight: {
      OpRef op = flights[c.index];
      end_flight(l, op, std::max(now_us, op->start_us + alone_us(*op)));
      break;
    }
    default:
      break;
  }
  return true;
}

// Nothing is left but blocks that wait: lets simulated time pass until the first of their deadlines. False: there is
// none, so nothing can ever run again.
bool World::jump(Lock& l) {
  version++;  // the host may have written to pinned memory, an abort word for instance
  if (poll_waiters(l)) return true;
  report_residency();
  BlockRun* first = nullptr;
  for (const auto& b : blocks)
    if (deadline_us(*b) < kNever && (first == nullptr || deadline_us(*b) < deadline_us(*first))) first = b.get();
  if (first == nullptr) return false;
  now_us = std::max(now_us, deadline_us(*first));
  return poll(l, *first, true);
}

// The background drive's thread.
void World::work_loop() {
  Lock l(mu);
  const auto waiting = [&] {
    return std::any_of(blocks.begin(), blocks.end(), [](const auto& b) { return b->state == BlockState::spinning; });
  };
  uint64_t steps = 0;
  while (!stop) {
    // Deadlines are in real time here, and hosts write abort words without telling: look at both now and then.
    if (++steps % 256 == 0) version++;
    if (step(l)) {
      if (!dropped.empty()) drop_released(l);
      continue;
    }
    if (!waiting()) {
      if (waiters > 0) host_cv.notify_all();
      if (!stop && ready.empty()) work_cv.wait(l);
      continue;
    }
    version++;
    if (poll_waiters(l)) continue;
    report_residency();
    work_cv.wait_for(l, std::chrono::milliseconds(1));
  }
}

}  // namespace AR_NS
