// Which action comes next. FIFO is a discrete-event simulation: always the earliest simulated time, so times mean
// something. The seeded schedules take any possible action; their times are only book-keeping.
#include <algorithm>
#include <tuple>

#include "world.h"

namespace AR_NS {

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

static uint64_t agent_of(const Op& op) { return static_cast<uint64_t>(op.line) << 16; }
static uint64_t agent_of(const BlockRun& r) { return agent_of(*r.op) | static_cast<uint64_t>(r.block.core.index + 1); }

bool World::step_seeded(Lock& l) {
  const bool scripted_run = schedule == AR_SCHEDULE_SCRIPTED;
  std::vector<Choice> all;
  for (size_t i = 0; i < ready.size(); i++)
    if (engine_free(*ready[i])) all.push_back({Act::start, i, 1, ready[i]->id, ready[i]->device, agent_of(*ready[i])});
  for (size_t i = 0; i < kernels.size(); i++)
    if (kernels[i]->kernel->ending)
      all.push_back({Act::end_kernel, i, 3, kernels[i]->id, kernels[i]->device, agent_of(*kernels[i])});
  if (scripted_run)  // a kernel without flags is one step
    for (size_t i = 0; i < blocks.size(); i++) {
      const BlockRun& r = *blocks[i];
      if (!r.op->work->talks && r.op->kernel->begun && r.state == BlockState::runnable)
        all.push_back({Act::run_block, i, 0, r.id, r.op->device, agent_of(r)});
    }
  if (scripted_run && !all.empty()) {  // at once: see ar_emulated_script
    take(l, all.front());
    return true;
  }
  for (size_t i = 0; i < blocks.size(); i++) {
    const BlockRun& r = *blocks[i];
    // The first block stands for the kernel.
    if (scripted_run && !r.op->work->talks && i > 0 && blocks[i - 1]->op == r.op) continue;
    const bool looks = r.state == BlockState::spinning && r.seen_version != version;
    if (r.state == BlockState::runnable) all.push_back({Act::run_block, i, 0, r.id, r.op->device, agent_of(r)});
    if (looks) all.push_back({Act::poll, i, 0, r.id, r.op->device, agent_of(r)});
    const size_t stores = scripted_run ? r.block.core.stores.size() : std::min<size_t>(1, r.block.core.stores.size());
    for (size_t k = 0; k < stores; k++)
      all.push_back({Act::flush, i, 2, r.id, r.op->device, agent_of(r) | uint64_t{1} << 63, k});
  }
  for (size_t i = 0; i < flights.size(); i++)
    all.push_back({Act::end_flight, i, 4, flights[i]->id, flights[i]->device, agent_of(*flights[i])});
  if (all.empty()) return false;
  take(l, all[pick(all)]);
  return true;
}

size_t World::pick(const std::vector<Choice>& all) {
  if (schedule == AR_SCHEDULE_PRIORITIES) return pick_by_priority(all);
  if (schedule == AR_SCHEDULE_SCRIPTED) return pick_by_script(all);
  size_t pick = random_below(all.size());
  if (schedule == AR_SCHEDULE_ADVERSARIAL) {
    // Newest first, copies last, one device (another from time to time) only when nothing else can run; now and then
    // anything, so that seeds differ.
    if (random_below(256) == 0) starved = static_cast<int>(random_below(devices.size()));
    const auto key = [&](const Choice& c) { return std::make_tuple(c.device == starved, c.rank, ~c.newness); };
    if (random_below(16) != 0)
      for (size_t i = 0; i < all.size(); i++)
        if (key(all[i]) < key(all[pick])) pick = i;
  }
  return pick;
}

// PCT (Burckhardt et al. 2010): the highest priority runs; about every kBetweenDrops steps the one that runs falls below all
// others. A bug that needs d changes of turn at the right places is met with a probability that falls with d, not with the
// number of interleavings.
size_t World::pick_by_priority(const std::vector<Choice>& all) {
  constexpr uint64_t kBetweenDrops = 100, kFirst = uint64_t{1} << 62;
  const auto priority = [&](const Choice& c) -> uint64_t& {
    const auto [at, fresh] = priorities.emplace(c.agent, 0);
    if (fresh) at->second = kFirst + (random() >> 2);
    return at->second;
  };
  size_t best = 0;
  for (size_t i = 1; i < all.size(); i++)
    if (priority(all[i]) > priority(all[best])) best = i;
  if (random_below(kBetweenDrops) == 0) priority(all[best]) = kFirst - 1 - lowest++;
  return best;
}

size_t World::pick_by_script(const std::vector<Choice>& all) {
  if (all.size() == 1) return 0;
  choices.push_back(static_cast<int32_t>(all.size()));
  const size_t at = scripted++;
  const int32_t pick = at < script.size() ? script[at] : 0;
  return static_cast<size_t>(std::clamp<int32_t>(pick, 0, static_cast<int32_t>(all.size()) - 1));
}

void World::take(Lock& l, const Choice& c) {
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
    case Act::flush: {
      const size_t n = blocks[c.index]->block.core.stores.size();
      flush_one(*blocks[c.index], schedule == AR_SCHEDULE_SCRIPTED      ? c.store
                                  : schedule == AR_SCHEDULE_ADVERSARIAL ? n - 1
                                                                        : random_below(n));
      break;
    }
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
    // Another process's store wakes nobody here: look again soon, without taking the core that it may need.
    work_cv.wait_for(l, foreign > 0 ? std::chrono::microseconds(50) : std::chrono::microseconds(1000));
  }
}

}  // namespace AR_NS
