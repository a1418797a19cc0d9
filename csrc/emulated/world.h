// The emulated machine's inside: one World under one mutex.
//
// Everything enqueued is an Op that knows what it waits for; a stream is only its newest op. step() takes one action
// (start an op, end a copy, run a block to its next wait, ...), chosen by the schedule; it is called by the worker
// thread (background drive) or by host calls that wait or query (stepped drive). Kernel code, large copies and host
// functions run with the mutex released and `executing` set, so that only one thread at a time runs devices.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../include/allreduce_emulated.h"
#include "../platform/platform.h"
#include "fiber.h"
#include "hazards.h"
#include "tsan.h"

namespace AR_NS {

constexpr unsigned char kPoison = 0xA5;  // what fresh memory and the destination of a copy in flight hold
constexpr double kNever = 1e300;

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// ---- memory -----------------------------------------------------------------------------------------------------

enum class MemoryKind { device, pinned };
// Who else has it: nobody; the program that registered it, and perhaps other processes; whoever opened it; its owner.
enum class Origin { own, registered, exported, imported };
struct Allocation {
  uintptr_t base = 0;
  size_t bytes = 0;
  MemoryKind kind = MemoryKind::device;
  Origin origin = Origin::own;
  int fd = -1;  // exported: the file behind it
  int device = -1;
  uint64_t id = 0;
  std::vector<Line> lines;  // see NearMemory; made by the first block that needs it
  Shadow shadow;
  bool foreign() const { return origin != Origin::own; }
};
enum class Access { read, write };

// ---- ops --------------------------------------------------------------------------------------------------------

struct Op;
using OpRef = std::shared_ptr<Op>;
struct UserObject {
  void* arg;
  void (*drop)(void*);
};

enum class WorkKind { marker, kernel, copy, fill, host };

// What an op does. Immutable, so a graph's node and the ops of all its launches share one.
struct Work {
  WorkKind kind = WorkKind::marker;
  const char* name = "";
  // kernel
  std::unique_ptr<unsigned char[]> params;
  void (*body)(const void*, Block&) = nullptr;
  int blocks = 0, threads = 0;
  bool talks = false;
  // copy, fill
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  CopyKind direction = CopyKind::device_to_device;
  bool pageable = false;  // copy_blocking: the host side may be any memory
  int byte = 0;
  // host
  void (*fn)(void*) = nullptr;
  void* arg = nullptr;
};
using WorkRef = std::shared_ptr<const Work>;

enum class OpState { waiting, ready, running, done };
enum class FlightPhase { latency, flowing, timed };

// A copy (or fill) between its start and its end.
struct Flight {
  FlightPhase phase = FlightPhase::latency;
  double left = 0;       // bytes
  double rate = 0;       // bytes per us, by links.cpp
  double next_us = 0;    // end of latency or of a timed fill
  int up_device = -1;    // device whose device-to-host direction it uses
  int down_device = -1;  // device whose host-to-device direction it uses
  double own_limit = 0;  // bytes per us
  int engine = -1;       // of op->device; -1: none
};

struct KernelRun {
  std::vector<int> order;  // blocks not yet resident, last first
  int live = 0;
  double end_us = 0;
  bool begun = false;   // a block has run
  bool ending = false;  // all blocks are done; the kernel ends at end_us
  Knowledge clock;      // what its blocks knew at their ends
};

struct Op : std::enable_shared_from_this<Op> {
  uint64_t id = 0;
  WorkRef work;
  int device = 0;
  uint64_t stream = 0;
  Timeline line = -1;
  uint32_t step = 0;         // its accesses', on its line; 0: it has not started
  Knowledge clock;           // while it waits and runs: what came before it; once done: that and what it did
  bool told = false;         // the host knows of its end
  std::vector<OpRef> after;  // TSan: all that it needs, done or not
  OpState state = OpState::waiting;
  int missing = 0;
  std::vector<OpRef> needs;                         // for reports; dropped when done
  std::vector<std::pair<OpRef, double>> followers;  // and the lag until they see our end
  double ready_us = 0, start_us = 0, end_us = 0;
  std::unique_ptr<Flight> flight;
  std::unique_ptr<KernelRun> kernel;
  std::vector<std::shared_ptr<UserObject>> keeps;  // a graph launch in flight keeps the graph's user objects
};

enum class BlockState { runnable, spinning, draining, finished };
struct BlockRun {
  Block block;
  Op* op = nullptr;
  Fiber* fiber = nullptr;
  BlockState state = BlockState::runnable;
  uint64_t id = 0;
  BlockKnowledge knows;  // of a kernel that talks
  // while spinning
  bool (*holds)(void*) = nullptr;
  void* pred = nullptr;
  Order order = Order::none;
  const void* address = nullptr;
  SpinLimit limit{nullptr, 0};
  double wait_us = 0;
  Clock::time_point wait_real;
  uint64_t seen_version = 0;
  Spin result = Spin::ready;
};

// ---- streams, events, captures, graphs --------------------------------------------------------------------------

struct GraphNode {
  WorkRef work;
  int device;
  uint64_t stream;
  std::vector<int> needs;
};
struct GraphBody {
  std::vector<GraphNode> nodes;
};
struct GraphState {
  std::shared_ptr<GraphBody> body;
  std::vector<std::shared_ptr<UserObject>> keeps;
};
struct GraphExecState {
  std::shared_ptr<const GraphBody> body;
  std::vector<std::shared_ptr<UserObject>> keeps;
  OpRef last;
  std::vector<Timeline> lines;  // of each node
};

struct Capture {
  uint64_t id = 0;
  uint64_t graph = 0;   // handle; alive during the capture
  uint64_t origin = 0;  // stream
  bool active = true;   // false: invalidated
  bool ended = false;
  std::shared_ptr<GraphBody> body;
};
using CaptureRef = std::shared_ptr<Capture>;

struct StreamState {
  uint64_t handle = 0;  // 0: a device's legacy default stream
  int device = 0;
  OpRef tail;
  Timeline line = -1;  // made with the first op
  CaptureRef capture;
  std::vector<int> frontier;  // nodes that the next captured op follows
};
struct EventState {
  bool timing = false;
  int device = 0;
  OpRef op;            // the record current now; null: none, or a captured one
  CaptureRef capture;  // set if last recorded in a capture
  std::vector<int> frontier;
};

// ---- the machine ------------------------------------------------------------------------------------------------

struct Device {
  ar_emulated_device spec;
  StreamState legacy;
  int64_t used_bytes = 0;
  int resident = 0;
  std::deque<OpRef> admitting;           // started kernels with blocks that are not resident yet
  Knowledge done;                        // all that has ended on it
  OpRef engine[3];                       // busy copy engines: host-to-device, device-to-host, device-to-device
  std::map<uint64_t, OpRef> unfinished;  // by op id
  Code lost = kOk;                       // sticky
  int64_t lose_after = -1;               // ops to start before it is lost; -1: it stays
  bool gone = false;                     // lost: its ops end without effect
};

enum class Act { none, end_flight, flow, end_kernel, run_block, poll, flush, start, expire };
// What can happen next under a seeded schedule.
struct Choice {
  Act act;
  size_t index;
  int rank;  // adversarial: lower comes first
  uint64_t newness;
  int device;
  uint64_t agent;    // the stream or block whose turn it would be
  size_t store = 0;  // flush, scripted: which
};

struct HostThread {
  int waiting = 0;
  Clock::time_point last;
};

struct World {
  std::mutex mu;
  std::condition_variable work_cv;  // for the worker
  std::condition_variable host_cv;  // for waiting hosts
  ar_emulated_machine machine;
  uint64_t epoch = 1;  // of the machine; a new one makes old current devices 0
  std::vector<Device> devices;
  bool stepped = false, weak = false;
  int schedule = AR_SCHEDULE_FIFO;
  bool peer_enabled[AR_EMULATED_MAX_DEVICES][AR_EMULATED_MAX_DEVICES] = {};

  // peers.cpp
  int peer_fault[AR_EMULATED_MAX_DEVICES][AR_EMULATED_MAX_DEVICES] = {};
  std::map<std::pair<int, uint64_t>, std::vector<unsigned char>> mirrors;  // by device and allocation
  struct LateStore {
    uint64_t op;
    void* to;
    Vec16 value;
  };
  std::vector<LateStore> late;
  int peer_fault_of(int device, const Allocation* a) const;
  double peer_rate(int device, int peer) const;
  std::vector<unsigned char>& mirror_of(int device, const Allocation& a);
  void deliver(const Op& op);
  bool copy_goes_wrong(const Op& op, bool ends);

  // handles: one counter, so none is ever used twice
  uint64_t next_handle = 1;
  std::unordered_map<uint64_t, StreamState> streams;
  std::unordered_map<uint64_t, EventState> events;
  std::unordered_map<uint64_t, GraphState> graphs;
  std::unordered_map<uint64_t, GraphExecState> execs;

  // memory.cpp
  std::map<uintptr_t, Allocation> memory;
  std::map<uintptr_t, Allocation> freed;            // tombstones, until the addresses are used again
  std::deque<std::pair<void*, size_t>> quarantine;  // freed but not given back yet
  size_t quarantine_bytes = 0;
  int foreign = 0;             // allocations that are not its own alone
  ReleaseRef last_told, told;  // all that stores to them have told

  // hazards.cpp
  std::vector<uint32_t> steps;                        // by timeline: the last step given out
  std::deque<std::pair<Timeline, OpRef>> free_lines;  // of streams and graphs that are gone, after their last op
  std::vector<std::vector<Timeline>> block_lines;     // by timeline and block
  Knowledge host;                                     // what host calls have waited for
  int64_t hazards = 0;
  TsanStreams tsan;
  uint64_t undefined = 0;  // of the ops before this one, some wait expired: what they do is undefined, and no hazard

  // ops
  uint64_t next_op = 1;
  std::vector<OpRef> ready;
  std::vector<OpRef> flights;
  std::vector<OpRef> kernels;                     // running
  std::vector<std::unique_ptr<BlockRun>> blocks;  // resident
  uint64_t next_block = 1;
  BlockRun* current = nullptr;  // the block whose fiber runs
  FiberHost fibers;
  bool executing = false;  // a thread runs device work with the mutex released
  uint64_t version = 1;    // of all memory; a waiter looks again when it has changed
  double now_us = 0;
  double flow_us = 0;  // flights' `left` is as of this time
  uint64_t rng = 0;
  int starved = 0;
  std::unordered_map<uint64_t, uint64_t> priorities;  // by stream or block
  uint64_t lowest = 0;                                // the priority that the next to fall gets
  std::vector<int32_t> script, choices;
  size_t scripted = 0;  // picks used

  // drives
  std::thread worker;
  bool worker_runs = false, stop = false;
  bool ending = false;  // the process's exit handlers have run
  std::unordered_map<uint64_t, HostThread> hosts;
  int waiters = 0;
  int idle_queries = 0;  // in a row, with nothing to run
  Clock::time_point last_progress;
  std::vector<UserObject> dropped;  // to be dropped once the mutex is free

  // controls
  int64_t fault[AR_CALL_KINDS] = {};
  std::vector<int> traced;  // devices
  std::vector<ar_trace_record> trace;
  std::string report;
  bool reported_residency = false;

  // world.cpp
  void build(const ar_emulated_machine& m);
  void tear_down(Lock& l);
  void stop_worker(Lock& l);
  bool start_worker();  // false: the process is ending, the caller runs the devices itself
  bool injected(int call);
  size_t live_objects() const { return memory.size() + streams.size() + events.size() + graphs.size() + execs.size(); }
  uint64_t new_handle() { return (next_handle++) << 4; }
  StreamState* stream(Stream s);  // null: no such handle
  EventState* event(Event e);

  // memory.cpp
  Allocation* find(const void* p, size_t bytes);
  bool reaches(int device, const Allocation& a) const;
  std::string describe(const void* p) const;
  Code allocate(void** p, size_t bytes, MemoryKind kind, int device);
  void adopt(void* p, size_t bytes, Allocation a);
  void release(uintptr_t base);
  void release_all();
  double touch(const Op& op, BlockRun* block, const void* p, size_t bytes, Access access, bool* valid);

  // hazards.cpp
  Timeline new_line();
  void give_line(Timeline line, const OpRef& last);
  void begin_block(BlockRun& r);
  void end_block(BlockRun& r);
  void tell_host(const OpRef& op);
  void check(const Op& op, BlockRun* block, Allocation& a, uintptr_t from, size_t bytes, Access access, bool flagged);
  bool host_knows(const OpRef& op) const;
  void check_free(const Allocation& a, const Knowledge& known);
  void hazard(int device, const std::string& text);

  // ops.cpp
  OpRef make_op(WorkRef work, int device, uint64_t stream, Timeline line);
  Timeline line_of_stream(StreamState& s);
  void need(const OpRef& op, const OpRef& before, double lag);
  void submit(const OpRef& op);
  Code enqueue(StreamState& s, WorkRef work, OpRef* made = nullptr);
  void start(Lock& l, const OpRef& op, double at);
  void finish(const OpRef& op, double at);
  void lose(int device, double at);
  void effect(const OpRef& op, void* to, const void* from, int byte, size_t bytes);
  void end_flight(Lock& l, const OpRef& op, double at);
  bool engine_free(const Op& op) const;
  template <class F>
  void unlocked(Lock& l, F f);

  // links.cpp
  void set_rates();
  void flow_to(double at);
  double alone_us(const Op& op) const;

  // blocks.cpp
  void admit(Device& d, double at);
  void run_block(Lock& l, BlockRun& r);
  bool poll(Lock& l, BlockRun& r, bool last_chance);
  void flush_one(BlockRun& r, size_t store);
  void retire(BlockRun& r);

  // scheduler.cpp
  uint64_t random();
  uint64_t random_below(uint64_t n) { return n < 2 ? 0 : random() % n; }
  bool step(Lock& l);
  bool step_fifo(Lock& l);
  bool step_seeded(Lock& l);
  void take(Lock& l, const Choice& c);
  size_t pick(const std::vector<Choice>& choices);
  size_t pick_by_priority(const std::vector<Choice>& choices);
  size_t pick_by_script(const std::vector<Choice>& choices);
  bool poll_waiters(Lock& l);
  bool jump(Lock& l);
  void work_loop();
  bool others_idle();
  template <class F>
  Code wait(Lock& l, F done);
  template <class F>
  bool query(Lock& l, F done);
  void drop_released(Lock& l);

  // report.cpp
  void report_deadlock();
  void report_residency();
  void misuse(const std::string& text);
  std::string op_text(const Op& op) const;
  std::string seen_text(const Seen& s) const;
  std::string waiters_text() const;

  // capture.cpp
  Code capture_op(StreamState& s, WorkRef work);
  Code capture_wait(StreamState& s, EventState& e);
  std::shared_ptr<UserObject> keep(void* arg, void (*drop)(void*));
  void invalidate(Capture& c);
  void leave_capture(const CaptureRef& c);
};

World& world();
void default_machine(ar_emulated_machine* m, int n);

// Held by every entry point: the mutex, the thread's presence, and what must happen after the mutex is free.
struct Guard {
  World& w;
  Lock l;
  Guard();
  ~Guard();
};

Code free_memory(void* p, MemoryKind kind, Origin origin);
int current_device(World& w);  // of the calling thread
uint64_t host_thread_id();

template <class H>
H as_handle(uint64_t v) {
  return reinterpret_cast<H>(static_cast<uintptr_t>(v));
}
template <class H>
uint64_t handle_value(H h) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(h));
}

template <class F>
void World::unlocked(Lock& l, F f) {
  executing = true;
  l.unlock();
  f();
  l.lock();
  executing = false;
  if (waiters > 0) host_cv.notify_all();
}

}  // namespace AR_NS

#include "drive.h"
