// Clocks and shadows (hazards.h).
#include "hazards.h"

#include <algorithm>

#include "world.h"

namespace AR_NS {

void Knowledge::raise(std::vector<uint32_t>& v, const std::vector<uint32_t>& by) {
  if (v.size() < by.size()) v.resize(by.size());
  for (size_t i = 0; i < by.size(); i++) v[i] = std::max(v[i], by[i]);
}
static void raise_to(std::vector<uint32_t>& v, Timeline t, uint32_t step) {
  const size_t i = static_cast<size_t>(t);
  if (v.size() <= i) v.resize(i + 1);
  v[i] = std::max(v[i], step);
}
void Knowledge::set(Timeline t, uint32_t step) {
  raise_to(reads, t, step);
  raise_to(writes, t, step);
}

// ---- timelines --------------------------------------------------------------------------------------------------

// One that is free again goes on counting: what knew its old steps knows nothing of the new ones.
Timeline World::new_line() {
  if (!free_lines.empty()) {
    const auto [line, last] = free_lines.front();
    if (last == nullptr || last->state == OpState::done) {
      free_lines.pop_front();
      return line;
    }
  }
  steps.push_back(0);
  return static_cast<Timeline>(steps.size()) - 1;
}

void World::give_line(Timeline line, const OpRef& last) { free_lines.emplace_back(line, last); }

Timeline World::line_of_stream(StreamState& s) {
  if (s.line < 0) s.line = new_line();
  return s.line;
}

// ---- what flows along an order ----------------------------------------------------------------------------------

void World::tell_host(const OpRef& op) {
  if (op == nullptr || op->told) return;
  op->told = true;
  tsan_acquire(&op->state);
  host.join(op->clock);
}

// Blocks of the same number of kernels on one stream follow each other: they share a timeline.
void World::begin_block(BlockRun& r) {
  const Op& op = *r.op;
  if (!op.work->talks) return;
  const size_t at = static_cast<size_t>(op.line), block = static_cast<size_t>(r.block.core.index);
  if (block_lines.size() <= at) block_lines.resize(at + 1);
  while (block_lines[at].size() <= block) {
    const Timeline line = new_line();
    block_lines[at].push_back(line);
  }
  r.knows.line = block_lines[at][block];
  r.knows.clock = op.clock;
  r.knows.fenced = op.clock.writes;
  r.knows.clock.set(r.knows.line, ++steps[static_cast<size_t>(r.knows.line)]);
}

// The end of a kernel is a fence.
void World::end_block(BlockRun& r) {
  if (!r.op->work->talks) return;
  Knowledge::raise(r.knows.clock.writes, r.knows.behind);
  r.op->kernel->clock.join(r.knows.clock);
}

static uint32_t step_of(const BlockKnowledge& k) { return k.clock.reads[static_cast<size_t>(k.line)]; }

ReleaseRef block_tells(Block& b) {
  BlockKnowledge& k = b.core.run->knows;
  if (k.line < 0) return nullptr;
  k.moved = true;
  if (k.release == nullptr)
    k.release = std::make_shared<const Release>(Release{k.line, step_of(k), k.clock.reads, k.fenced});
  return k.release;
}

void block_learns(Block& b, const ReleaseRef& release) {
  BlockKnowledge& k = b.core.run->knows;
  if (k.line < 0) return;
  for (const ReleaseRef& j : k.joined)
    if (j == release) return;
  k.joined[k.next_joined++ % 8] = release;
  Knowledge::raise(k.clock.reads, release->reads);
  Knowledge::raise(k.behind, release->writes);
  raise_to(k.words, release->line, release->step);
  k.release.reset();
}

// What other processes know is not seen from here. Whatever one of them was told it may have passed on before it stored
// what a wait here was for: so such a wait tells of all that was told so far. That may hide a hazard, but invents none.
void block_told(const void* p, const ReleaseRef& release) {
  World& w = world();
  Lock l(w.mu);
  if (release == nullptr || release == w.last_told) return;
  const Allocation* a = w.find(p, 1);
  if (a == nullptr || !a->foreign) return;
  w.last_told = release;
  Release all = w.told != nullptr ? *w.told : *release;
  Knowledge::raise(all.reads, release->reads);
  Knowledge::raise(all.writes, release->writes);
  all.line = release->line;
  all.step = release->step;
  w.told = std::make_shared<const Release>(std::move(all));
}
void block_heard(Block& b, const void* p) {
  World& w = world();
  ReleaseRef told;
  {
    Lock l(w.mu);
    const Allocation* a = w.find(p, 1);
    if (a != nullptr && a->foreign) told = w.told;
  }
  if (told != nullptr) block_learns(b, told);
}

void block_fence(Block& b) {
  BlockKnowledge& k = b.core.run->knows;
  if (k.line < 0) return;
  Knowledge::raise(k.clock.writes, k.behind);
  k.fenced = k.clock.writes;
  k.moved = true;
  k.release.reset();
}

// ---- accesses ---------------------------------------------------------------------------------------------------

// Pieces of one range, cut at its ends.
static void cut(std::map<uintptr_t, Shadow::Span>& spans, uintptr_t at) {
  auto it = spans.upper_bound(at);
  if (it == spans.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Shadow::Span tail = it->second;
  it->second.end = at;
  spans.emplace(at, std::move(tail));
}

static bool equal(const Seen& a, const Seen& b) {
  return a.line == b.line && a.step == b.step && a.block == b.block && a.op == b.op && a.device == b.device &&
         a.stream == b.stream && a.name == b.name;
}

// Makes one of neighbours that nothing tells apart, from the one before `from` to the one behind `to`: reads of ever other
// parts of a range would cut it up without end.
static void merge(std::map<uintptr_t, Shadow::Span>& spans, uintptr_t from, uintptr_t to) {
  auto it = spans.lower_bound(from);
  if (it != spans.begin()) --it;
  while (it != spans.end()) {
    const auto next = std::next(it);
    if (next == spans.end() || next->first > to) return;
    const Shadow::Span &a = it->second, &b = next->second;
    if (a.end == next->first && equal(a.write, b.write) &&
        std::is_permutation(a.reads.begin(), a.reads.end(), b.reads.begin(), b.reads.end(), equal)) {
      it->second.end = b.end;
      spans.erase(next);
    } else {
      it = next;
    }
  }
}

void World::check(const Op& op, BlockRun* block, Allocation& a, uintptr_t from, size_t bytes, Access access,
                  bool flagged) {
  if (bytes == 0 || machine.unchecked != 0) return;
  const bool talks = block != nullptr && block->knows.line >= 0;
  Seen me;
  me.line = op.line;
  me.step = op.step;
  if (talks) {
    BlockKnowledge& k = block->knows;
    if (k.moved) {  // what was told so far does not cover what comes now
      k.moved = false;
      k.release.reset();
      k.clock.set(k.line, ++steps[static_cast<size_t>(k.line)]);
    }
    me.line = k.line;
    me.step = step_of(k);
  }
  me.block = block != nullptr ? block->block.core.index : -1;
  me.device = op.device;
  me.op = op.id;
  me.stream = op.stream;
  me.name = op.work->name;
  const Knowledge& clock = talks ? block->knows.clock : op.clock;
  const auto ordered = [&](const Seen& s, const std::vector<uint32_t>& known) {
    if (s.line < 0 || s.op < undefined || me.op < undefined) return true;
    if (s.op == me.op && !talks) return s.block == me.block;
    if (flagged && Knowledge::has(block->knows.words, s.line, s.step)) return true;
    return Knowledge::has(known, s.line, s.step);
  };
  const uintptr_t to = from + bytes;
  const auto clash = [&](const Seen& s, bool wrote, uintptr_t lo, uintptr_t hi) {
    lo = std::max(lo, from);
    hi = std::min(hi, to);
    hazard(op.device, std::string(access == Access::write ? "a write" : "a read") + " is not ordered after a " +
                          (wrote ? "write" : "read") + ": " + std::to_string(hi - lo) + " bytes at " +
                          describe(reinterpret_cast<void*>(lo)) + "\n  first  " + (wrote ? "write" : "read") + " by " +
                          seen_text(s) + "\n  second " + (access == Access::write ? "write" : "read") + " by " +
                          seen_text(me));
  };
  auto& spans = a.shadow.spans;
  if (access == Access::write) {
    cut(spans, from);
    cut(spans, to);
    auto it = spans.lower_bound(from);
    while (it != spans.end() && it->first < to) {
      const Shadow::Span& s = it->second;
      if (!ordered(s.write, clock.writes)) clash(s.write, true, it->first, s.end);
      for (const Seen& r : s.reads)
        if (!ordered(r, clock.reads)) clash(r, false, it->first, s.end);
      it = spans.erase(it);
    }
    Shadow::Span s;
    s.end = to;
    s.write = me;
    spans.emplace(from, std::move(s));
    merge(spans, from, to);
    return;
  }
  cut(spans, from);
  cut(spans, to);
  uintptr_t at = from;
  auto it = spans.lower_bound(from);
  while (at < to) {
    if (it == spans.end() || it->first > at) {  // never touched
      Shadow::Span s;
      s.end = it == spans.end() ? to : std::min(to, it->first);
      it = spans.emplace(at, std::move(s)).first;
    }
    Shadow::Span& s = it->second;
    if (!ordered(s.write, clock.writes)) clash(s.write, true, it->first, s.end);
    // A read that is known here is known to whoever learns of this one.
    bool same = false;
    for (size_t i = 0; i < s.reads.size();) {
      Seen& r = s.reads[i];
      if (r.op == me.op && !talks) {
        if (r.block != me.block) r.block = -2;
        same = true;
      } else if (Knowledge::has(clock.reads, r.line, r.step)) {
        r = s.reads.back();
        s.reads.pop_back();
        continue;
      }
      i++;
    }
    if (!same) s.reads.push_back(me);
    at = s.end;
    ++it;
  }
  merge(spans, from, to);
}

// Pinned memory may go once the host has waited for all that used it. (Freeing device memory waits by itself.)
void World::check_free(const Allocation& a, const Knowledge& known) {
  for (const auto& [at, s] : a.shadow.spans) {
    const Seen* used = nullptr;
    if (s.write.line >= 0 && !Knowledge::has(known.writes, s.write.line, s.write.step)) used = &s.write;
    for (const Seen& r : s.reads)
      if (!Knowledge::has(known.reads, r.line, r.step)) used = &r;
    if (used == nullptr) continue;
    hazard(used->device, "pinned memory was freed while it may be in use: " + describe(reinterpret_cast<void*>(at)) +
                             "\n  by " + seen_text(*used) + ", which the host did not wait for");
    return;
  }
}

// Whether the host has waited for op, or for something after it.
bool World::host_knows(const OpRef& op) const {
  if (op == nullptr || op->told) return true;
  if (op->state != OpState::done) return false;
  const auto within = [](const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    for (size_t i = 0; i < a.size(); i++)
      if (a[i] > (i < b.size() ? b[i] : 0)) return false;
    return true;
  };
  return within(op->clock.reads, host.reads) && within(op->clock.writes, host.writes);
}

void World::hazard(int device, const std::string& text) {
  if (machine.unchecked != 0) return;
  if (hazards++ == 0)
    report = "hazard at " + std::to_string(now_us) + " us, seed " + std::to_string(machine.seed) + ": " + text;
  devices[static_cast<size_t>(device)].lost = kHazard;
}

void block_uses(Block& b, const void* p, int64_t bytes, bool write) {
  World& w = world();
  Lock l(w.mu);
  BlockRun& r = *b.core.run;
  Allocation* a = w.find(p, static_cast<size_t>(bytes));
  if (a != nullptr)
    w.check(*r.op, &r, *a, reinterpret_cast<uintptr_t>(p), static_cast<size_t>(bytes),
            write ? Access::write : Access::read, false);
}

void block_took(Block& b, const void* p, int64_t bytes) {
  if (bytes <= 0) return;
  World& w = world();
  Lock l(w.mu);
  BlockRun& r = *b.core.run;
  Allocation* a = w.find(p, static_cast<size_t>(bytes));
  if (a != nullptr)
    w.check(*r.op, &r, *a, reinterpret_cast<uintptr_t>(p), static_cast<size_t>(bytes), Access::read, true);
}

}  // namespace AR_NS
