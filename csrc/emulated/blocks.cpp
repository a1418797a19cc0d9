// Kernels' blocks: residency, fibers, waits, and the store buffers of weak memory.
#include <algorithm>

#include "world.h"

namespace AR_NS {

// More than this many stores are never held back at once: enough to hide a payload's tail behind its flag, few enough
// to search at every load.
constexpr size_t kBufferedStores = 64;

struct TrapInPoll {
  Code code;
};

static void block_main(void* arg) {
  BlockRun& r = *static_cast<BlockRun*>(arg);
  r.op->work->body(r.op->work->params.get(), r.block);
  r.state = BlockState::draining;
  world().fibers.leave(r.fiber, true);
}

// The room a block takes: an SM has two places, and a block of more than 512 threads takes both (kernels/load.h).
static int places(const Device& d, const Work& work) {
  return std::min(work.threads > 512 ? 2 : 1, d.spec.resident_blocks);
}

// Makes blocks resident while the device has room, kernels in the order they started.
void World::admit(Device& d, double at) {
  while (!d.admitting.empty() && d.resident + places(d, *d.admitting.front()->work) <= d.spec.resident_blocks) {
    OpRef op = d.admitting.front();
    KernelRun& k = *op->kernel;
    auto r = std::make_unique<BlockRun>();
    BlockCore& c = r->block.core;
    c.index = k.order.back();
    c.count = op->work->blocks;
    c.threads = op->work->threads;
    c.weak = weak;
    c.shared = foreign > 0;
    c.flag_us = machine.flag_us;
    c.clock_us = std::max(at, op->start_us + machine.launch_us);
    c.run = r.get();
    r->op = op.get();
    r->id = next_block++;
    r->fiber = fibers.take(block_main, r.get());
    if (r->fiber == nullptr) return;  // tried again when a block ends
    begin_block(*r);
    k.order.pop_back();
    k.live++;
    d.resident += places(d, *op->work);
    blocks.push_back(std::move(r));
    if (k.order.empty()) d.admitting.pop_front();
  }
}

void World::run_block(Lock& l, BlockRun& r) {
  current = &r;
  r.op->kernel->begun = true;
  r.state = BlockState::runnable;
  unlocked(l, [&] { fibers.resume(r.fiber); });
  current = nullptr;
  version++;
  if (r.state == BlockState::draining && r.block.core.stores.empty()) r.state = BlockState::finished;
  if (r.state == BlockState::finished) retire(r);
}

void World::retire(BlockRun& r) {
  Op& op = *r.op;
  KernelRun& k = *op.kernel;
  Device& d = devices[static_cast<size_t>(op.device)];
  const double at = r.block.core.clock_us;
  k.end_us = std::max(k.end_us, at);
  k.live--;
  end_block(r);
  d.resident -= places(d, *op.work);
  fibers.give(r.fiber);
  if (k.live == 0 && k.order.empty()) k.ending = true;
  blocks.erase(std::find_if(blocks.begin(), blocks.end(), [&](const auto& b) { return b.get() == &r; }));
  admit(d, at);
}

// Looks whether a waiting block may go on. It is evaluated from here, not on the fiber: what it captured is on the
// fiber's stack and stays where it is.
bool World::poll(Lock& l, BlockRun& r, bool expire) {
  bool go = false;
  r.seen_version = version;
  current = &r;
  unlocked(l, [&] {
    try {
      if (r.holds(r.pred)) {
        r.result = Spin::ready;
        go = true;
        block_acquire(r.block, r.address);
      } else if (r.limit.abort != nullptr && __atomic_load_n(r.limit.abort, __ATOMIC_ACQUIRE) != 0) {
        r.result = Spin::aborted;
        go = true;
      } else if (expire || (!stepped && r.limit.timeout_ns < static_cast<uint64_t>(INT64_MAX) &&
                            Clock::now() - r.wait_real > std::chrono::nanoseconds(r.limit.timeout_ns))) {
        r.result = Spin::expired;
        go = true;
      }
    } catch (const TrapInPoll&) {
      r.state = BlockState::finished;
    }
  });
  current = nullptr;
  if (r.state == BlockState::finished) {
    retire(r);
    return true;
  }
  if (!go) return false;
  if (r.result != Spin::ready) undefined = next_op;
  r.state = BlockState::runnable;
  BlockCore& c = r.block.core;
  c.clock_us = std::max(c.clock_us, now_us);
  return true;
}

// ---- store buffers ----------------------------------------------------------------------------------------------

static void make_visible(const BufferedStore& s) {
  if (s.bytes == 8) {
    __atomic_store_n(reinterpret_cast<Word64*>(s.address), s.value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(reinterpret_cast<uint32_t*>(s.address), static_cast<uint32_t>(s.value), __ATOMIC_RELEASE);
  }
  if (s.line != nullptr) s.line->release = s.release;
}

// One store becomes visible; stores to the same word keep their order.
static void emit(std::vector<BufferedStore>& stores, size_t i) {
  const uintptr_t word = stores[i].address / 8;
  for (size_t k = 0; k < i; k++)
    if (stores[k].address / 8 == word) {
      i = k;
      break;
    }
  make_visible(stores[i]);
  stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(i));
}

void World::flush_one(BlockRun& r, size_t store) {
  auto& stores = r.block.core.stores;
  emit(stores, store);
  version++;
  if (stores.empty() && r.state == BlockState::draining) {
    r.state = BlockState::finished;
    retire(r);
  }
}

void block_buffer(Block& b, void* p, const void* value, int bytes) {
  auto& stores = b.core.stores;
  World& w = world();
  Line* const line = line_of(b, p);  // 16 bytes, aligned, are in one
  const ReleaseRef tells = block_tells(b);
  for (int at = 0; at < bytes; at += 8) {
    BufferedStore s{reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(at), 0, std::min(8, bytes - at), line,
                    tells};
    std::memcpy(&s.value, static_cast<const char*>(value) + at, static_cast<size_t>(s.bytes));
    stores.push_back(s);
  }
  while (stores.size() > kBufferedStores)
    emit(stores, w.schedule == AR_SCHEDULE_ADVERSARIAL ? 0 : w.random_below(stores.size()));
}

uint64_t block_forward(const Block& b, uintptr_t address, int bytes, uint64_t value) {
  // A processor sees its own stores. (A 4-byte store seen by an 8-byte load is merged in.)
  for (const BufferedStore& s : b.core.stores) {
    if (s.address / 8 != address / 8) continue;
    unsigned char word[8] = {};
    std::memcpy(word + address % 8, &value, static_cast<size_t>(bytes));
    std::memcpy(word + s.address % 8, &s.value, static_cast<size_t>(s.bytes));
    value = 0;
    std::memcpy(&value, word + address % 8, static_cast<size_t>(bytes));
  }
  return value;
}

void block_flush(Block& b) {
  for (const BufferedStore& s : b.core.stores) make_visible(s);
  b.core.stores.clear();
}

// ---- on the fiber -----------------------------------------------------------------------------------------------

void block_interrupt(Block& b) {
  World& w = world();
  BlockRun& r = *b.core.run;
  if (!b.core.weak || (w.schedule != AR_SCHEDULE_SCRIPTED && w.random_below(2) == 0)) return;
  r.state = BlockState::runnable;
  w.fibers.leave(r.fiber, false);
}

Spin block_wait(Block& b, Order o, const SpinLimit& limit, const void* address, bool (*holds)(void*), void* pred) {
  BlockRun& r = *b.core.run;
  // As on a GPU, the abort word is seen although the wait just began.
  World& w = world();
  if (limit.abort != nullptr && __atomic_load_n(limit.abort, __ATOMIC_ACQUIRE) != 0) {
    w.undefined = w.next_op;
    return Spin::aborted;
  }
  r.order = o;
  r.limit = limit;
  r.address = address;
  r.holds = holds;
  r.pred = pred;
  r.wait_us = b.core.clock_us;
  r.wait_real = Clock::now();
  r.seen_version = w.version;
  r.state = BlockState::spinning;
  w.fibers.leave(r.fiber, false);
  return r.result;
}

void block_trap(Block& b, Code code, const void* address, const char* what) {
  World& w = world();
  BlockRun& r = *b.core.run;
  {
    Lock l(w.mu);
    w.misuse(w.op_text(*r.op) + ", block " + std::to_string(b.core.index) + ": " + what + " at " + w.describe(address));
    w.devices[static_cast<size_t>(r.op->device)].lost = code;
  }
  if (r.state == BlockState::spinning) throw TrapInPoll{code};  // called by poll, not on the fiber
  r.state = BlockState::finished;
  b.core.stores.clear();
  for (;;) w.fibers.leave(r.fiber, true);
}

void block_touch(Block& b, const void* p, int64_t bytes, bool write) {
  if (bytes <= 0) return;
  World& w = world();
  bool valid = false;
  {
    Lock l(w.mu);
    b.core.clock_us += w.touch(*b.core.run->op, b.core.run, p, static_cast<size_t>(bytes),
                               write ? Access::write : Access::read, &valid);
  }
  if (!valid) block_trap(b, kIllegalAddress, p, write ? "a write" : "a read");
}

Line* block_line(Block& b, uintptr_t address) {
  World& w = world();
  Lock l(w.mu);
  Allocation* a = w.find(reinterpret_cast<void*>(address), 1);
  if (a == nullptr) return nullptr;
  if (a->lines.empty()) a->lines.resize((a->bytes >> kLineShift) + 1);
  NearMemory& n = b.core.near[b.core.near_next];
  b.core.near_next = (b.core.near_next + 1) % 4;
  n = {a->base, a->bytes, a->lines.data()};
  return n.lines + ((address - a->base) >> kLineShift);
}

uint64_t device_clock_ns() {
  World& w = world();
  if (w.stepped && w.current != nullptr) return static_cast<uint64_t>(w.current->block.core.clock_us * 1e3);
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count());
}

}  // namespace AR_NS
