// Hazards: accesses of devices that nothing orders, found by vector clocks over byte ranges.
//
// Every op, block and host call knows a Knowledge (vector clock): of each timeline (a stream, a captured stream of one executable, a block of
// a kernel that talks to others) up to which step its reads are over and its writes have arrived. Knowledge flows along
// what orders work: stream order, events, graph edges, host calls that wait, flags. Each byte remembers its last write
// and the reads since (Shadow). An access that does not know what it conflicts with is a hazard, whatever the schedule
// happened to do this time.
//
// Two vectors, because a flag raised without a fence tells its reader that the reads before it are over (a load has its
// value before a later store can be seen), not that the writes before it have arrived. And a flag seen tells of the
// writes behind it only once the reader has passed a fence. What a kernel's end, a copy's end and an event tell is both.
//
// Once a wait has expired or was aborted, outputs are undefined (spec 6): of the ops enqueued before that nothing more is
// reported.
//
// What it does not see: threads of one block against each other (compute-sanitizer's racecheck and TSan do), memory that is
// not the emulated machine's, and which of two host threads called first (the host is one timeline: a call that has
// returned is before one made later).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "../platform/platform.h"

namespace AR_NS {

using Timeline = int32_t;

struct Knowledge {
  std::vector<uint32_t> reads, writes;  // by timeline: the last step that is known

  static void raise(std::vector<uint32_t>& v, const std::vector<uint32_t>& by);
  void join(const Knowledge& o) {
    raise(reads, o.reads);
    raise(writes, o.writes);
  }
  void set(Timeline t, uint32_t step);
  static bool has(const std::vector<uint32_t>& v, Timeline t, uint32_t step) {
    return static_cast<size_t>(t) < v.size() && v[static_cast<size_t>(t)] >= step;
  }
};

// What a store tells whoever sees it.
struct Release {
  Timeline line;
  uint32_t step;
  std::vector<uint32_t> reads, writes;
};

// What a block that talks to others knows beside its clock.
struct BlockKnowledge {
  Knowledge clock;
  Timeline line = -1;
  bool moved = false;                      // released or fenced since the last access: the next one is a new step
  std::vector<uint32_t> fenced;            // writes known at the last fence: what a flag tells of
  std::vector<uint32_t> behind;            // writes that flags told of, not yet used: no fence since
  std::vector<uint32_t> words;             // writes seen word by word (data and flag in one)
  std::shared_ptr<const Release> release;  // of the present moment; null: make one
  std::shared_ptr<const Release> joined[8];
  int next_joined = 0;
};

struct Seen {
  Timeline line = -1;
  uint32_t step = 0;
  int32_t block = -1;  // -1: no kernel; -2: several blocks
  int32_t device = -1;
  uint64_t op = 0, stream = 0;
  const char* name = "";
};

struct Shadow {
  struct Span {
    uintptr_t end = 0;
    Seen write;
    std::vector<Seen> reads;
  };
  std::map<uintptr_t, Span> spans;  // by start
};

}  // namespace AR_NS
